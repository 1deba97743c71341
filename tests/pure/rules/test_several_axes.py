# SPDX-License-Identifier: Apache-2.0
"""Decisions over several mesh axes, uneven sizes and blocks, run on NumPy pieces."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hyper_parallel.core.factor import bind
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard
from hyper_parallel.core.propagate import propagate
from hyper_parallel.rules import Call, find


def _softmax(x):
    powers = np.exp(x)
    return powers / powers.sum(axis=-1, keepdims=True)


def _reshape(context, x):
    return x.reshape(context.shapes[0])


OPS = {
    "add": (lambda c, x, y: x + y, [(5, 6, 4), (6, 4)], ()),
    "mul": (lambda c, x, y: x * y, [(5, 6, 4), (6, 1)], ()),
    "relu": (lambda c, x: np.maximum(x, 1), [(5, 7)], ()),
    "linear": (lambda c, x, w, b: x @ w.T + b, [(3, 5, 6), (7, 6), (7,)], ()),
    "matmul": (lambda c, x, y: x @ y, [(4, 5, 6), (6, 8)], ()),
    "softmax": (lambda c, x: _softmax(x), [(4, 5, 6)], (("dim", -1),)),
    "sum": (lambda c, x: x.sum(1), [(4, 5, 6)], (("dim", 1),)),
    "mean": (lambda c, x: x.mean(1), [(4, 5, 6)], (("dim", 1),)),
    "mse_loss": (lambda c, x, y: ((x - y) ** 2).mean(), [(5, 6), (6,)], ()),
    "einsum": (
        lambda c, x, y: np.einsum("bsd,hd->bhs", x, y),
        [(4, 5, 6), (7, 6)],
        (("equation", "b s d, h d -> b h s"),),
    ),
    "repeat_interleave": (
        lambda c, x: x.repeat(3, 1),
        [(5, 4, 6)],
        (("dim", 1), ("repeats", 3)),
    ),
    "kron": (lambda c, x, y: np.kron(x, y), [(4, 5), (3, 2)], ()),
    "vstack": (lambda c, x, y: np.concatenate([x, y]), [(3, 5), (4, 5)], ()),
    "amax": (lambda c, x: x.max(1), [(4, 5, 6)], (("dim", 1),)),
    "reshape": (_reshape, [(5, 12, 4)], (("shape", (5, 3, 4, 4)),)),
    "flatten": (_reshape, [(6, 5, 4)], (("start_dim", 0), ("end_dim", 1))),
    "unflatten": (_reshape, [(4, 24)], (("dim", 1), ("sizes", (12, 2)))),
    "transpose": (lambda c, x: x.swapaxes(0, 1), [(5, 6, 4)], (("dim0", 0), ("dim1", 1))),
    "cat": (lambda c, x, y: np.concatenate([x, y], 1), [(5, 2, 4), (5, 3, 4)], (("dim", 1),)),
    "where": (lambda c, m, x, y: np.where(m > 1, x, y), [(5, 6), (5, 6), (6,)], ()),
}


def _random_placements(rng: random.Random, shape: tuple, mesh: tuple) -> tuple[Placement, ...]:
    return tuple(
        rng.choice([Replicate(), Partial(), *(Shard(dim) for dim in range(len(shape)))])
        for _ in mesh
    )


@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 1, 2)])
@pytest.mark.parametrize("name", OPS)
def test_several_axes_give_the_whole_result(name: str, mesh: tuple, run_decision) -> None:
    op, shapes, args = OPS[name]
    bound = bind(find(name, Call(tuple(shapes), args)), shapes)
    rng = random.Random(name)
    operands = [np.random.default_rng(3).uniform(0.5, 1.5, shape) for shape in shapes]
    seen = set()
    for _ in range(25):
        given = [_random_placements(rng, shape, mesh) for shape in shapes]
        decision = propagate(bound, given, mesh)
        if decision.inputs not in seen:
            seen.add(decision.inputs)
            run_decision(bound, op, operands, decision, mesh)
    assert len(seen) > 1


def test_several_axes_blocks_follow_heads(run_decision) -> None:
    """Three heads of 4 over 2 ranks: 8 and 4 columns, then 2 and 1 heads, and back."""
    split = bind(find("unflatten", Call(((2, 12),), (("dim", 1), ("sizes", (3, 4))))), [(2, 12)])
    decision = propagate(split, [(Shard(1, block=4),)], (2,))
    assert decision.inputs == ((Shard(1, block=4),),)
    assert decision.outputs == ((Shard(1),),)
    run_decision(split, _reshape, [np.arange(24.0).reshape(2, 12)], decision, (2,))
    merge = bind(find("flatten", Call(((2, 3, 4),), (("start_dim", 1),))), [(2, 3, 4)])
    decision = propagate(merge, [(Shard(1),)], (2,))
    assert (decision.inputs, decision.outputs) == (((Shard(1),),), ((Shard(1, block=4),),))
    run_decision(merge, _reshape, [np.arange(24.0).reshape(2, 3, 4)], decision, (2,))


def test_several_axes_blocks_are_kept_where_all_agree(run_decision) -> None:
    bound = bind(find("add", Call(((6, 4), (6, 4)))), [(6, 4), (6, 4)])
    decision = propagate(bound, [(Shard(0, block=2),), (Replicate(),)], (2,))
    assert decision.inputs == ((Shard(0, block=2),),) * 2
    assert decision.outputs == ((Shard(0, block=2),),)
    run_decision(bound, lambda c, x, y: x + y, [np.ones((6, 4))] * 2, decision, (2,))
