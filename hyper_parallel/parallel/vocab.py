# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over a class dim that is cut between ranks, on plain local tensors.

[Note: vocabulary loss] Let q be what the target weighs each class with: a one-hot row times its
class weight, smoothed, or given probabilities. A row's loss is lse * sum(q) - sum(q * x), lse being
the logarithm of the sum of exp(x). So two collectives do: one maximum, and one sum of everything a
row needs, stacked. Backward is softmax * sum(q) - q, times the row's gradient: no communication.
Only the logits and lse are kept; the softmax is made again in backward.

Legend: N rows (any number of dims), V classes in all, v classes of this rank, the last dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.dtensor.moves import refuse_create_graph
from hyper_parallel.errors import describe
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.rows import reduce

__all__ = [
    "ClassIndices",
    "ClassProbabilities",
    "VocabShard",
    "linear_rows",
    "log_softmax",
    "loss_rows",
    "picked_rows",
    "sum_over",
]

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which classes this rank holds: `size` of `vocab`, from `start` on; `axes` of `mesh` cut."""

    mesh: DeviceMesh
    axes: tuple[int, ...]
    start: int
    size: int
    vocab: int

    def reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """All-reduce `x`, which is given up, over the ranks that cut the classes."""
        if not self.axes:
            return x
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        return reduce(self.mesh, axes, x.contiguous(), op)

    def own(self, classes: Tensor) -> Tensor:
        """Give this rank's part of a whole [V]."""
        return classes.narrow(0, self.start, self.size)

    def find(self, target: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Give each target's place among the own classes (0 if elsewhere), and which are here.

        A target that is no class gets a place beyond the last, at which looking up fails, on every
        rank, as it does without a cut.
        """
        local = target - self.start
        here = known & (local >= 0) & (local < self.size)
        wrong = known & ((target < 0) | (target >= self.vocab))
        return torch.where(wrong, max(self.size, 1), torch.where(here, local, 0)), here


def accumulate_in(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype that sums of `dtype` are made in."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True, slots=True)
class ClassIndices:
    """Targets that are classes: q is `at` on the target's class, plus `spread` on every class.

    Args:
        index: [N], the target's place among the own classes.
        here: [N], whether this rank holds it.
        at: [N], the weight of the target's class; 0 where the target is ignored.
        mass: [N], the sum of q.
        keeps: [N], 0 where the target is ignored, else 1.
        spread: [v], what label smoothing gives each own class; None without smoothing.
        weights: [N], what the mean divides by, row by row.
    """

    index: Tensor
    here: Tensor
    at: Tensor
    mass: Tensor
    keeps: Tensor
    spread: Tensor | None
    weights: Tensor

    @classmethod
    def of(
        cls,
        target: Tensor,
        place: VocabShard,
        dtype: torch.dtype,
        *,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
    ) -> ClassIndices:
        """Read integer targets [N]; `weight` is the whole [V]."""
        keep = target != ignore_index
        keeps = keep.to(dtype)
        index, here = place.find(target, keep)
        weights = keeps
        if weight is not None:
            known = torch.where(keep, target, 0).clamp(0, place.vocab - 1)
            weights = weight.to(dtype)[known] * keeps
        at, spread, mass = weights * (1 - smoothing), None, weights
        if smoothing:
            each = smoothing / place.vocab
            whole = at.new_ones(place.vocab) if weight is None else weight.to(dtype)
            spread = place.own(whole) * each
            mass = at + keeps * (whole.sum() * each)
        return cls(index, here, at, mass, keeps, spread, weights)

    def part(self, start: int, stop: int) -> ClassIndices:
        """Give the rows from `start` to `stop` of a 1-dim N."""
        names = ("index", "here", "at", "mass", "keeps", "weights")
        return replace(self, **{name: getattr(self, name)[start:stop] for name in names})

    def dot(self, x: Tensor) -> Tensor:
        """Give this rank's part of sum(q * x): [N] of [N, v]."""
        result = pick(x, self.index, self.here) * self.at
        if self.spread is not None:
            result = result + (x @ self.spread) * self.keeps
        return result

    def local_mass(self) -> Tensor | None:
        """Say that the mass is known without asking other ranks."""
        return None

    def subtract_from(self, grad: Tensor, scale: Tensor) -> None:
        """Take q * scale off `grad` [N, v], in place; scale is [N]."""
        if not grad.shape[-1]:
            return
        taken = (scale * self.at).masked_fill(~self.here, 0).neg()
        grad.scatter_add_(-1, self.index.unsqueeze(-1), taken.unsqueeze(-1))
        if self.spread is not None:
            grad.addcmul_((scale * self.keeps).unsqueeze(-1), self.spread, value=-1)


@dataclass(frozen=True, slots=True)
class ClassProbabilities:
    """Targets that are probabilities: q is `weight * (p * (1 - smoothing) + smoothing / V)`.

    Args:
        p: [N, v], this rank's part.
        weight: [v], this rank's part, or None.
        smoothing: between 0 and 1.
        vocab: V.
    """

    p: Tensor
    weight: Tensor | None
    smoothing: float
    vocab: int

    def q(self) -> Tensor:
        """Give q, [N, v]."""
        q = self.p if self.weight is None else self.p * self.weight
        if not self.smoothing:
            return q
        each = self.smoothing / self.vocab
        return q * (1 - self.smoothing) + (each if self.weight is None else self.weight * each)

    def dot(self, x: Tensor) -> Tensor:
        """Give this rank's part of sum(q * x): [N] of [N, v]."""
        return (self.q() * x).sum(-1)

    def local_mass(self) -> Tensor | None:
        """Give this rank's part of the mass."""
        return self.q().sum(-1)

    def subtract_from(self, grad: Tensor, scale: Tensor) -> None:
        """Take q * scale off `grad` [N, v], in place; scale is [N]."""
        grad.addcmul_(self.q(), scale.unsqueeze(-1), value=-1)

    def grad_of_p(self, minus_log: Tensor, scale: Tensor) -> Tensor:
        """Give the gradient of p, of lse - x [N, v] and the rows' gradient [N]."""
        each = minus_log * (scale * (1 - self.smoothing)).unsqueeze(-1)
        return each if self.weight is None else each * self.weight


Goal = ClassIndices | ClassProbabilities


def pick(x: Tensor, index: Tensor, here: Tensor) -> Tensor:
    """Look [N] entries up in [N, v]; 0 where they are not here.

    Raises:
        IndexError: a target is no class (on an accelerator the device itself stops).
    """
    source = x if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1))
    try:
        found = source.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise IndexError(
            describe(
                "cross_entropy",
                "every target must be a class or ignore_index",
                "Check the labels against the number of classes",
                error=str(error),
            )
        ) from error
    return found.masked_fill(~here, 0)


