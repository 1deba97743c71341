# SPDX-License-Identifier: Apache-2.0
"""Brute force of gradients: local backwards, joined as the decision says, are the whole one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.core.factor import bind
from hyper_parallel.core.placement import Partial, Placement, Shard
from hyper_parallel.core.propagate import Decision, choices
from hyper_parallel.rules import Call, find


def _embedding(start: int, positions: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    local = positions - start
    inside = (local >= 0) & (local < weight.shape[0])
    return F.embedding(torch.where(inside, local, 0), weight) * inside[..., None]


def _plain(op: Callable) -> Callable:
    return lambda start, *operands: op(*operands)


CASES = {
    "linear": (_plain(F.linear), [(4, 8, 4), (8, 4)], ()),
    "linear bias": (_plain(F.linear), [(4, 8, 4), (8, 4), (8,)], ()),
    "matmul": (_plain(torch.matmul), [(4, 1, 4, 8), (8, 8, 4)], ()),
    "addmm": (_plain(torch.addmm), [(4,), (8, 4), (4, 4)], ()),
    "layer_norm": (
        _plain(lambda x, w, b: F.layer_norm(x, (4,), w, b)),
        [(4, 8, 4), (4,), (4,)],
        (("normalized_shape", (4,)),),
    ),
    "add": (_plain(torch.add), [(4, 8, 4), (8, 1)], ()),
    "mul": (_plain(torch.mul), [(4, 8, 4), (8, 1)], ()),
    "div": (_plain(torch.div), [(4, 8, 4), (8, 1)], ()),
    "lerp": (_plain(torch.lerp), [(8, 4), (8, 4), (4,)], ()),
    "gelu": (_plain(F.gelu), [(4, 8)], ()),
    "sum": (_plain(lambda x: x.sum(1)), [(4, 8, 4)], (("dim", 1),)),
    "mean": (_plain(lambda x: x.mean(1)), [(4, 8, 4)], (("dim", 1),)),
    "softmax": (_plain(lambda x: x.softmax(-1)), [(4, 8)], (("dim", -1),)),
    "embedding": (_embedding, [(4, 8), (8, 4)], ()),
    "cat": (_plain(lambda *x: torch.cat(x, 1)), [(4, 3, 8), (4, 5, 8)], (("dim", 1),)),
    "transpose": (_plain(lambda x: x.transpose(0, 1)), [(4, 8)], (("dim0", 0), ("dim1", 1))),
    "unbind": (_plain(lambda x: x.unbind(1)), [(4, 2, 8)], (("dim", 1),)),
    "scaled_dot_product_attention": (
        _plain(F.scaled_dot_product_attention),
        [(4, 4, 8, 6), (4, 4, 5, 6), (4, 4, 5, 8)],
        (),
    ),
}


def _split(x: torch.Tensor, placement: Placement, count: int) -> list[torch.Tensor]:
    if isinstance(placement, Shard):
        size = x.shape[placement.dim]
        step = -(-size // count)
        edges = [min(i * step, size) for i in range(count + 1)]
        return [x.narrow(placement.dim, a, b - a) for a, b in pairwise(edges)]
    if isinstance(placement, Partial):
        noise = torch.randn((count, *x.shape), generator=torch.Generator().manual_seed(3)).double()
        parts = noise - noise.mean(0) + x / count
        return list(parts * count if placement.is_partial("avg") else parts)
    return [x] * count


def _join(parts: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    if isinstance(placement, Shard):
        return torch.cat(parts, placement.dim)
    if isinstance(placement, Partial):
        whole = torch.stack(parts).sum(0)
        return whole / len(parts) if placement.is_partial("avg") else whole
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0])
    return parts[0]


def _backward(op: Callable, start: int, operands: list, cotangents: list) -> list:
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
    results = op(start, *leaves)
    results = results if isinstance(results, tuple) else (results,)
    floating = [x for x in leaves if x.requires_grad]
    found = iter(torch.autograd.grad(results, floating, cotangents))
    return [next(found) if x.requires_grad else None for x in leaves]


def _check(op: Callable, operands: list, decision: Decision, count: int) -> None:
    results = op(0, *operands)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(r.shape, generator=generator).double() for r in results]
    whole = _backward(op, 0, operands, cotangents)
    inputs = [_split(x, p[0], count) for x, p in zip(operands, decision.inputs, strict=True) if p]
    incoming = [
        _split(g / d, p[0], count) if p[0].is_shard() else [g / d] * count
        for g, p, d in zip(cotangents, decision.outputs, decision.divisors, strict=True)
    ]
    found: list[list] = []
    for rank in range(count):
        starts = [
            int(_split(torch.arange(operands[s.source].shape[s.dim]), Shard(0), count)[rank][0])
            for s in decision.shifts
        ]
        local = [x[rank] for x in inputs]
        found.append(_backward(op, sum(starts), local, [g[rank] for g in incoming]))
    for i, (expected, placements) in enumerate(zip(whole, decision.gradients, strict=True)):
        if expected is not None and placements is not None:
            value = _join([gradients[i] for gradients in found], placements[0])
            torch.testing.assert_close(value, expected, msg=f"{decision.why}: operand {i}")


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_rule_gradients_of_every_choice(name: str, count: int) -> None:
    op, shapes, args = CASES[name]
    generator = torch.Generator().manual_seed(0)
    operands = [torch.rand(shape, generator=generator).double() + 0.5 for shape in shapes]
    if name == "embedding":
        operands[0] = torch.randint(0, 8, shapes[0], generator=generator)
    found = choices(bind(find(name.split()[0], Call(tuple(shapes), args)), shapes), count)
    assert len(found) > 1
    for decision in found:
        _check(op, operands, decision, count)
