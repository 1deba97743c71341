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

import argparse
import json
import logging
import platform
from collections.abc import Callable
from dataclasses import asdict

import raw_moves
import torch
import torch.distributed as dist
from _harness import Candidate, Row, count_collectives, measure, row_of
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed import device_mesh as torch_mesh
from torch.distributed import tensor as torch_api
from torch.testing._internal.distributed.fake_pg import FakeStore

import hyper_parallel

NUM_RANKS = 8
SHAPE = (16, 16)
LAYOUTS = ("R", "S(0)", "S(1)", "P", "P(avg)")


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


def _call_raw(src: str, dst: str, training: bool) -> Callable[[], Tensor]:
    move = raw_moves.MOVES[src, dst]
    x = _local(src)
    if not training:
        return lambda: move(x, NUM_RANKS)
    function = raw_moves.with_backward(move, raw_moves.MOVES.get(raw_moves.adjoint(src, dst)))
    x.requires_grad_()
    seed = torch.ones_like(move(x.detach(), NUM_RANKS))

    def train() -> Tensor:
        x.grad = None
        out = function.apply(x, NUM_RANKS)
        out.backward(seed)
        return out

    train.leaf = x
    return train


def _call_dtensor(api, mesh, src: str, dst: str, training: bool) -> Callable[[], Tensor]:
    x = api.DTensor.from_local(_local(src), mesh, [_placement(api, src)])
    target = [_placement(api, dst)]
    if not training:
        return lambda: x.redistribute(mesh, target)
    x = x.detach().requires_grad_()
    lies = "R" if dst.startswith("P") else dst
    seed = api.DTensor.from_local(_local(lies), mesh, [_placement(api, lies)])

    def train() -> Tensor:
        x.grad = None
        out = x.redistribute(mesh, target)
        out.backward(seed)
        return out

    train.leaf = x
    return train


def _finished(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def _shapes(call: Callable[[], Tensor]) -> list[tuple[int, ...]]:
    shapes = [tuple(_finished(call()).shape)]
    leaf = getattr(call, "leaf", None)
    return shapes if leaf is None else [*shapes, tuple(_finished(leaf.grad).shape)]


def run_case(src: str, dst: str, *, training: bool, repeats: int, burst: float) -> list[Row]:
    """Measure raw, ours and (where it has the move) torch's."""
    ours = hyper_parallel.init_device_mesh("cpu", (NUM_RANKS,))
    calls = {
        "raw": _call_raw(src, dst, training),
        "hyper_parallel": _call_dtensor(hyper_parallel, ours, src, dst, training),
    }
    if not dst.startswith("P"):
        mesh = torch_mesh.init_device_mesh("cpu", (NUM_RANKS,))
        calls["torch"] = _call_dtensor(torch_api, mesh, src, dst, training)
    candidates = [Candidate(name, call, count_collectives(call)) for name, call in calls.items()]
    shapes, issued = _shapes(calls["raw"]), candidates[0].collectives
    for candidate in candidates:
        got = _shapes(candidate.call)
        if got != shapes:
            raise SystemExit(f"{candidate.name}, {src} -> {dst}: {got} must be {shapes}.")
        if candidate.name != "torch" and candidate.collectives != issued:
            raise SystemExit(f"{src} -> {dst}: {candidate.collectives} must be {issued}.")
    measure(candidates, num_repeats=repeats, burst_seconds=burst)
    return [row_of(candidate, candidates[0]) for candidate in candidates]


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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    moves = {f"{src} -> {dst}": (src, dst) for src, dst in raw_moves.MOVES if "avg" not in src}
    parser.add_argument("--only", choices=tuple(moves), help="one move instead of all")
    parser.add_argument("--mode", choices=("inference", "training"), help="one mode only")
    parser.add_argument("--repeats", type=int, default=60, help="bursts per variant (60)")
    parser.add_argument("--quick", action="store_true", help="6 short bursts: is it running?")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    repeats, burst = (6, 0.001) if options.quick else (max(3, options.repeats), 0.004)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # torch says that it gathers in place of an all_to_all
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    cases = []
    for move in [options.only] if options.only else moves:
        for mode in [options.mode] if options.mode else ("inference", "training"):
            training = mode == "training"
            rows = run_case(*moves[move], training=training, repeats=repeats, burst=burst)
            cases.append({"move": move, "mode": mode, "rows": rows})
    console = Console(width=None if Console().is_terminal else 120)
    python = platform.python_version()
    console.print(f"torch {torch.__version__}, Python {python}, microseconds of CPU time per call")
    console.print(_table(cases))
    dist.destroy_process_group()
    if options.json:
        about = {"torch": torch.__version__, "python": python, "num_ranks": NUM_RANKS}
        about |= {"shape": SHAPE, "repeats": repeats}
        plain = [case | {"rows": [asdict(row) for row in case["rows"]]} for case in cases]
        with open(options.json, "w", encoding="ascii") as file:
            json.dump(about | {"cases": plain}, file, indent=2)


if __name__ == "__main__":
    main()
