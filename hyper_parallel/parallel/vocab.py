# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over a class dim that is cut between ranks, on plain local tensors.

[Note: vocabulary loss] Let q be what the target weighs each class with (targets.py). A row's loss
is lse * sum(q) - sum(q * x), lse being the logarithm of the sum of exp(x). So two collectives do:
one maximum, and one sum of everything a row needs, stacked. Backward is softmax * sum(q) - q, times
the row's gradient: no communication. Only the logits and lse are kept; the softmax is made again in
backward.

Legend: N rows (any number of dims), V classes in all, v classes of this rank, the last dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.dtensor.moves import refuse_create_graph
from hyper_parallel.parallel.targets import (
    ClassIndices,
    Goal,
    VocabShard,
    accumulate_in,
)
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.rows import reduce

__all__ = ["linear_rows", "log_softmax", "loss_rows", "picked_rows", "sum_over"]

Tensor = torch.Tensor


def _maximum(x: Tensor, place: VocabShard) -> Tensor:
    """Give the maximum of all classes, [N, 1]."""
    dtype = accumulate_in(x.dtype)
    if not x.shape[-1]:
        own = x.new_full((*x.shape[:-1], 1), float("-inf"), dtype=dtype)
    else:
        own = x.amax(-1, keepdim=True).to(dtype)
    return place.reduce(own, "max")


def _rows(x: Tensor, goal: Goal) -> tuple[Tensor, Tensor, Tensor]:
    """Give loss, lse and mass of each row; see [Note: vocabulary loss]."""
    largest = _maximum(x, goal.place)
    shifted = x.to(largest.dtype) - largest
    sums = goal.sums(shifted)
    every = goal.place.reduce(torch.stack([*sums, shifted.exp_().sum(-1)]))
    log_total = every[-1].log()
    mass = goal.mass if isinstance(goal, ClassIndices) else every[1]
    loss = goal.counted(log_total * mass - every[0])
    return loss, log_total + largest.squeeze(-1), mass


def _rows_backward(x: Tensor, goal: Goal, lse: Tensor, mass: Tensor, grad: Tensor) -> Tensor:
    """Give the gradient of the logits, of the rows' gradient [N]."""
    grad = goal.counted(grad)  # where no target counts, a mean divides by zero
    result = (x.to(lse.dtype) - lse.unsqueeze(-1)).exp_().mul_((grad * mass).unsqueeze(-1))
    goal.subtract_from(result, grad)
    return result.to(x.dtype)


class _LossRows(torch.autograd.Function):
    """The loss of each row, [N], of logits [N, v]; `p` is that of ClassProbabilities.

    Communicates:
        Forward: all-reduces of [N] maxima and [2, N] sums ([3, N] for probabilities). Backward:
        nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor | None, goal: Goal) -> Tensor:
        loss, lse, mass = _rows(x, goal)
        ctx.save_for_backward(x, p, lse, mass)
        # Autograd keeps p: it frees it, and sees when it is written to.
        ctx.goal = goal if p is None else replace(goal, p=x.new_empty(0))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_create_graph("cross_entropy")
        x, p, lse, mass = ctx.saved_tensors
        goal = ctx.goal if p is None else replace(ctx.goal, p=p)
        grad_x = grad_p = None
        if ctx.needs_input_grad[0]:
            grad_x = _rows_backward(x, goal, lse, mass, grad)
        if ctx.needs_input_grad[1]:
            grad_p = goal.grad_of_p(lse.unsqueeze(-1) - x.to(lse.dtype), grad)
        return grad_x, grad_p, None


class _LinearRows(torch.autograd.Function):
    """The loss of each row, [N], of x [N, H] @ weight^T [v, H] + bias, holding [chunk, v] logits.

    Communicates:
        Forward: for each chunk what `loss_rows` does. Backward: nothing (the logits are made
        again); the gradient of `x` is this rank's share of a sum.
    """

    @staticmethod
    def forward(  # torch passes what apply got, by position
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        goal: ClassIndices,
        chunk: int,
    ) -> Tensor:
        found = [
            _rows(F.linear(x[start:stop], weight, bias), goal.part(start, stop))
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
        return *[g if g is None else g.to(x.dtype) for g in grads], None, None


def _chunks(rows: int, chunk: int) -> Sequence[tuple[int, int]]:
    return [(start, min(start + chunk, rows)) for start in range(0, rows, chunk)] or [(0, 0)]


class _LogSoftmax(torch.autograd.Function):
    """The logarithm of the softmax over all classes, [N, v] of [N, v].

    Communicates:
        Forward: all-reduces of [N] maxima and [N] sums. Backward: an all-reduce of [N] sums.
    """

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


def picked_rows(log_probs: Tensor, goal: ClassIndices) -> Tensor:
    """Give minus the target's log probability times its weight, [N], of [N, v].

    Communicates:
        Forward: an all-reduce of [N]. Backward: nothing.
    """
    found = goal.look_up(log_probs).to(goal.at.dtype)
    return goal.counted(sum_over(found, goal.place.mesh, goal.place.axes).neg() * goal.at)


loss_rows, linear_rows, log_softmax = _LossRows.apply, _LinearRows.apply, _LogSoftmax.apply
