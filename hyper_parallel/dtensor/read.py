# SPDX-License-Identifier: Apache-2.0
"""Read what users pass: meshes and placements, torch's own included, and local tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core import Layout, Partial, Placement, Replicate, Shard
from hyper_parallel.core.placement import REDUCE_OPS, normalize
from hyper_parallel.errors import LayoutError, describe
from hyper_parallel.runtime import DeviceMesh, backend_for, current_mesh
from hyper_parallel.runtime.refusals import integer_average

__all__ = [
    "is_torch_dtensor",
    "layout_of_local",
    "one_axis_mesh",
    "read_explicit_mesh",
    "read_mesh",
    "read_placement",
    "read_placements",
    "refuse_casts",
    "refuse_integer_average",
    "refuse_other_tensors",
]


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
            describe(
                where,
                "the tensor must be a torch.Tensor",
                "Make one with torch.as_tensor",
                tensor=type(tensor).__name__,
            )
        )
    if is_torch_dtensor(tensor):
        raise LayoutError(
            describe(
                where,
                "the tensor must be plain or hyper_parallel's DTensor",
                "Take its part with to_local(), or the whole with full_tensor()",
                tensor="torch.distributed.tensor.DTensor",
            )
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
        describe(
            where,
            "device_mesh must be a DeviceMesh",
            "Pass the mesh from init_device_mesh, or work inside `with mesh:`",
            device_mesh=mesh,
        )
    )


def read_explicit_mesh(mesh: Any, where: str, layout: Layout) -> DeviceMesh:
    """Read a mesh that has no default; `layout` is that of the tensor, to say in the error.

    Raises:
        LayoutError: None, or placements in its place.
    """
    if mesh is None or isinstance(mesh, (list, tuple)):
        raise LayoutError(
            describe(
                where,
                "device_mesh must be given",
                f"Pass the mesh first: redistribute(device_mesh, placements); this tensor is"
                f" on {layout.mesh!r}",
                device_mesh=mesh,
            )
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
            describe(
                where,
                "device_mesh must have one axis",
                f"Slice it: pass {example}",
                device_mesh=read,
            )
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
        describe(
            where,
            "a placement must be a Replicate, Shard or Partial",
            "Use hyper_parallel's placements",
            placement=placement,
        )
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
            describe(
                where,
                f"placements must be a sequence with one entry per mesh axis ({mesh.ndim})",
                "Pass for example [Shard(0)] for a mesh of one axis",
                placements=placements,
            )
        )
    return tuple([p if isinstance(p, Placement) else read_placement(p, where) for p in placements])


def layout_of_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int] | None,
    run_check: bool,
) -> Layout:
    """Give the layout in which `local` is this rank's part, checking that it is.

    Raises:
        LayoutError: the local shape does not fit, or an average of integers is asked for.
    """
    where = "DTensor.from_local"
    refuse_other_tensors(local, where)
    refuse_integer_average(local.dtype, placements, where)
    if shape is not None and not all(isinstance(size, int) for size in _sequence(shape)):
        raise LayoutError(
            describe(
                where, "shape must be a sequence of ints", "Pass the global shape", shape=shape
            )
        )
    if shape is None:
        shape = _even_shape(local, mesh, placements)
        layout = Layout.of(mesh, placements, shape)
    else:
        layout = Layout.of(mesh, placements, tuple(shape))
    if mesh.get_coordinate() is None:
        return layout
    got, expected = tuple(local.shape), layout.local_shape(mesh.get_rank())
    if run_check:
        _check_everywhere(mesh, layout, got)
    if got != expected:
        raise LayoutError(_misfit(layout, mesh.get_rank(), got, expected))
    return layout


def refuse_casts(dtypes: tuple[Any, Any], layouts: tuple[Layout, Layout], where: str) -> None:
    """Refuse dtypes that a value and its gradient cannot be cast to on the way between layouts.

    Raises:
        LayoutError: not a dtype, a gradient of integers, or a pending average of integers.
    """
    for name, dtype in zip(("forward_dtype", "backward_dtype"), dtypes, strict=True):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            text = describe(where, f"{name} must be a torch.dtype", "Pass one", **{name: dtype})
            raise LayoutError(text)
    forward, backward = dtypes
    if forward is not None:
        refuse_integer_average(forward, [p for at in layouts for p in at.placements], where)
    if backward is not None and not (backward.is_floating_point or backward.is_complex):
        raise LayoutError(
            describe(
                where,
                "a gradient is of floating point or complex numbers",
                "Pass such a backward_dtype",
                backward_dtype=backward,
            )
        )


def refuse_integer_average(dtype: torch.dtype, placements: Sequence[Placement], where: str) -> None:
    """Refuse a pending average of integers, which has no exact value."""
    if not (dtype.is_floating_point or dtype.is_complex) and any(
        p.is_partial("avg") for p in placements
    ):
        raise integer_average(where, dtype)


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, Sequence) else ("",)


def _even_shape(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[int, ...]:
    sizes = list(local.shape)
    normal = normalize(placements, local.ndim, where="DTensor.from_local")
    for axis, placement in enumerate(normal):
        if placement.cut_dim is not None:
            sizes[placement.cut_dim] *= mesh.shape[axis]
    return tuple(sizes)


def _check_everywhere(mesh: DeviceMesh, layout: Layout, got: tuple[int, ...]) -> None:
    """Compare all ranks' local shapes along each axis, so that all ranks refuse alike."""
    for axis in range(mesh.ndim):
        comm = mesh.communicator(axis)
        ndims = comm.all_gather_ints([len(got)])
        if len(set(ndims)) != 1:
            raise LayoutError(
                describe(
                    "DTensor.from_local",
                    "every rank's local tensor must have the same number of dims",
                    "Pass parts of one global tensor",
                    ndim_by_rank=dict(zip(comm.ranks, (n for (n,) in ndims), strict=True)),
                )
            )
        for rank, shape in zip(comm.ranks, comm.all_gather_ints(got), strict=True):
            if shape != layout.local_shape(rank):
                raise LayoutError(_misfit(layout, rank, shape, layout.local_shape(rank)))


def _misfit(layout: Layout, rank: int, got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return describe(
        "DTensor.from_local",
        f"the local shape on rank {rank} must be {expected} for {layout!r}",
        "Pass shape= with the global shape; shards must have torch.chunk's sizes",
        local_shape=got,
    )
