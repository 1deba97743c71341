# SPDX-License-Identifier: Apache-2.0
"""The autograd side of moving tensors: local -> DTensor, DTensor -> local, layout -> layout.

Backward follows the gradient table: a gradient lies in the cotangent layout of its value (Partial
becomes Replicate), so the adjoint of a move from A to B is the move from B's cotangent to A's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hyper_parallel.core import Layout, Partial
from hyper_parallel.dtensor.pending import pending, without_torch_function
from hyper_parallel.errors import HyperParallelError, LayoutError
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.executor import program
from hyper_parallel.runtime.rows import gather_dim, reduce

__all__ = [
    "PLAIN",
    "FromLocal",
    "How",
    "Redistribute",
    "ToLocal",
    "move",
    "moved",
    "refuse_create_graph",
]


class How(NamedTuple):
    """The options of a redistribution.

    Args:
        forward_dtype: what the value travels as, and stays; None: its own.
        backward_dtype: what the gradient travels as; None: the value's own.
        async_op: whether the last collective stays in flight.
    """

    forward_dtype: torch.dtype | None = None
    backward_dtype: torch.dtype | None = None
    async_op: bool = False


PLAIN = How()


def move(local: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
    """Run plan(src, dst) on a local tensor; the tensor itself when there is nothing to do."""
    if src is dst:
        return local
    return program(src, dst).run(local)


def moved(
    cls: type[Any],
    local: torch.Tensor,
    src: Layout,
    dst: Layout,
    async_op: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Run plan(src, dst), cast, and wrap; see [Note: pending results] in pending.py."""
    dtype = dtype or local.dtype
    if async_op and src is not dst:
        work = program(src, dst).launch(local, _mesh(dst).backend.ops.clone)
        if work is not None:
            return pending(cls, work, dst, dtype=dtype, device=local.device)
    local = move(local, src, dst)
    return cls(local if local.dtype == dtype else local.to(dtype), dst)


def _mesh(layout: Layout) -> DeviceMesh:
    assert isinstance(layout.mesh, DeviceMesh)  # noqa: S101
    return layout.mesh


def refuse_create_graph(where: str) -> None:
    """Refuse to build a graph of the backward pass, which would lose gradients silently.

    Raises:
        HyperParallelError: backward runs with create_graph=True.
    """
    if torch.is_grad_enabled():
        raise HyperParallelError(
            where,
            "backward must run without create_graph",
            "Second derivatives through distributed ops are not supported",
            create_graph=True,
        )


def _arrived(ctx: Any, grad: torch.Tensor, declared: Layout) -> tuple[torch.Tensor, Layout]:
    """Split a gradient into local tensor and layout; see [Note: gradients] in tensor.py."""
    if isinstance(grad, ctx.cls):
        return grad._local, grad._layout  # type: ignore[attr-defined]
    return grad, declared


def _is_leaf(tensor: Any) -> bool:
    """Read it without a round through `__torch_function__`."""
    with without_torch_function():
        return tensor.is_leaf


def _leaves(ctx: Any, local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Hand a gradient on: plain to a leaf, as a DTensor to other nodes."""
    return local if ctx.to_leaf else ctx.cls(local, layout)


class Redistribute(torch.autograd.Function):
    """Move a DTensor to another layout of the same global tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, dst: Layout, how: How = PLAIN) -> Any:
        """Run plan(src, dst) on the local tensor."""
        local = tensor._local
        ctx.cls, ctx.src, ctx.dst = type(tensor), tensor._layout, dst
        ctx.takes_plain = True
        ctx.to_leaf, ctx.how, ctx.dtype = _is_leaf(tensor), how, local.dtype
        if how.forward_dtype is not None:
            local = local.to(how.forward_dtype)
        return moved(ctx.cls, local, ctx.src, dst, how.async_op)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Run the plan between the cotangent layouts, back."""
        refuse_create_graph("DTensor.redistribute")
        local, layout = _arrived(ctx, grad, ctx.dst.cotangent)
        target, dtype = ctx.src.cotangent, ctx.how.backward_dtype or ctx.dtype
        if local.dtype != dtype:
            local = local.to(dtype)
        if ctx.to_leaf:
            local = move(local, layout, target)
            return local if local.dtype == ctx.dtype else local.to(ctx.dtype), None, None
        return moved(ctx.cls, local, layout, target, ctx.how.async_op, ctx.dtype), None, None


class FromLocal(torch.autograd.Function):
    """Declare a plain local tensor to be this rank's part of a DTensor."""

    @staticmethod
    def forward(
        ctx: Any, cls: type[Any], local: torch.Tensor, layout: Layout, grad_layout: Layout | None
    ) -> Any:
        """Wrap; no communication."""
        ctx.cls, ctx.layout, ctx.grad_layout = cls, layout, grad_layout
        ctx.takes_plain = True
        ctx.outside = None
        if _mesh(layout).get_coordinate() is None:  # what such a rank passes is no part of it
            ctx.outside = local.detach()
            return cls(local.new_empty(0), layout)
        if grad_layout is None and not _linear_partials(layout):
            ctx.save_for_backward(local)
        return cls(local.detach(), layout)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        """Move the gradient to the local tensor's own layout; divide or mask for a Partial."""
        refuse_create_graph("DTensor.from_local")
        if ctx.outside is not None:
            return None, torch.zeros_like(ctx.outside), None, None
        local, layout = _arrived(ctx, grad, ctx.layout.cotangent)
        if ctx.grad_layout is not None:
            return None, move(local, layout, ctx.grad_layout), None, None
        moved = move(local, layout, ctx.layout.cotangent)
        if not _linear_partials(ctx.layout):
            (saved,) = ctx.saved_tensors
            moved = moved * _share(saved, ctx.layout)
        elif (count := _average_count(ctx.layout)) > 1:
            moved = moved / count
        return None, moved, None, None


