# SPDX-License-Identifier: Apache-2.0
"""Read what users pass: meshes, placements and dtypes, torch's own included."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core import Layout, Partial, Placement, Replicate, Shard
from hyper_parallel.core.placement import REDUCE_OPS
from hyper_parallel.errors import LayoutError, PlanError, describe
from hyper_parallel.runtime import DeviceMesh, backend_for, current_mesh
from hyper_parallel.runtime.refusals import integer_average

__all__ = [
    "is_torch_dtensor",
    "one_axis_mesh",
    "read_explicit_mesh",
    "read_mesh",
    "read_placement",
    "read_placements",
    "refuse_casts",
    "refuse_other_meshes",
    "refuse_other_tensors",
    "refuse_pending",
    "refuse_slices",
    "whole_of",
]


def whole_of(cls: type[Any], value: Any) -> Any:
    """Give the whole of a DTensor as a plain tensor without a graph, and anything else as it is."""
    return value.local_in(value._layout.replicated) if isinstance(value, cls) else value  # type: ignore[attr-defined]


def is_torch_dtensor(tensor: Any) -> bool:
    """Tell whether a tensor is torch's own DTensor, without importing its package."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)


def refuse_other_tensors(tensor: Any, where: str) -> None:
    """Refuse what is no tensor, and torch's own DTensor, where a plain one or ours belongs.

    Raises:
        LayoutError: it is one of these.
    """
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(
            where,
            "the tensor must be a torch.Tensor",
            "Make one with torch.as_tensor",
            tensor=type(tensor).__name__,
        )
    if is_torch_dtensor(tensor):
        raise LayoutError(
            where,
            "the tensor must be plain or hyper_parallel's DTensor",
            "Take its part with to_local(), or the whole with full_tensor()",
            tensor="torch.distributed.tensor.DTensor",
        )


