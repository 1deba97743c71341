# SPDX-License-Identifier: Apache-2.0
"""Host cost of DTensors per call: ops, optimizer steps, clipping; plain tensors, torch's and ours.

One process stands for rank 0 of 8 on torch's "fake" process group, whose collectives return at
once, and tensors are tiny, so what is measured is the work of the host. All variants of a case do
the same work on the same local shapes; local results are compared before anything is timed. An op
is timed forward and backward; gradients that torch leaves pending are reduced, as ours are. "Added"
is what a variant takes more than the plain one, the cost of being distributed, to what torch's
takes more. Clipping is compared with clipping written by hand, which reduces a norm as well.

    python benchmarks/dtensor_ops.py
    python benchmarks/dtensor_ops.py --only optimizer --json result.json

Bursts, order and columns are those of host_overhead.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import _harness
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from _harness import Candidate, Row
from rich.table import Table
from torch import Tensor, nn

import hyper_parallel as ours

NUM_RANKS = 8
HIDDEN = 64
NUM_LAYERS = 4
PLAIN, TORCH, OURS, STEPPED = "plain", "torch", "hyper_parallel", "hyper_parallel, locally"

R, S0, S1 = None, 0, 1

# name: shapes of the operands, the dim that cuts each (None: replicated), the op
OPS: dict[str, tuple[list[tuple[int, ...]], list[int | None], Callable[..., Tensor]]] = {
    "add": ([(16, 64), (16, 64)], [S0, S0], torch.add),
    "mul by a number": ([(16, 64)], [S0], lambda x: x * 2.0),
    "gelu": ([(16, 64)], [S1], F.gelu),
    "linear, by columns": ([(16, 64), (64, 64), (64,)], [R, S0, S0], F.linear),
    "linear, by rows": ([(16, 64), (64, 64)], [S1, S1], F.linear),
    "matmul": ([(8, 16, 8), (8, 8, 16)], [S0, S0], torch.matmul),
    "layer_norm": (
        [(16, 64), (64,), (64,)],
        [S0, R, R],
        lambda x, w, b: F.layer_norm(x, (64,), w, b),
    ),
    "softmax": ([(16, 64)], [S0], lambda x: x.softmax(-1)),
    "view": ([(16, 64)], [S1], lambda x: x.view(16, -1, 8)),
    "transpose": ([(16, 64)], [S1], lambda x: x.transpose(0, 1)),
    "sum": ([(16, 64)], [S1], lambda x: x.sum(0)),
}


def _placed(api: object, mesh: object, local: Tensor, cut: int | None) -> Tensor:
    """Return a leaf whose local part is `local`."""
    placement = api.Replicate() if cut is None else api.Shard(cut)
    return api.DTensor.from_local(local, mesh, [placement], run_check=False).detach()


def _check_same(case: str, results: dict[str, Sequence[Tensor]]) -> None:
    """Refuse to time variants that differ in their local results."""
    expected = [_harness.local_of(tensor) for tensor in results[PLAIN]]
    for name, tensors in results.items():
        for got, want in zip(tensors, expected, strict=True):
            local = _harness.local_of(got)
            if local.shape != want.shape or not torch.allclose(local, want, rtol=1e-4, atol=1e-5):
                raise SystemExit(f"{case}: {name} must equal {PLAIN}, but got {local=}, {want=}.")


def _grads(call: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor]:
    call()
    return [leaf.grad for leaf in leaves]


def _reducing(call: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], Tensor]:
    """Reduce the gradients that torch leaves pending, as ours are."""

    def reduced() -> Tensor:
        out = call()
        for leaf in leaves:
            if leaf.grad.placements != leaf.placements:
                leaf.grad = leaf.grad.redistribute(placements=leaf.placements)
        return out

    return reduced


def _op_case(case: str, meshes: dict[str, tuple[object, object]]) -> list[Candidate]:
    shapes, cuts, op = OPS[case]
    torch.manual_seed(0)
    wholes = [torch.randn(shape) for shape in shapes]
    locals_ = [
        w if cut is None else w.chunk(NUM_RANKS, cut)[0].contiguous()
        for w, cut in zip(wholes, cuts, strict=True)
    ]
    candidates, results = [], {}
    for name in (PLAIN, TORCH, OURS):
        leaves = [local.clone() for local in locals_]
        if name != PLAIN:
            api, mesh = meshes[name]
            leaves = [_placed(api, mesh, leaf, cut) for leaf, cut in zip(leaves, cuts, strict=True)]
        for leaf in leaves:
            leaf.requires_grad_()
        seed = torch.ones_like(op(*leaves)).detach()

        def call(leaves: list[Tensor] = leaves, seed: Tensor = seed) -> Tensor:
            for leaf in leaves:
                leaf.grad = None
            out = op(*leaves)
            out.backward(seed)
            return out

        if name == TORCH and any(
            p.is_partial() for g in _grads(call, leaves) for p in g.placements
        ):
            call = _reducing(call, leaves)
        results[name] = [call(), *(leaf.grad for leaf in leaves)]
        candidates.append(Candidate(name, call))
    _check_same(case, results)
    return candidates


def _weights(meshes: dict[str, tuple[object, object]], name: str) -> list[nn.Parameter]:
    """Return the parameters of a decoder of four layers, with gradients."""
    torch.manual_seed(0)
    params = []
    per_layer = [S0, S0, S0, S1, S0, S0, S1, R, R]  # q k v o gate up down, two norms
    for cut in per_layer * NUM_LAYERS:
        shape = {
            R: (HIDDEN,),
            S0: (HIDDEN // NUM_RANKS, HIDDEN),
            S1: (HIDDEN, HIDDEN // NUM_RANKS),
        }[cut]
        value, grad = torch.randn(shape), torch.randn(shape)
        if name != PLAIN:
            api, mesh = meshes[TORCH if name == TORCH else OURS]
            value, grad = (_placed(api, mesh, local, cut) for local in (value, grad))
        param = nn.Parameter(value)
        param.grad = grad
        params.append(param)
    return params


def _optimizer_case(case: str, meshes: dict[str, tuple[object, object]]) -> list[Candidate]:
    foreach = {"AdamW, foreach": True, "AdamW, fused": False}[case]
    candidates, results = [], {}
    for name in (PLAIN, TORCH, OURS, STEPPED):
        params = _weights(meshes, name)
        optimizer = torch.optim.AdamW(params, lr=1e-3, foreach=foreach, fused=not foreach)
        if name == STEPPED:
            ours.step_locally(optimizer)
        optimizer.step()
        results[name] = [p.detach().clone() for p in params]
        candidates.append(Candidate(name, optimizer.step))
    _check_same(case, results)
    return candidates


def _clip_by_hand(params: list[nn.Parameter]) -> Callable[[], Tensor]:
    """Return clipping of plain shards as one would write it: replicas are counted once."""
    cut = [p.grad for p in params if p.dim() == 2]
    whole = [p.grad for p in params if p.dim() == 1]

    def clip() -> Tensor:
        square = nn.utils.get_total_norm(cut).square()
        dist.all_reduce(square)
        total = (square + nn.utils.get_total_norm(whole).square()).sqrt()
        nn.utils.clip_grads_with_norm_(params, 1e6, total)
        return total

    return clip


def _clip_case(case: str, meshes: dict[str, tuple[object, object]]) -> list[Candidate]:
    candidates, results = [], {}
    for name in (PLAIN, TORCH, OURS):
        params = _weights(meshes, name)
        clip = ours.clip_grad_norm_ if name == OURS else nn.utils.clip_grad_norm_
        call = lambda clip=clip, params=params: clip(params, 1e6)  # noqa: E731
        if name == PLAIN:
            call = _clip_by_hand(params)
        if name != TORCH:  # its norm means something else where nothing is reduced
            results[name] = [call()]
        candidates.append(Candidate(name, call))
    _check_same(case, results)
    return candidates


CASES: dict[str, tuple[Callable[..., list[Candidate]], Sequence[str]]] = {
    "ops": (_op_case, tuple(OPS)),
    "optimizer": (_optimizer_case, ("AdamW, foreach", "AdamW, fused")),
    "clip": (_clip_case, ("clip_grad_norm_",)),
}


def _table(cases: dict[str, list[Row]]) -> Table:
    table = Table(title="microseconds of CPU time a call", title_justify="left")
    headings = ("case", "variant", "min us", "to plain", "to torch", "added, to torch", "spread")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[:2] else "right")
    for case, rows in cases.items():
        plain, torchs = (next(r.min_us for r in rows if r.name == n) for n in (PLAIN, TORCH))
        for row in rows:
            table.add_row(
                case if row is rows[0] else "",
                row.name,
                f"{row.min_us:.1f}",
                f"{row.ratio_of_mins:.2f}",
                f"{row.min_us / torchs:.2f}",
                f"{(row.min_us - plain) / (torchs - plain):.2f}",
                f"{row.spread:.1%}",
            )
        table.add_section()
    return table


def main() -> None:
    """Run the cases that were asked for and print a table."""
    parser = _harness.make_parser(__doc__, repeats=100)
    parser.add_argument("--only", choices=tuple(CASES), help="one group of cases")
    options = parser.parse_args()
    found: dict[str, list[Row]] = {}
    with _harness.fake_rank(NUM_RANKS):
        handle = dist.device_mesh.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
        mesh = ours.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
        meshes = {TORCH: (theirs, handle), OURS: (ours, mesh)}
        for group in [options.only] if options.only else CASES:
            make, names = CASES[group]
            for name in names:
                candidates = make(name, meshes)
                found[name] = _harness.measure(candidates, **_harness.effort(options))
    cases = {name: [asdict(row) for row in rows] for name, rows in found.items()}
    _harness.report(options, f"rank 0 of {NUM_RANKS}", [_table(found)], cases)


if __name__ == "__main__":
    main()
