# SPDX-License-Identifier: Apache-2.0
"""Host cost of one redistribute call, against the raw collective and torch's redistribute.

One process stands for rank 0 of 8 on torch's "fake" process group, whose collectives return at
once, and the tensors are tiny: what is measured is the work of the host. "raw" is what one writes
by hand on plain tensors: the collective with its copies (for a local move the narrow, fill or
scaling); in training one autograd.Function around it whose backward is the raw adjoint. Before
anything is timed, local shapes, gradients' shapes and the collectives issued are compared.
Transitions to Partial exist in ours alone: torch refuses them.

    python benchmarks/redistribute.py
    python benchmarks/redistribute.py --only "P -> R" --mode training

Bursts are interleaved, in CPU time with the garbage collector off. Ratios are those of the minima;
"median" columns are microseconds.
"""

from collections.abc import Callable
from dataclasses import asdict

import _harness
import raw_moves
import torch
from _harness import Candidate, Row
from rich.table import Table
from torch import Tensor
from torch.distributed import device_mesh as torch_mesh
from torch.distributed import tensor as torch_api

import hyper_parallel

NUM_RANKS = 8
SHAPE = (16, 16)


def _placement(api, name: str):
    """Return a placement of either library."""
    if name.startswith("S"):
        return api.Shard(int(name[2]))
    return api.Replicate() if name == "R" else api.Partial("avg" if "avg" in name else "sum")


def _local(name: str) -> Tensor:
    """Return this rank's part of a tensor of global shape SHAPE."""
    shape = list(SHAPE)
    if name.startswith("S"):
        shape[int(name[2])] //= NUM_RANKS
    return torch.ones(shape)


def _training(call: Callable[[Tensor], Tensor], x: Tensor, seed: Tensor) -> Callable[[], Tensor]:
    """Return one call forward and backward on the leaf `x`."""
    x.requires_grad_()

    def train() -> Tensor:
        x.grad = None
        out = call(x)
        out.backward(seed)
        return out

    train.leaf = x
    return train


def _call_raw(src: str, dst: str, training: bool) -> Callable[[], Tensor]:
    move = raw_moves.MOVES[src, dst]
    x = _local(src)
    if not training:
        return lambda: move(x, NUM_RANKS)
    function = raw_moves.with_backward(move, raw_moves.MOVES.get(raw_moves.adjoint(src, dst)))
    seed = torch.ones_like(move(x, NUM_RANKS))
    return _training(lambda leaf: function.apply(leaf, NUM_RANKS), _local(src), seed)


def _call_dtensor(api, mesh, src: str, dst: str, training: bool) -> Callable[[], Tensor]:
    x = api.DTensor.from_local(_local(src), mesh, [_placement(api, src)])
    target = [_placement(api, dst)]
    if not training:
        return lambda: x.redistribute(mesh, target)
    lies = "R" if dst.startswith("P") else dst
    seed = api.DTensor.from_local(_local(lies), mesh, [_placement(api, lies)])
    return _training(lambda leaf: leaf.redistribute(mesh, target), x.detach(), seed)


def _shapes(call: Callable[[], Tensor]) -> list[tuple[int, ...]]:
    shapes = [tuple(_harness.local_of(call()).shape)]
    leaf = getattr(call, "leaf", None)
    return shapes if leaf is None else [*shapes, tuple(_harness.local_of(leaf.grad).shape)]


def run_case(src: str, dst: str, *, training: bool, **effort: float) -> list[Row]:
    """Measure raw, ours and (where it has the move) torch's."""
    ours = hyper_parallel.init_device_mesh("cpu", (NUM_RANKS,))
    calls = {
        "raw": _call_raw(src, dst, training),
        "hyper_parallel": _call_dtensor(hyper_parallel, ours, src, dst, training),
    }
    if not dst.startswith("P"):
        mesh = torch_mesh.init_device_mesh("cpu", (NUM_RANKS,))
        calls["torch"] = _call_dtensor(torch_api, mesh, src, dst, training)
    candidates = [
        Candidate(name, call, _harness.count_collectives(call)) for name, call in calls.items()
    ]
    shapes, issued = _shapes(calls["raw"]), candidates[0].collectives
    for candidate in candidates:
        got = _shapes(candidate.call)
        if got != shapes:
            raise SystemExit(f"{candidate.name}, {src} -> {dst}: {got} must be {shapes}.")
        if candidate.name != "torch" and candidate.collectives != issued:
            raise SystemExit(f"{src} -> {dst}: {candidate.collectives} must be {issued}.")
    return _harness.measure(candidates, **effort)


def _table(cases: list[dict]) -> Table:
    table = Table()
    for heading in ("move", "mode"):
        table.add_column(heading)
    for heading in ("raw min", "ours min", "torch min", "raw med", "ours med", "torch med"):
        table.add_column(heading, justify="right")
    for heading in ("ours / raw", "ours / torch"):
        table.add_column(heading, justify="right")
    for case in cases:
        raw, ours, torchs = (*case["rows"], None)[:3]
        rows = (raw, ours, torchs)
        mins = ["-" if row is None else f"{row.min_us:.1f}" for row in rows]
        medians = ["-" if row is None else f"{row.median_us:.1f}" for row in rows]
        against = "-" if torchs is None else f"{ours.min_us / torchs.min_us:.2f}"
        table.add_row(
            case["move"], case["mode"], *mins, *medians, f"{ours.ratio_of_mins:.2f}", against
        )
    return table


def main() -> None:
    """Run the cases that were asked for and print one table."""
    parser = _harness.make_parser(__doc__, repeats=60)
    moves = {f"{src} -> {dst}": (src, dst) for src, dst in raw_moves.MOVES if "avg" not in src}
    parser.add_argument("--only", choices=tuple(moves), help="one move instead of all")
    parser.add_argument("--mode", choices=("inference", "training"), help="one mode only")
    options = parser.parse_args()
    cases = []
    with _harness.fake_rank(NUM_RANKS):
        for move in [options.only] if options.only else moves:
            for mode in [options.mode] if options.mode else ("inference", "training"):
                rows = run_case(
                    *moves[move], training=mode == "training", **_harness.effort(options)
                )
                cases.append({"move": move, "mode": mode, "rows": rows})
    plain = [case | {"rows": [asdict(row) for row in case["rows"]]} for case in cases]
    facts = {"num_ranks": NUM_RANKS, "shape": SHAPE}
    about = "microseconds of CPU time per call"
    _harness.report(options, about, [_table(cases)], plain, **facts)


if __name__ == "__main__":
    main()