def _maximum(x: Tensor, place: VocabShard) -> Tensor:
    """Give the maximum of all classes, [N, 1]."""
    dtype = accumulate_in(x.dtype)
    if not x.shape[-1]:
        own = x.new_full((*x.shape[:-1], 1), float("-inf"), dtype=dtype)
    else:
        own = x.amax(-1, keepdim=True).to(dtype)
    return place.reduce(own, "max")


def _rows(x: Tensor, goal: Goal, place: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """Give loss, lse and mass of each row; see [Note: vocabulary loss]."""
    largest = _maximum(x, place)
    shifted = x.to(largest.dtype) - largest
    sums = [goal.dot(shifted)]
    mass = goal.local_mass()
    if mass is not None:
        sums.append(mass)
    sums.append(shifted.exp_().sum(-1))
    every = place.reduce(torch.stack(sums))
    log_total = every[-1].log()
    mass = goal.mass if isinstance(goal, ClassIndices) else every[1]
    loss = log_total * mass - every[0]
    if isinstance(goal, ClassIndices):  # an ignored row of infinities is still ignored
        loss = loss.masked_fill(goal.keeps == 0, 0)
    return loss, log_total + largest.squeeze(-1), mass


def _rows_backward(x: Tensor, goal: Goal, lse: Tensor, mass: Tensor, grad: Tensor) -> Tensor:
    """Give the gradient of the logits, of the rows' gradient [N]."""
    result = (x.to(lse.dtype) - lse.unsqueeze(-1)).exp_().mul_((grad * mass).unsqueeze(-1))
    goal.subtract_from(result, grad)
    return result.to(x.dtype)


class _LossRows(torch.autograd.Function):
    """The loss of each row of logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor | None, goal: Goal, place: VocabShard) -> Tensor:
        loss, lse, mass = _rows(x, goal, place)
        ctx.save_for_backward(x, lse, mass)
        ctx.goal = goal
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_create_graph("cross_entropy")
        x, lse, mass = ctx.saved_tensors
        grad_x = grad_p = None
        if ctx.needs_input_grad[0]:
            grad_x = _rows_backward(x, ctx.goal, lse, mass, grad)
        if ctx.needs_input_grad[1]:
            grad_p = ctx.goal.grad_of_p(lse.unsqueeze(-1) - x.to(lse.dtype), grad)
        return grad_x, grad_p, None, None


def loss_rows(x: Tensor, goal: Goal, place: VocabShard) -> Tensor:
    """Give the loss of each row, [N], of logits [N, v].

    Communicates:
        Forward: all-reduces of [N] maxima and [2, N] sums ([3, N] for probabilities). Backward:
        nothing.
    """
    p = goal.p if isinstance(goal, ClassProbabilities) else None
    return _LossRows.apply(x, p, goal, place)  # type: ignore[return-value]


class _LinearRows(torch.autograd.Function):
    """The loss of each row of x @ weight^T + bias, whose logits are made a chunk at a time."""

    @staticmethod
    def forward(  # noqa: PLR0913  # torch passes what apply got, by position
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        goal: ClassIndices,
        place: VocabShard,
        chunk: int,
    ) -> Tensor:
        found = [
            _rows(F.linear(x[start:stop], weight, bias), goal.part(start, stop), place)
            for start, stop in _chunks(x.shape[0], chunk)
        ]
        loss, lse, mass = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(x, weight, bias, lse, mass)
        ctx.goal, ctx.chunk = goal, chunk
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_create_graph("linear_cross_entropy")
        x, weight, bias, lse, mass = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = accumulate_in(weight.dtype)
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for start, stop in _chunks(x.shape[0], ctx.chunk):
            own = slice(start, stop)
            logits = F.linear(x[own], weight, bias)
            goal = ctx.goal.part(start, stop)
            cotangent = _rows_backward(logits, goal, lse[own], mass[own], grad[own])
            if grad_x is not None:
                grad_x[own] = cotangent @ weight
            if grad_weight is not None:
                grad_weight += cotangent.T @ x[own]
            if grad_bias is not None:
                grad_bias += cotangent.sum(0, dtype=wide)
        grads = [grad_x, grad_weight, grad_bias]
        return *[g if g is None else g.to(x.dtype) for g in grads], None, None, None


def linear_rows(  # the operands of a linear, and those of a loss
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    goal: ClassIndices,
    place: VocabShard,
    *,
    chunk: int,
) -> Tensor:
    """Give the loss of each row, [N], of x [N, H] and weight [v, H], holding [chunk, v] logits.

    Communicates:
        Forward: for each chunk what `loss_rows` does. Backward: nothing (the logits are made
        again); the gradient of `x` is this rank's share of a sum.
    """
    return _LinearRows.apply(x, weight, bias, goal, place, chunk)  # type: ignore[return-value]


def _chunks(rows: int, chunk: int) -> Sequence[tuple[int, int]]:
    return [(start, min(start + chunk, rows)) for start in range(0, rows, chunk)] or [(0, 0)]


class _LogSoftmax(torch.autograd.Function):
    """The logarithm of the softmax over all classes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: VocabShard) -> Tensor:
        largest = _maximum(x, place)
        shifted = x.to(largest.dtype) - largest
        total = place.reduce(shifted.exp().sum(-1, keepdim=True))
        result = shifted.sub_(total.log()).to(x.dtype)
        ctx.save_for_backward(result)
        ctx.place = place
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_create_graph("log_softmax")
        (result,) = ctx.saved_tensors
        total = ctx.place.reduce(grad.sum(-1, keepdim=True, dtype=accumulate_in(grad.dtype)))
        return (grad - result.exp() * total).to(grad.dtype), None


