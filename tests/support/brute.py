# SPDX-License-Identifier: Apache-2.0
"""Brute force: run an op's rule on pieces, choice by choice, and compare with the whole op.

Ranks are a loop here, not threads: the op runs on each rank's pieces in the form that the library
runs it in, and the pieces are joined as the decision says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.core import AbstractMesh, Layout
from hyper_parallel.core.factor import BoundRule, bind
from hyper_parallel.core.placement import Partial, Placement, Shard
from hyper_parallel.core.propagate import Decision, choices
from hyper_parallel.core.rule import OpRule
from hyper_parallel.dtensor.decisions import Spec, spec_of
from hyper_parallel.dtensor.local_forms import form_of
from hyper_parallel.dtensor.signatures import bind_call, op_name
from hyper_parallel.rules import Call, find
from support.dense import cut
from support.op_calls import EVEN, Holds, OpCall

# Memory as it comes: there is nothing to compare.
NO_VALUES = {"empty_like"}
SAID_OTHERWISE = {"ravel", "reshape_as", "view_as", "expand_as", "broadcast_to", "type_as"}


class Asked(torch.Tensor):
    """A tensor that notes the first op it is given to, instead of running it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        getter = getattr(getattr(func, "__self__", None), "__name__", "")
        is_op = getattr(func, "__name__", "") != "__get__" or getter in ("T", "H", "mT", "mH")
        if not is_op or getattr(func, "__name__", "") in ("size", "numel", "dim"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise Noted(func, args, kwargs or {})


class Noted(Exception):  # not an error
    """The first op of a call."""


class Rank(AbstractMesh):
    """A mesh of one axis seen from one of its ranks."""

    rank = 0

    def get_rank(self) -> int:
        return self.rank

    def get_coordinate(self) -> list[int]:
        return [self.rank]


@dataclass
class Op:
    """One op, its rule bound to the operands, and how to call it with others."""

    name: str
    operands: list[torch.Tensor]
    bound: BoundRule
    call: Callable[[Sequence[torch.Tensor], Spec | None], list[torch.Tensor]]
    static: Any


def noted(case: OpCall, sizes: dict[str, int] = EVEN, rule: OpRule | None = None) -> Op | None:
    """Find the op behind a call, and its rule; None for an op that dispatch says otherwise."""
    operands = case.operands(sizes)
    asked = [x.detach().as_subclass(Asked) for x in operands]
    with pytest.raises(Noted) as found:
        case.op(*asked)
    func, args, kwargs = found.value.args
    name = op_name(func)
    bound_call = bind_call(name, func, args, kwargs)
    if name in SAID_OTHERWISE:
        return None
    tensors = [t if isinstance(t, Asked) else None for t in bound_call.operands]
    order = [next(i for i, a in enumerate(asked) if a is t) for t in tensors if t is not None]
    if len(set(order)) < len(order):
        return None  # one tensor twice: its gradients cannot be told apart
    shapes = tuple(None if t is None else tuple(t.shape) for t in tensors)
    rule = rule or find(name, Call(shapes, bound_call.static))
    leaves, tree = tree_flatten((args, kwargs))
    places = [next((i for i, a in enumerate(asked) if a is leaf), None) for leaf in leaves]

    def call(values: Sequence[torch.Tensor], spec: Spec | None) -> list[torch.Tensor]:
        """Call the op with `values` for its operands, in their order."""
        of_asked = dict(zip(order, values, strict=True))
        given = [leaf if i is None else of_asked[i] for leaf, i in zip(leaves, places, strict=True)]
        call_args, call_kwargs = tree_unflatten(given, tree)
        local = spec.local if spec is not None else None
        run = func if local is None else partial(_in_form, local, func)
        results = tree_flatten(run(*call_args, **call_kwargs))[0]
        return [r for r in results if isinstance(r, torch.Tensor)]

    return Op(name, [operands[i] for i in order], bind(rule, shapes), call, bound_call.static)


def _in_form(local: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    return local.run(func, args, kwargs)


def split(x: torch.Tensor, placement: Placement, count: int) -> list[torch.Tensor]:
    """Cut a value in the local values of `count` ranks (torch.chunk, any sum)."""
    if isinstance(placement, Shard):
        return [cut(x, placement.dim, rank, count, placement.block) for rank in range(count)]
    if isinstance(placement, Partial):
        noise = torch.randn((count, *x.shape), generator=torch.Generator().manual_seed(3)).to(x)
        parts = noise - noise.mean(0) + x / count
        return list(parts * count if placement.is_partial("avg") else parts)
    return [x] * count


def join(parts: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    """Put local values together again; replicas must agree."""
    if isinstance(placement, Shard):
        return torch.cat(parts, placement.dim)
    if isinstance(placement, Partial):
        together = torch.stack(parts)
        reductions = {"max": together.amax, "min": together.amin, "product": together.prod}
        if placement.reduce_op in reductions:
            return reductions[placement.reduce_op](0)
        whole = together.sum(0, dtype=parts[0].dtype)
        return whole / len(parts) if placement.is_partial("avg") else whole
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], equal_nan=True)
    return parts[0]


@dataclass
class Whole:
    """What an op gives on whole operands, and gradients for drawn cotangents."""

    values: list[torch.Tensor]
    cotangents: list[torch.Tensor]
    gradients: list[torch.Tensor | None]

    @classmethod
    def of(cls, op: Op) -> Whole:
        values, _ = forward_backward(op, op.operands, None, None)
        cotangents = [draw_like(r, i) for i, r in enumerate(values)]
        return cls(values, cotangents, forward_backward(op, op.operands, None, cotangents)[1])


def run_choice(
    op: Op, whole: Whole, decision: Decision, count: int, holds: Holds | None = None
) -> None:
    """Run an op on every rank as a decision says; compare values and gradients with the whole.

    Of a random op `holds` tells what must be so.
    """
    shapes = [tuple(r.shape) for r in whole.values]
    placed = [p[0] for p in decision.inputs if p]
    pieces = [split(x.detach(), p, count) for x, p in zip(op.operands, placed, strict=True)]
    outs = [p[0] for p in decision.outputs]
    incoming = [
        split(g / d, p, count) if p.is_shard() else [g / d] * count
        for g, p, d in zip(whole.cotangents, outs, decision.divisors, strict=True)
    ]
    form = form_of(op.name, op.static) if decision.shifts or op.bound.rule.local else None
    values: list[list[torch.Tensor]] = []
    gradients: list[list[Any]] = []
    for rank in range(count):
        mesh = Rank("cpu", (count,))
        mesh.rank = rank
        pairs = enumerate(zip(decision.inputs, op.bound.shapes, strict=True))
        present = [(i, Layout(mesh, p, s)) for i, (p, s) in pairs if p and s is not None]
        spec = spec_of(form, decision, present, shapes)
        local = [
            piece[rank].detach().clone().requires_grad_(x.requires_grad)
            for piece, x in zip(pieces, op.operands, strict=True)
        ]
        if holds is not None:  # replicas draw alike, shards do not
            torch.manual_seed(rank if outs[0].is_shard() else 0)
        results, grads = forward_backward(op, local, spec, [g[rank] for g in incoming])
        values.append(results)
        # Where some rank has no elements, the library gives zeros for what torch leaves out.
        settled = zip(local, grads, strict=True)
        gradients.append(
            [torch.zeros_like(x) if g is None and spec.has_empty else g for x, g in settled]
        )
    is_told = op.name not in NO_VALUES
    joined = [join([v[i] for v in values], p) for i, p in enumerate(outs) if is_told]
    # Else without a gradient: dispatch leaves these choices out where one is needed.
    is_smooth = not any(isinstance(p, Partial) and p.reduce_op not in ("sum", "avg") for p in outs)
    lies = [p[0] for p in decision.gradients if p]
    slopes = [
        None if wanted is None or not is_smooth else join([g[i] for g in gradients], lies[i])
        for i, wanted in enumerate(whole.gradients)
    ]
    if holds is not None:
        slope = None if slopes[0] is None else slopes[0] / whole.cotangents[0]
        assert holds(op.operands[0].detach(), joined[0], slope)
        return
    for found, expected in zip(joined, whole.values if is_told else [], strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)
    for slope, wanted in zip(slopes, whole.gradients, strict=True):
        if slope is not None:
            torch.testing.assert_close(slope, wanted, equal_nan=True)


def draw_like(result: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.rand(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)


def forward_backward(
    op: Op, operands: Sequence[torch.Tensor], spec: Spec | None, cotangents: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Run an op; give its results, and the operands' gradients where cotangents are given."""
    results = op.call(operands, spec)
    if cotangents is None:
        return [r.detach() for r in results], []
    pairs = [(r, g) for r, g in zip(results, cotangents, strict=True) if r.requires_grad]
    asked = [x for x in operands if x.requires_grad]
    if not pairs or not asked:
        return [r.detach() for r in results], [None] * len(operands)
    outs, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, asked, grads, allow_unused=True))
    by_operand = [next(found) if x.requires_grad else None for x in operands]
    return [r.detach() for r in results], by_operand


def check(op: Op, count: int, check_cut: bool = True, holds: Holds | None = None) -> list[str]:
    """Try every choice on one axis; say what is wrong: what differs, and factors never cut."""
    found, whole = choices(op.bound, count), Whole.of(op)
    wrong: list[str] = []
    for decision in found:
        try:
            run_choice(op, whole, decision, count, holds)
        except (AssertionError, RuntimeError, ValueError, IndexError) as error:
            wrong.append(f"{decision.why}: {error}")
    if not check_cut:
        return wrong
    cut = {decision.why.split()[1] for decision in found if decision.why.startswith("cut")}
    wrong += [
        f"{f.name} never cut" for f in op.bound.factors if f.is_cuttable and f.name not in cut
    ]
    return wrong
