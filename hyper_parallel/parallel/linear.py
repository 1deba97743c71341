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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.core import Layout, Partial, Placement, Plan, Replicate, Shard, plan
from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.interop import with_layout_of
from hyper_parallel.dtensor.moves import move, refuse_create_graph
from hyper_parallel.errors import LayoutError, describe
from hyper_parallel.parallel.checks import (
    first_tensor,
    is_watched,
    keep_out_of_compile,
    local_shard,
    refuse_missing,
    refuse_other_mesh,
    relocate,
)
from hyper_parallel.parallel.sizes import global_shape, learn
from hyper_parallel.runtime import Communicator, DeviceMesh, execute

__all__ = ["LinearForward"]

Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Moves:
    """The four moves around one local matmul; None where nothing has to move."""

    enter: Move | None
    leave: Move | None
    enter_back: Move | None
    leave_back: Move | None
    reduce_back: Communicator | None  # in place of enter_back: an all-reduce to overlap
    x_layout: Layout | None  # set where the shapes were needed
    y_layout: Layout | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Moves:
        """Give itself: a copied module works on the same groups."""
        return self


class LinearForward:
    """The forward of an nn.Linear under ColwiseParallel or RowwiseParallel."""

    shards = True

    def __init__(self, module: nn.Linear, mesh: DeviceMesh, where: str, **declared: Any):
        """Set up; `declared`: kind, input_layout, output_layout, use_local_output, even_shards."""
        self.module, self.mesh, self.where = module, mesh, where
        self.column: bool = declared["kind"] == "colwise"
        self.x_place: Placement = declared["input_layout"]
        self.y_place: Placement = declared["output_layout"]
        self.use_local_output: bool = declared["use_local_output"]
        self.even_shards: bool = declared["even_shards"]
        self.sizes = (module.in_features, module.out_features)
        cut = self.y_place if self.column else self.x_place  # the weight is cut alike
        self.block = cut.block if isinstance(cut, Shard) and cut.dim == -1 else 1
        self._simple = self._simple_moves() if self.use_local_output else None
        self._planned: dict[tuple[int, ...], Moves] = {}

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
            refuse_missing(name, self.where)
        moves = self._simple
        if moves is None or type(input) is not torch.Tensor:
            if isinstance(input, DTensor):
                input = self._arrive(input)
            moves = self._moves(input)
        try:
            if torch.is_grad_enabled():
                return _FusedLinear.apply(input, weight, bias, self, moves)  # type: ignore[return-value]
            y = self.compute(input, weight, bias, moves)[0]
        except RuntimeError:
            if moves is self._simple:
                self._moves(input)  # says what is wrong with a shape, in terms of the plan
            raise
        return y if self.use_local_output else DTensor(y, _required(moves.y_layout))

    def compute(
        self, x: torch.Tensor, weight: Any, bias: Any, moves: Moves
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the forward on local tensors; also give the moved input and the local weight."""
        w = weight._local if type(weight) is DTensor else local_shard(weight, self.where)
        b = bias
        if b is not None:
            b = bias._local if type(bias) is DTensor else local_shard(bias, self.where)
        if type(x) is DTensor:
            x = x._local
        if moves.enter is not None:
            x = moves.enter(x)
        if self.column:
            y = F.linear(x, w, b)
            return (y if moves.leave is None else moves.leave(y)), x, w
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
        return y + b if y.dtype == b.dtype else y + b.to(y.dtype)

    # ------------------------------------------------------------------ moves

    def _simple_moves(self) -> Moves | None:
        """Give the moves that no shape changes, or None where moves depend on shapes.

        These are column-wise from Replicate to a cut last dim, and row-wise the other way.
        """
        inner = self.y_place if self.column else self.x_place
        outer = self.x_place if self.column else self.y_place
        if not outer.is_replicate() or not inner.is_shard(-1):
            return None
        if self.mesh.size() == 1:
            return Moves(None, None, None, None, None, None, None)
        comm = self.mesh.communicator(0)
        if self.column:
            return Moves(None, None, None, None, comm, None, None)
        # Not the bound method: see [Note: watched calls].
        return Moves(None, lambda y: comm.all_reduce(y), None, None, None, None, None)

    def _moves(self, x: torch.Tensor) -> Moves:
        """Give the moves for this input's global shape."""
        try:
            found = self._moves_for(x)
        except LayoutError as error:
            relocate(error, self.where)
        if found.y_layout is not None and self.use_local_output:
            learn(self.mesh, found.y_layout)
        return found

    def _moves_for(self, x: torch.Tensor) -> Moves:
        first_tensor(self.where, (x,), {})
        shape = tuple(x.shape) if isinstance(x, DTensor) else self._shape_of_plain(x)
        if shape[-1:] != self.sizes[:1]:
            raise LayoutError(
                describe(
                    self.where,
                    f"the input's last dim must have the layer's in_features={self.sizes[0]}",
                    "Pass the tensor that input_layouts describes",
                    global_shape=shape,
                    input_layouts=self.x_place,
                )
            )
        found = self._planned.get(shape)
        if found is None:
            found = self._plan_moves(shape)
            if len(self._planned) > 256:
                self._planned.clear()
            self._planned[shape] = found
        return found

    def _shape_of_plain(self, x: torch.Tensor) -> tuple[int, ...]:
        place = self.x_place
        if isinstance(place, Shard) and x.dim() and place.dim in (-1, x.dim() - 1):
            shape = (*x.shape[:-1], self.sizes[0])
            wanted = Layout(self.mesh, (place,), shape).local_shape(self.mesh.get_rank())
            if tuple(x.shape) != wanted:
                raise LayoutError(
                    describe(
                        self.where,
                        f"the input must be this rank's shard of in_features={self.sizes[0]}:"
                        f" size {wanted[-1]} on dim {x.dim() - 1}",
                        "Cut it as torch.chunk does, or declare input_layouts=Replicate()",
                        size=x.shape[-1],
                    )
                )
            return shape
        return global_shape(x, self.mesh, place, where=self.where, even_shards=self.even_shards)

    def _plan_moves(self, shape: tuple[int, ...]) -> Moves:
        mesh = self.mesh
        y_shape = (*shape[:-1], self.sizes[1])
        last = Shard(len(shape) - 1, self.block)
        x = Layout(mesh, (self.x_place,), shape)
        y = Layout(mesh, (self.y_place,), y_shape)
        used = x.with_placements([Replicate() if self.column else last])
        made = y.with_placements([last if self.column else Partial()])
        grad_used = used.with_placements([Partial() if self.column else last])
        return Moves(
            enter=_as_move(plan(x, used), mesh),
            leave=_as_move(plan(made, y), mesh),
            enter_back=_as_move(plan(grad_used, x.cotangent), mesh),
            leave_back=_as_move(plan(y.cotangent, made.cotangent), mesh),
            reduce_back=None,
            x_layout=x,
            y_layout=y,
        )

    def _arrive(self, x: DTensor) -> DTensor:
        """Bring a DTensor to the declared input layout, from wherever it says it is."""
        refuse_other_mesh(x, self.mesh, self.where)
        declared = x.layout.with_placements([self.x_place])
        return x if x.layout == declared else x.redistribute(self.mesh, [self.x_place])


def _as_move(steps: Plan, mesh: DeviceMesh) -> Move | None:
    return (lambda local: execute(steps, local, mesh)) if len(steps) else None


def _required(layout: Layout | None) -> Layout:
    assert layout is not None  # noqa: S101  # ours: a DTensor handed out has a layout
    return layout


class _FusedLinear(torch.autograd.Function):
    """See [Note: fused linear]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        edge: LinearForward,
        moves: Moves,
    ) -> torch.Tensor:
        y, used, w = edge.compute(x, weight, bias, moves)
        if y.dtype != w.dtype or y.dtype != used.dtype:  # under autocast
            used, w = used.to(y.dtype), w.to(y.dtype)
        need_x, need_w, _, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(used if need_w else None, w if need_x else None)
        ctx.edge, ctx.moves, ctx.weight, ctx.bias, ctx.dtype = edge, moves, weight, bias, w.dtype
        ctx.x_dtype, ctx.takes_plain = x.dtype, True
        return y if edge.use_local_output else DTensor(y, _required(moves.y_layout))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_create_graph(ctx.edge.where)
        used, w = ctx.saved_tensors
        moves: Moves = ctx.moves
        if type(grad) is DTensor:
            grad = move(grad._local, grad._layout, _required(moves.y_layout).cotangent)
        if moves.leave_back is not None:
            grad = moves.leave_back(grad)
        if grad.dtype != ctx.dtype:
            grad = grad.to(ctx.dtype)
        need_x, need_w, need_b, _, _ = ctx.needs_input_grad
        grad_x = grad_w = grad_b = work = None
        if need_x:
            grad_x = grad @ w
            if moves.reduce_back is not None:
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
            grad_x = _to_input(ctx, moves, grad_x)
        return grad_x, grad_w, grad_b, None, None


def _to_input(ctx: Any, moves: Moves, grad_x: torch.Tensor) -> torch.Tensor:
    if moves.enter_back is not None:
        grad_x = moves.enter_back(grad_x)
    if grad_x.dtype != ctx.x_dtype:
        grad_x = grad_x.to(ctx.x_dtype)
    return grad_x  # plain, so in the cotangent layout of x


def _to_leaf(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Give a local gradient as the parameter's autograd leaf takes it."""
    if grad.dtype != param.dtype:
        grad = grad.to(param.dtype)
    return grad if type(param) is DTensor else with_layout_of(param, grad)
