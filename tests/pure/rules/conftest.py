# SPDX-License-Identifier: Apache-2.0
"""The brute-force checker of rules: run a decision on NumPy pieces, compare with the whole op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest

from hyper_parallel.core.factor import BoundRule, bind
from hyper_parallel.core.placement import Partial, Placement, Shard, cotangent
from hyper_parallel.core.propagate import Decision, choices
from hyper_parallel.core.rule import OpRule

REDUCE = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min, "product": np.prod}


@dataclass
class Context:
    """What a local op may know besides its operands."""

    shapes: list[tuple[int, ...]]
    start: int = 0


def split(x: np.ndarray, placement: Placement, count: int) -> list[np.ndarray]:
    """Cut a value in the local values of `count` ranks (conventions: torch.chunk, any sum)."""
    if isinstance(placement, Shard):
        size, block = x.shape[placement.dim], placement.block
        assert size % block == 0
        step = -(-(size // block) // count) * block
        edges = [min(i * step, size) for i in range(count + 1)]
        return [x.take(range(a, b), placement.dim) for a, b in pairwise(edges)]
    if isinstance(placement, Partial):
        assert placement.reduce_op in ("sum", "avg")
        noise = np.random.default_rng(7).normal(size=(count, *x.shape))
        parts = noise - noise.mean(axis=0) + x / count
        return list(parts * count if placement.is_partial("avg") else parts)
    return [x] * count


def join(parts: list[np.ndarray], placement: Placement) -> np.ndarray:
    """Put local values together again; replicas must agree."""
    if isinstance(placement, Shard):
        return np.concatenate(parts, axis=placement.dim)
    if isinstance(placement, Partial):
        return REDUCE[placement.reduce_op](np.stack(parts), axis=0)
    for part in parts[1:]:
        np.testing.assert_allclose(part, parts[0], atol=1e-9)
    return parts[0]


def split_all(x: np.ndarray, placements: tuple[Placement, ...], mesh: tuple[int, ...]) -> dict:
    """Cut over several axes, outermost first: local values by coordinate."""
    found = {(): x}
    for placement, count in zip(placements, mesh, strict=True):
        found = {
            (*at, i): part
            for at, value in found.items()
            for i, part in enumerate(split(value, placement, count))
        }
    return found


def join_all(parts: dict, placements: tuple[Placement, ...], mesh: tuple[int, ...]) -> np.ndarray:
    for placement, count in reversed(list(zip(placements, mesh, strict=True))):
        outer = dict.fromkeys(at[:-1] for at in parts)
        parts = {at: join([parts[(*at, i)] for i in range(count)], placement) for at in outer}
    return parts[()]


def as_tuple(results: object) -> tuple[np.ndarray, ...]:
    return results if isinstance(results, tuple) else (np.asarray(results),)


def run(
    bound: BoundRule, op: Callable, operands: list, decision: Decision, mesh: tuple[int, ...]
) -> None:
    """Run an op on every rank as a decision says and compare with the whole."""
    whole = as_tuple(op(Context(list(bound.results)), *operands))
    pieces = [
        None if p is None else split_all(x, p, mesh)
        for x, p in zip(operands, decision.inputs, strict=True)
    ]
    shapes = [
        split_all(np.zeros(r.shape), cotangent(placements), mesh)
        for r, placements in zip(whole, decision.outputs, strict=True)
    ]
    found: list[dict] = [{} for _ in whole]
    for at in product(*map(range, mesh)):
        context = Context([s[at].shape for s in shapes])
        for shift in decision.shifts:
            source = operands[shift.source]
            position = np.indices(source.shape)[shift.dim]
            local = split_all(position, decision.inputs[shift.source], mesh)[at]
            context.start = int(local.min())
        args = [x if p is None else p[at] for x, p in zip(operands, pieces, strict=True)]
        shares = [1.0] * len(whole)
        for weight in decision.weights:
            source = operands[weight.source]
            held = [
                split_all(source, decision.inputs[weight.source][:n], mesh[:n])[at[:n]]
                for n in (weight.axis, weight.axis + 1)
            ]
            shares[weight.result] *= held[1].shape[weight.dim] / held[0].shape[weight.dim]
        for i, value in enumerate(as_tuple(op(context, *args))):
            found[i][at] = np.asarray(value) * shares[i] if shares[i] != 1 else np.asarray(value)
    for result, expected, placements in zip(found, whole, decision.outputs, strict=True):
        value = join_all(result, placements, mesh)
        assert value.shape == expected.shape, (value.shape, expected.shape)
        np.testing.assert_allclose(value, expected, atol=1e-8)


def check(rule: OpRule, op: Callable, operands: list, count: int) -> tuple[int, list[str]]:
    """Try every choice on one axis.

    Returns:
        The number of comparisons, and what is wrong: choices that differ, factors never cut.
    """
    bound = bind(rule, [None if x is None or np.isscalar(x) else x.shape for x in operands])
    found = choices(bound, count)
    wrong: list[str] = []
    for decision in found:
        try:
            run(bound, op, operands, decision, (count,))
        except (AssertionError, ValueError, IndexError) as error:
            wrong.append(f"{decision.why}: {error}")
    cut = {decision.why.split()[1] for decision in found if decision.why.startswith("cut")}
    wrong += [f"{f.name} never cut" for f in bound.factors if f.is_cuttable and f.name not in cut]
    return len(found), wrong


@pytest.fixture(name="check")
def _check() -> Callable[..., tuple[int, list[str]]]:
    return check


@pytest.fixture(name="run_decision")
def _run_decision() -> Callable[..., None]:
    return run