class ToLocal(torch.autograd.Function):
    """Hand out this rank's part of a DTensor as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, grad_layout: Layout | None) -> torch.Tensor:
        """Unwrap; no communication."""
        layout = tensor._layout
        if grad_layout is None and not _linear_partials(layout):
            raise LayoutError(
                "DTensor.to_local",
                "a pending max, min or product that needs a gradient has none without"
                " grad_placements",
                "Redistribute to Replicate first, or pass grad_placements",
                placements=layout.placements,
            )
        ctx.cls, ctx.layout, ctx.grad_layout = type(tensor), layout, grad_layout
        ctx.to_leaf = _is_leaf(tensor)
        return tensor._local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Take the local cotangents as laid out in grad_placements (default: the cotangent)."""
        refuse_create_graph("DTensor.to_local")
        target = ctx.layout.cotangent
        if ctx.grad_layout is None:
            count = _average_count(ctx.layout)
            return _leaves(ctx, grad * count if count > 1 else grad, target), None
        if ctx.to_leaf:
            return move(grad, ctx.grad_layout, target), None
        return ctx.cls(grad, ctx.grad_layout), None


def _linear_partials(layout: Layout) -> bool:
    """Tell whether no axis of more than one rank holds a pending max, min or product."""
    return all(
        size == 1 or not isinstance(p, Partial) or p.reduce_op in ("sum", "avg")
        for size, p in zip(layout.mesh.shape, layout.placements, strict=True)
    )


def _average_count(layout: Layout) -> int:
    """Give the number of contributions that pending averages divide by."""
    count = 1
    for axis, placement in enumerate(layout.placements):
        if placement.is_partial("avg"):
            count *= layout.mesh.shape[axis]
    return count


def _share(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Give d(reduced)/d(local) of a pending max, min (ties share equally) or product."""
    mesh = _mesh(layout)
    axes = [i for i, p in enumerate(layout.placements) if p.is_partial() and mesh.shape[i] > 1]
    if any(layout.placements[axis].is_partial("product") for axis in axes):
        return _others_product(local, mesh, axes)
    result = local
    for axis in axes:
        placement = layout.placements[axis]
        assert isinstance(placement, Partial)  # noqa: S101
        result = reduce(mesh, axis, result.clone(), placement.reduce_op)
    hit = (local == result).to(local.dtype)
    count = hit
    for axis in axes:
        count = reduce(mesh, axis, count.clone(), "sum")
    return hit / count


def _others_product(local: torch.Tensor, mesh: DeviceMesh, axes: list[int]) -> torch.Tensor:
    """Multiply the other ranks' contributions; exact where some are zero."""
    factor = torch.ones_like(local)
    whole = local
    for axis in axes:
        parts = gather_dim(mesh, axis, whole.unsqueeze(0), 0, [1] * mesh.shape[axis])
        mine = mesh.my_coordinate[axis]
        for index in range(mesh.shape[axis]):
            if index != mine:
                factor = factor * parts[index]
        whole = parts.prod(0)
    return factor
