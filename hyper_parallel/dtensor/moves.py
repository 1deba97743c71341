# SPDX-License-Identifier: Apache-2.0
"""Moving tensors between layouts, and the autograd side of it.

Backward follows the gradient table: a gradient lies in the cotangent layout of its value (Partial
becomes Replicate), so the adjoint of a move from A to B is the move from B's cotangent to A's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.pending import pending, without_torch_function
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.executor import program

__all__ = [
    "PLAIN",
    "How",
    "Redistribute",
    "arrived",
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


def arrived(ctx: Any, grad: torch.Tensor, declared: Layout) -> tuple[torch.Tensor, Layout]:
    """Split a gradient into local tensor and layout; see [Note: gradients] in tensor.py."""
    if isinstance(grad, ctx.cls):
        return grad._local, grad._layout  # type: ignore[attr-defined]
    return grad, declared


class Redistribute(torch.autograd.Function):
    """Move a DTensor to another layout of the same global tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, dst: Layout, how: How = PLAIN) -> Any:
        """Run plan(src, dst) on the local tensor."""
        local = tensor._local
        ctx.cls, ctx.src, ctx.dst = type(tensor), tensor._layout, dst
        ctx.takes_pending = True
        ctx.how, ctx.dtype = how, local.dtype
        with without_torch_function():
            ctx.to_leaf = tensor.is_leaf
        if how.forward_dtype is not None:
            local = local.to(how.forward_dtype)
        return moved(ctx.cls, local, ctx.src, dst, how.async_op)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Run the plan between the cotangent layouts, back."""
        refuse_create_graph("DTensor.redistribute")
        local, layout = arrived(ctx, grad, ctx.dst.cotangent)
        target, dtype = ctx.src.cotangent, ctx.how.backward_dtype or ctx.dtype
        if local.dtype != dtype:
            local = local.to(dtype)
        if ctx.to_leaf:
            local = move(local, layout, target)
            return local if local.dtype == ctx.dtype else local.to(ctx.dtype), None, None
        return moved(ctx.cls, local, layout, target, ctx.how.async_op, ctx.dtype), None, None
