# SPDX-License-Identifier: Apache-2.0
"""The fused local form of a parallel Linear: input move, matmul, output move, as one autograd node.

[Note: fused linear] No DTensor op runs. Forward: move the input in, multiply by the local weight,
move the product out, add a row-wise bias once, after the reduction. Backward: the adjoint of the
output move, then grad_input whose reduction is started before grad_weight is computed, so that
the two overlap. The parameters are the autograd leaves; what they receive is plain local tensors.

With x the input, W the weight (Megatron-LM, arXiv:1909.08053, sections 3 and 4):
  column-wise: W is S(0); x is R when it is used; x W^T is S(-1); grad_x is a pending sum.
  row-wise:    W is S(1); x is S(-1) when it is used; x W^T is a pending sum; grad_x is S(-1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.core import Layout, Shard
from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.interop import with_layout_of
from hyper_parallel.dtensor.moves import move, refuse_create_graph
from hyper_parallel.parallel.checks import (
    is_watched,
    keep_out_of_compile,
    local_shard,
    lost_parameter,
)
from hyper_parallel.parallel.fused import Fusing
from hyper_parallel.parallel.linear_moves import LinearEdge, Moves
from hyper_parallel.runtime import DeviceMesh

__all__ = ["LinearForward"]


class LinearForward(LinearEdge):
    """The forward of an nn.Linear under ColwiseParallel or RowwiseParallel."""

    shards = True

    def __init__(self, module: nn.Linear, mesh: DeviceMesh, style: Any):
        super().__init__(module, mesh, style)
        self.module = module
        self._simple = self.simple()

    @property
    def hands_out_features(self) -> bool:
        """Tell whether callers get plain tensors of this rank's features."""
        return self.column and self.use_local_output and self.y_place.is_shard(-1)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer to a plain local tensor or a DTensor."""
        if is_watched():
            return keep_out_of_compile(self.__call__, self.where, (input,), {})
        params = self.module._parameters
        try:
            weight, bias = params["weight"], params["bias"]
        except KeyError as name:
            raise lost_parameter(self.where, name) from None
        moves = self._simple
        if moves is None or type(input) is not torch.Tensor:
            if isinstance(input, DTensor):
                input = self.arrive(input)
            moves = self.moves(input)
        fusing = None if moves.fused is None else moves.fused.here()
        try:
            if torch.is_grad_enabled():
                return _FusedLinear.apply(input, weight, bias, self, moves, fusing)  # type: ignore[return-value]
            y = self.compute(input, weight, bias, moves, fusing)[0]
        except RuntimeError:
            if moves is self._simple:
                self.moves(input)  # says what is wrong with a shape, in terms of the plan
            raise
        return y if self.use_local_output else DTensor(y, _required(moves.y_layout))

    def compute(
        self, x: torch.Tensor, weight: Any, bias: Any, moves: Moves, fusing: Fusing | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the forward on local tensors; also give the moved input and the local weight."""
        w = weight._local if type(weight) is DTensor else local_shard(weight, self.where)
        b = bias
        if b is not None:
            b = bias._local if type(bias) is DTensor else local_shard(bias, self.where)
        if type(x) is DTensor:
            x = x._local
        if self.column:
            made = None if fusing is None else fusing.gather(x, w.t())
            if made is not None:
                y, x = made
                y = y if b is None else _add(y, b)
            else:
                x = x if moves.enter is None else moves.enter(x)
                y = F.linear(x, w, b)
            return (y if moves.leave is None else moves.leave(y)), x, w
        if moves.enter is not None:
            x = moves.enter(x)
        y = None if fusing is None else fusing.spread(x, w.t())
        if y is None:
            y = F.linear(x, w)
            if moves.leave is not None:
                y = moves.leave(y)
        return (y if b is None else self._add_bias(y, b)), x, w

    def _add_bias(self, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Add a row-wise bias once: on the first rank of a pending sum, the own part of a cut."""
        place, mesh = self.y_place, self.mesh
        if place.is_partial() and mesh.get_local_rank():
            return y
        if isinstance(place, Shard) and place.dim % y.dim() == y.dim() - 1:
            part = Layout(mesh, (Shard(0, place.block),), b.shape).slices(mesh.get_rank())
            b = b[part]
        return _add(y, b)


def _add(y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return y + b if y.dtype == b.dtype else y + b.to(y.dtype)


def _required(layout: Layout | None) -> Layout:
    assert layout is not None  # noqa: S101  # ours: a DTensor handed out has a layout
    return layout


class _FusedLinear(torch.autograd.Function):
    """See [Note: fused linear]."""

    @staticmethod
    def forward(  # noqa: PLR0913  # autograd sees tensors only where they are arguments
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        edge: LinearForward,
        moves: Moves,
        fusing: Fusing | None,
    ) -> torch.Tensor:
        y, used, w = edge.compute(x, weight, bias, moves, fusing)
        if y.dtype != w.dtype or y.dtype != used.dtype:  # under autocast
            used, w = used.to(y.dtype), w.to(y.dtype)
        need_x, need_w, *_ = ctx.needs_input_grad
        ctx.save_for_backward(used if need_w else None, w if need_x else None)
        ctx.edge, ctx.moves, ctx.weight, ctx.bias, ctx.dtype = edge, moves, weight, bias, w.dtype
        ctx.x_dtype, ctx.takes_pending = x.dtype, True
        ctx.fusing = fusing
        return y if edge.use_local_output else DTensor(y, _required(moves.y_layout))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_create_graph(ctx.edge.where)
        used, w = ctx.saved_tensors
        moves: Moves = ctx.moves
        if type(grad) is DTensor:
            grad = move(grad._local, grad._layout, _required(moves.y_layout).cotangent)
        _, need_w, need_b, *_ = ctx.needs_input_grad
        grad_x, grad, is_moved = _grad_input(ctx, grad, w)
        grad_w = grad_b = work = None
        if grad_x is not None and moves.reduce_back is not None:
            work = moves.reduce_back.all_reduce(grad_x, async_op=True)
        if need_w or need_b:
            rows = grad.flatten(0, -2) if grad.dim() > 1 else grad.unsqueeze(0)
            if need_w:
                inputs = used.flatten(0, -2) if used.dim() > 1 else used.unsqueeze(0)
                grad_w = _to_leaf(ctx.weight, rows.t() @ inputs)
            if need_b:
                grad_b = _to_leaf(ctx.bias, rows.sum(0))
        if grad_x is not None:
            if work is not None:
                grad_x = work.wait()
            if moves.enter_back is not None and not is_moved:
                grad_x = moves.enter_back(grad_x)
            if grad_x.dtype != ctx.x_dtype:
                grad_x = grad_x.to(ctx.x_dtype)
        return grad_x, grad_w, grad_b, None, None, None  # plain: in the cotangent layout of x


def _grad_input(
    ctx: Any, grad: torch.Tensor, w: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor, bool]:
    """Give grad_input, the gradient of the product, and whether grad_input lies as x does."""
    moves: Moves = ctx.moves
    fusing: Fusing | None = ctx.fusing
    if fusing is not None and w is not None and moves.leave_back and not ctx.edge.column:
        made = fusing.gather(grad.to(ctx.dtype), w, backward=True)
        if made is not None:
            return *made, False
    if moves.leave_back is not None:
        grad = moves.leave_back(grad)
    if grad.dtype != ctx.dtype:
        grad = grad.to(ctx.dtype)
    if fusing is not None and w is not None and ctx.edge.column:
        moved = fusing.spread(grad, w, backward=True)
        if moved is not None:
            return moved, grad, True
    return (None if w is None else grad @ w), grad, False


def _to_leaf(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Give a local gradient as the parameter's autograd leaf takes it."""
    if grad.dtype != param.dtype:
        grad = grad.to(param.dtype)
    return grad if type(param) is DTensor else with_layout_of(param, grad)