def read_mesh(mesh: Any, where: str) -> DeviceMesh:
    """Give our DeviceMesh for ours or torch's (wrapped on the same groups) or None (`with mesh:`).

    Raises:
        LayoutError: neither kind of mesh, or None outside a `with mesh:` block.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is None:
        mesh = current_mesh()
        if mesh is not None:
            return mesh
    elif hasattr(mesh, "device_type") and hasattr(mesh, "get_group"):
        return backend_for(mesh.device_type).wrap_mesh(mesh)
    raise LayoutError(
        where,
        "device_mesh must be a DeviceMesh",
        "Pass the mesh from init_device_mesh, or work inside `with mesh:`",
        device_mesh=mesh,
    )


def read_explicit_mesh(mesh: Any, where: str, layout: Layout) -> DeviceMesh:
    """Read a mesh that has no default; `layout` is that of the tensor, to say in the error.

    Raises:
        LayoutError: None, or placements in its place.
    """
    if mesh is None or isinstance(mesh, (list, tuple)):
        raise LayoutError(
            where,
            "device_mesh must be given",
            f"Pass the mesh first: redistribute(device_mesh, placements); this tensor is"
            f" on {layout.mesh!r}",
            device_mesh=mesh,
        )
    return read_mesh(mesh, where)


def one_axis_mesh(mesh: Any, where: str) -> DeviceMesh:
    """Read a mesh that must have one axis.

    Raises:
        LayoutError: it has several; the text says to slice it.
    """
    read = read_mesh(mesh, where)
    if read.ndim != 1:
        names = read.mesh_dim_names
        example = f"mesh[{names[-1]!r}]" if names else "mesh[name] of a mesh with mesh_dim_names"
        raise LayoutError(
            where, "device_mesh must have one axis", f"Slice it: pass {example}", device_mesh=read
        )
    return read


def read_placement(placement: Any, where: str) -> Placement:
    """Give our placement for ours or torch's.

    Raises:
        LayoutError: neither, or one of torch's that has no counterpart.
    """
    if isinstance(placement, Placement):
        return placement
    kind = type(placement).__name__
    if kind == "Replicate":
        return Replicate()
    if kind == "Shard":
        return Shard(placement.dim)
    if kind == "Partial" and placement.reduce_op in REDUCE_OPS:
        return Partial(placement.reduce_op)
    raise LayoutError(
        where,
        "a placement must be a Replicate, Shard or Partial",
        "Use hyper_parallel's placements",
        placement=placement,
    )


def read_placements(placements: Any, mesh: DeviceMesh, where: str) -> tuple[Placement, ...]:
    """Read one placement per mesh axis; None means Replicate on each.

    Raises:
        LayoutError: not a sequence, or not one per axis.
    """
    if placements is None:
        return (Replicate(),) * mesh.ndim
    if not isinstance(placements, (list, tuple, Sequence)) or len(placements) != mesh.ndim:
        raise LayoutError(
            where,
            f"placements must be a sequence with one entry per mesh axis ({mesh.ndim})",
            "Pass for example [Shard(0)] for a mesh of one axis",
            placements=placements,
        )
    return tuple([p if isinstance(p, Placement) else read_placement(p, where) for p in placements])


def refuse_casts(dtypes: tuple[Any, Any], layouts: tuple[Layout, Layout], where: str) -> None:
    """Refuse dtypes that a value and its gradient cannot be cast to on the way between layouts.

    Raises:
        LayoutError: not a dtype, a gradient of integers, or a reduction that the dtype has not.
    """
    for name, dtype in zip(("forward_dtype", "backward_dtype"), dtypes, strict=True):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            text = describe(where, f"{name} must be a torch.dtype", "Pass one", **{name: dtype})
            raise LayoutError(text)
    forward, backward = dtypes
    if forward is not None:
        refuse_pending(forward, [p for at in layouts for p in at.placements], where)
    if backward is not None and not (backward.is_floating_point or backward.is_complex):
        raise LayoutError(
            where,
            "a gradient is of floating point or complex numbers",
            "Pass such a backward_dtype",
            backward_dtype=backward,
        )


def refuse_pending(dtype: torch.dtype, placements: Sequence[Placement], where: str) -> None:
    """Refuse a pending reduction that the dtype does not have, before anything is pending.

    Raises:
        LayoutError: an average of integers, or an extreme of complex numbers.
    """
    if dtype.is_floating_point:
        return
    if not dtype.is_complex and any(p.is_partial("avg") for p in placements):
        raise integer_average(where, dtype)
    if dtype.is_complex and any(p.is_partial("max") or p.is_partial("min") for p in placements):
        raise LayoutError(
            where,
            "Partial('max') and Partial('min') need numbers that have an order",
            "Reduce abs() or view_as_real() of the tensor",
            dtype=dtype,
        )


def refuse_slices(src: DeviceMesh, dst: DeviceMesh, where: str) -> None:
    """Refuse to move to or from a slice whose ranks are not those of the other mesh.

    Each row of the sliced mesh would take another mesh for it, and wait for other ranks.

    Raises:
        PlanError: the ranks differ, and one of the two is a slice of a larger mesh.
    """
    if (src.is_slice or dst.is_slice) and set(src.ranks) != set(dst.ranks):
        raise PlanError(
            where,
            "a mesh of other ranks must be the same mesh on every rank, not a slice",
            "Make it with DeviceMesh(device_type, ranks); or stay on the whole mesh, with"
            " Replicate on the other axes, and go through to_local and from_local",
            src=src,
            dst=dst,
        )


def refuse_other_meshes(where: str, meshes: Sequence[Any]) -> None:
    """Refuse operands that are on several meshes.

    Raises:
        LayoutError: the meshes are not equal.
    """
    if any(mesh != meshes[0] for mesh in meshes):
        must = "all operands must be on one mesh"
        raise LayoutError(where, must, "Redistribute them to one mesh", meshes=[*meshes])
