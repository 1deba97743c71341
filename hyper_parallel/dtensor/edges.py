# SPDX-License-Identifier: Apache-2.0
"""The edge between plain local tensors and DTensors: what gradients are on either side."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.local_op import graph_part
from hyper_parallel.dtensor.moves import arrived, move, refuse_create_graph
from hyper_parallel.dtensor.read import read_placements
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.rows import gather, reduce

__all__ = ["declared", "handed_out", "layout_of_gradient"]


def layout_of_gradient(layout: Layout, placements: Any, where: str) -> Layout | None:
    """Give the layout that `grad_placements` say, of parts as large as the value's; None for None.

    Raises:
        LayoutError: a rank's gradient would have another shape than its value.
    """
    if placements is None:
        return None
    mesh: Any = layout.mesh
    wanted = layout.with_placements(read_placements(placements, mesh, where))
    key = ("gradient", layout, wanted)
    if key not in mesh.decisions:
        for rank in mesh.ranks:
            shape, expected = wanted.local_shape(rank), layout.local_shape(rank)
            if shape != expected:
                raise LayoutError(
                    where,
                    f"the gradient's local shape must be that of the value, {expected} on rank"
                    f" {rank}",
                    "Pass the grad_placements that the local gradients have",
                    shape=shape,
                    grad_placements=wanted.placements,
                )
        mesh.decisions[key] = True
    return wanted


def declared(
    cls: type[Any], local: torch.Tensor, layout: Layout, grad_layout: Layout | None = None
) -> Any:
    """Make a DTensor of which a plain tensor is this rank's part.

    Communicates:
        Backward: what brings the gradient to `grad_layout`, or makes it that of a pending max,
        min (two all-reduces) or product (one all-gather).
    """
    if torch.is_grad_enabled() and local.requires_grad:
        return _Declare.apply(cls, local, layout, grad_layout)
    mesh: Any = layout.mesh
    is_inside = mesh.get_coordinate() is not None  # else what it passes is no part
    return cls(local.detach() if is_inside else local.new_empty(0), layout)


class _Declare(torch.autograd.Function):
    """A DTensor of this rank's part; no view of it, of which FSDP2 would warn."""

    @staticmethod
    def forward(
        ctx: Any, cls: type[Any], local: torch.Tensor, layout: Layout, grad_layout: Layout | None
    ) -> Any:
        ctx.cls, ctx.layout, ctx.grad_layout, ctx.outside = cls, layout, grad_layout, None
        ctx.takes_pending = True
        mesh: Any = layout.mesh
        if mesh.get_coordinate() is None:
            ctx.outside = local.detach()
            return cls(local.new_empty(0), layout)
        if grad_layout is None and _count(layout) is None:
            ctx.save_for_backward(local)
        return cls(local.detach(), layout)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        refuse_create_graph("DTensor.from_local")
        if ctx.outside is not None:
            return None, torch.zeros_like(ctx.outside), None, None
        cotangent = ctx.layout.cotangent
        local, lies = arrived(ctx, grad, cotangent)
        grad = move(local, lies, ctx.grad_layout or cotangent)
        count = _count(ctx.layout) if ctx.grad_layout is None else 1
        if count is None:
            (saved,) = ctx.saved_tensors
            grad = grad * _share(saved.contiguous(), ctx.layout)
        elif count > 1:
            grad = grad / count
        return None, grad, None, None


def handed_out(tensor: Any, grad_layout: Layout | None) -> torch.Tensor:
    """Give the part of a DTensor that needs a gradient, which is declared to lie in `grad_layout`.

    Communicates:
        Backward: what brings it to the cotangent layout.

    Raises:
        LayoutError: a pending max, min or product, and no `grad_layout`.
    """
    layout: Layout = tensor._layout
    count = _count(layout) if grad_layout is None and layout.has_partial else 1
    if count is None:
        raise LayoutError(
            "DTensor.to_local",
            "a pending max, min or product that needs a gradient has none without grad_placements",
            "Redistribute to Replicate first, or pass grad_placements",
            placements=layout.placements,
        )
    if grad_layout is not None and grad_layout == layout.cotangent:
        grad_layout = None
    part = graph_part(tensor, grad_layout)
    if count > 1:
        part = part.view_as(part)
        part.register_hook(lambda grad: grad * count)
    return part.view_as(part)


def _count(layout: Layout) -> int | None:
    """Give what pending averages divide by; None for a pending max, min or product."""
    count = 1
    for size, op in zip(layout.mesh.shape, layout.pending, strict=True):
        if op == "avg":
            count *= size
        elif op not in (None, "sum"):
            return None
    return count


def _share(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Give d(reduced)/d(local) of a pending max, min (ties share equally) or product."""
    mesh: Any = layout.mesh
    ops = {axis: op for axis, op in enumerate(layout.pending) if op}
    if "product" in ops.values():
        return _others_product(local, mesh, list(ops))
    result = local
    for axis, op in ops.items():
        result = reduce(mesh, axis, result.clone(), op)
    hit = (local == result).to(local.dtype)
    count = hit
    for axis in ops:
        count = reduce(mesh, axis, count.clone(), "sum")
    return hit / count


def _others_product(local: torch.Tensor, mesh: DeviceMesh, axes: list[int]) -> torch.Tensor:
    """Multiply the other ranks' contributions; exact where some are zero."""
    factor = torch.ones_like(local)
    whole = local
    for axis in axes:
        parts = gather(mesh, axis, 0, [1] * mesh.shape[axis]).whole()(whole.unsqueeze(0))
        mine = mesh.my_coordinate[axis]
        for index in range(mesh.shape[axis]):
            if index != mine:
                factor = factor * parts[index]
        whole = parts.prod(0)
    return factor