def log_softmax(x: Tensor, place: VocabShard) -> Tensor:
    """Give the logarithm of the softmax over all classes, [N, v] of [N, v].

    Communicates:
        Forward: all-reduces of [N] maxima and [N] sums. Backward: an all-reduce of [N] sums.
    """
    return _LogSoftmax.apply(x, place)  # type: ignore[return-value]


class _SumOver(torch.autograd.Function):
    """Sum over ranks; every rank then computes the same, so the gradient is each rank's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, axes: tuple[int, ...]) -> Tensor:
        return reduce(mesh, axes[0] if len(axes) == 1 else axes, x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def sum_over(x: Tensor, mesh: DeviceMesh, axes: tuple[int, ...]) -> Tensor:
    """Sum over the ranks along `axes`.

    Communicates:
        Forward: an all-reduce, if there are axes. Backward: nothing.
    """
    return _SumOver.apply(x, mesh, axes) if axes else x  # type: ignore[return-value]


def picked_rows(log_probs: Tensor, goal: ClassIndices, place: VocabShard) -> Tensor:
    """Give minus the target's log probability times its weight, [N], of [N, v].

    Communicates:
        Forward: an all-reduce of [N]. Backward: nothing.
    """
    found = pick(log_probs, goal.index, goal.here).to(goal.at.dtype)
    return sum_over(found, place.mesh, place.axes).neg() * goal.at
