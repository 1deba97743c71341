# SPDX-License-Identifier: Apache-2.0
"""Every op with a rule, through dispatch: values and gradients equal the plain op's.

Operands take every placement of one axis in turn. A pending operand is given as different
contributions on every rank, so that an op that is not linear must reduce it first.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, simulate, strict_rules
from hyper_parallel.runtime import current_rank
from support.device import DTYPE, TOLERANCE
from support.dtensors import laid, line, same, seeded
from support.op_calls import CALLS, UNEVEN, OpCall

TRIED = 2
"""Placements of each call; they are spread over all, the same each time."""


def options(x):
    placements = [Replicate(), *(Shard(dim) for dim in range(x.ndim))]
    if x.requires_grad:
        placements += [Partial("sum"), Partial("avg"), Partial("max")]
    return placements


def contribution(whole, placement, size, seed):
    """Give this rank's part: for a pending reduction, something different on every rank."""
    rank = current_rank()
    if not placement.is_partial():
        return None
    seeds = [100 * seed + r for r in range(size)]
    noise = torch.stack([seeded(*whole.shape, seed=s, dtype=whole.dtype) for s in seeds])
    if placement.is_partial("max"):
        noise = whole.detach() - noise.abs()
        noise[0] = whole
        return noise[rank]
    parts = noise - noise.mean(0) + whole.detach() / size
    return parts[rank] * (size if placement.is_partial("avg") else 1)


def place(whole, mesh, placement, seed):
    part = contribution(whole, placement, mesh.size(), seed)
    if part is None:
        placed = laid(whole, mesh, placement)
    else:
        placed = DTensor.from_local(part, mesh, [placement])
    return placed.requires_grad_(whole.requires_grad)


def as_list(result: Any) -> list[Any]:
    flat = torch.utils._pytree.tree_flatten(result)[0]
    return [r for r in flat if isinstance(r, torch.Tensor)]


def check(case: OpCall, mesh: Any, turn: int) -> None:
    whole = case.operands(UNEVEN)
    expected = as_list(case.op(*whole))
    floating = [x for x in whole if x.requires_grad]
    outs = [r for r in expected if r.requires_grad]
    seeds = [seeded(*r.shape, seed=9).to(r.dtype) for r in outs]
    grads = torch.autograd.grad(outs, floating, seeds, allow_unused=True) if outs else []
    every = list(itertools.product(*(options(x) for x in whole)))
    for i in range(min(TRIED, len(every))):
        placements = every[(turn + i * (len(every) // TRIED + 1)) % len(every)]
        placed = [
            place(x, mesh, p, i) for i, (x, p) in enumerate(zip(whole, placements, strict=True))
        ]
        try:
            with strict_rules():
                found = as_list(case.op(*placed))
            assert len(found) == len(expected)
            for ours, plain in zip(found, expected, strict=True):
                same(ours, plain)
                assert ours.requires_grad == plain.requires_grad
            if outs:
                ours = torch.autograd.grad(
                    [r for r in found if r.requires_grad],
                    [x for x in placed if x.requires_grad],
                    [laid(g, mesh, Replicate()) for g in seeds],
                    allow_unused=True,
                )
                for got, wanted in zip(ours, grads, strict=True):
                    if wanted is not None:
                        same(got, wanted)
        except AssertionError as error:
            raise AssertionError(f"{placements} {case.shapes}: {error}") from error


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_op_equals_the_plain_op(name: str) -> None:
    @simulate(2)
    def run():
        mesh = line(2)
        for turn, case in enumerate(CALLS[name]):
            check(case, mesh, turn)

    if name == "empty_like":  # memory as it comes
        return
    run()


def test_mean_over_a_cut_dim_divides_by_the_global_size():
    @simulate(4)
    def run():
        whole = seeded(5, 6).requires_grad_()
        x = laid(whole, line(4), Shard(0), requires_grad=True)
        same(x.mean(), whole.mean())
        x.mean(0).sum().backward()
        same(x.grad, torch.full((5, 6), 1 / 5).to(DTYPE))
        assert abs(x.mean().item() - whole.mean().item()) < TOLERANCE[DTYPE]

    run()
