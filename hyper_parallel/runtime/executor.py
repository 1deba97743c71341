# SPDX-License-Identifier: Apache-2.0
"""Run a plan on this rank's local array. With a backend's batched form, the only place that does.

[Note: layouts decide] Whether a collective is skipped or padded is read off the layouts, never off
the local array, so every rank issues the same collectives.

Every collective runs along dim 0: a dim is moved to the front before and back after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.collective import Plan, Step
from hyper_parallel.core.layout import chunk_sizes
from hyper_parallel.core.placement import Partial, Shard
from hyper_parallel.runtime.interface import ArrayOps, Communicator
from hyper_parallel.runtime.mesh import DeviceMesh

__all__ = ["execute", "gather_dim", "reduce", "reduce_scatter_dim", "scatter_from"]

Array = Any


def execute(plan: Plan, local: Array, mesh: DeviceMesh) -> Array:
    """Turn this rank's local array from `plan.src` into `plan.dst`.

    Args:
        plan: what to do.
        local: this rank's array, of `plan.src.local_shape(rank)`; it is not changed.
        mesh: this process's mesh, equal to the plan's.

    Returns:
        The array in `plan.dst`, contiguous; `local` itself if the plan is empty or this rank is
        outside the mesh.

    Communicates:
        What the plan's communicating steps name, in order, on the steps' axes.
    """
    if plan.steps and mesh.get_coordinate() is None:
        return local
    for step in plan.steps:
        local = _STEPS[step.kind](step, local, mesh)
    return local


def _all_reduce(step: Step, local: Array, mesh: DeviceMesh) -> Array:
    if _is_empty(step):
        return local
    return reduce(mesh, step.axes[0], mesh.backend.ops.clone(local), _op(step.src, step.axes[0]))


def reduce(mesh: DeviceMesh, axis: int, x: Array, op: str = "sum") -> Array:
    """All-reduce the contiguous `x`, which the caller gives up, along an axis."""
    comm = mesh.communicator(axis)
    if op == "avg" and not mesh.backend.capabilities.native_avg:
        return mesh.backend.ops.scale(comm.all_reduce(x, "sum"), comm.size, divide=True)
    return comm.all_reduce(x, op)


def _all_gather(step: Step, local: Array, mesh: DeviceMesh) -> Array:
    axis = step.axes[0]
    placement = _shard(step.src, axis)
    sizes = step.src.axis_sizes(axis, mesh.my_coordinate)
    if _is_empty(step):
        return mesh.backend.ops.empty(step.dst.local_shape(mesh.get_rank()), local)
    return gather_dim(mesh, axis, local, placement.dim, sizes)


def gather_dim(mesh: DeviceMesh, axis: int, local: Array, dim: int, sizes: Sequence[int]) -> Array:
    """All-gather pieces of the given sizes along tensor dim `dim` over a mesh axis."""
    ops, comm = mesh.backend.ops, mesh.communicator(axis)
    front = ops.contiguous(ops.movedim(local, dim, 0))
    if len(set(sizes)) == 1:
        whole = comm.all_gather(front)
    elif mesh.backend.capabilities.uneven_gather:
        whole = comm.all_gather_v(front, sizes)
    else:
        whole = _gather_padded(ops, comm, front, sizes)
    return ops.contiguous(ops.movedim(whole, 0, dim))


def _gather_padded(ops: ArrayOps, comm: Communicator, front: Array, sizes: Sequence[int]) -> Array:
    largest = max(sizes)
    padded = _pad_rows(ops, front, largest)
    whole = comm.all_gather(padded)
    parts = [ops.narrow(whole, 0, i * largest, size) for i, size in enumerate(sizes)]
    return ops.cat(parts, 0)


def _pad_rows(ops: ArrayOps, x: Array, rows: int) -> Array:
    if x.shape[0] == rows:
        return x
    padded = ops.identity((rows, *x.shape[1:]), "sum", x)
    ops.copy_into(ops.narrow(padded, 0, 0, x.shape[0]), x)
    return padded


def _reduce_scatter(step: Step, local: Array, mesh: DeviceMesh) -> Array:
    axis = step.axes[0]
    placement = _shard(step.dst, axis)
    if _is_empty(step):
        return mesh.backend.ops.empty(step.dst.local_shape(mesh.get_rank()), local)
    sizes = step.dst.axis_sizes(axis, mesh.my_coordinate)
    return reduce_scatter_dim(mesh, axis, local, placement.dim, sizes, _op(step.src, axis))


def reduce_scatter_dim(
    mesh: DeviceMesh, axis: int, local: Array, dim: int, sizes: Sequence[int], op: str = "sum"
) -> Array:
    """Reduce over a mesh axis and keep the own piece of tensor dim `dim`; `local` stays as is."""
    ops, comm = mesh.backend.ops, mesh.communicator(axis)
    average = op == "avg" and not mesh.backend.capabilities.native_avg
    native = "sum" if average else op
    moved = ops.movedim(local, dim, 0)
    if len(set(sizes)) == 1:
        mine = comm.reduce_scatter(ops.clone(moved), native)
    elif mesh.backend.capabilities.uneven_gather:
        mine = comm.reduce_scatter_v(ops.clone(moved), sizes, native)
    else:
        mine = _reduce_scatter_padded(ops, comm, moved, sizes, native)
    if average:
        mine = ops.scale(mine, comm.size, divide=True)
    return ops.contiguous(ops.movedim(mine, 0, dim))


def _reduce_scatter_padded(
    ops: ArrayOps, comm: Communicator, moved: Array, sizes: Sequence[int], op: str
) -> Array:
    largest = max(sizes)
    padded = ops.identity((largest * len(sizes), *moved.shape[1:]), "sum", moved)
    start = 0
    for i, size in enumerate(sizes):
        piece = ops.narrow(moved, 0, start, size)
        ops.copy_into(ops.narrow(padded, 0, i * largest, size), piece)
        start += size
    mine = comm.reduce_scatter(padded, op)
    return ops.contiguous(ops.narrow(mine, 0, 0, sizes[comm.rank]))


def _all_to_all(step: Step, local: Array, mesh: DeviceMesh) -> Array:
    axis = step.axes[0]
    ops, comm = mesh.backend.ops, mesh.communicator(axis)
    rank = mesh.get_rank()
    gathered, cut = _shard(step.src, axis).dim, _shard(step.dst, axis).dim
    have = step.src.axis_sizes(axis, mesh.my_coordinate)
    want = step.dst.axis_sizes(axis, mesh.my_coordinate)
    shape = step.dst.local_shape(rank)
    if _is_empty(step):
        return ops.empty(shape, local)
    parts: list[Array] = []
    start = 0
    for size in want:
        piece = ops.contiguous(ops.narrow(local, cut, start, size))
        parts.append(ops.reshape(piece, (_numel(piece.shape),)))
        start += size
    shapes = [(*shape[:gathered], size, *shape[gathered + 1 :]) for size in have]
    counts = [_numel(s) for s in shapes]
    received = comm.all_to_all_v(ops.cat(parts, 0), [_numel(p.shape) for p in parts], counts)
    pieces: list[Array] = []
    start = 0
    for piece_shape, count in zip(shapes, counts, strict=True):
        pieces.append(ops.reshape(ops.narrow(received, 0, start, count), piece_shape))
        start += count
    return ops.cat(pieces, gathered)


def _slice(step: Step, local: Array, mesh: DeviceMesh) -> Array:
    """Keep the own piece, as a copy, so that the whole is not kept alive."""
    axis = step.axes[0]
    placement = _shard(step.dst, axis)
    coordinate = mesh.my_coordinate
    sizes = step.dst.axis_sizes(axis, coordinate)
    start = sum(sizes[: coordinate[axis]])
    ops = mesh.backend.ops
    return ops.clone(ops.narrow(local, placement.dim, start, sizes[coordinate[axis]]))


def _fill(step: Step, local: Array, mesh: DeviceMesh) -> Array:
    """Turn R or S into a pending reduction without communication (exact for every dtype)."""
    axis = step.axes[0]
    ops = mesh.backend.ops
    op = _op(step.dst, axis)
    before = step.src.placements[axis]
    first = mesh.my_coordinate[axis] == 0
    if not isinstance(before, Shard):
        keeps = first or op in ("avg", "max", "min")
        return ops.clone(local) if keeps else ops.identity(local.shape, op, local)
    coordinate = mesh.my_coordinate
    sizes = step.src.axis_sizes(axis, coordinate)
    whole = ops.identity(step.dst.local_shape(mesh.get_rank()), op, local)
    own = ops.scale(local, len(sizes)) if op == "avg" else local
    start = sum(sizes[: coordinate[axis]])
    ops.copy_into(ops.narrow(whole, before.dim, start, sizes[coordinate[axis]]), own)
    return whole


def _scale(step: Step, local: Array, mesh: DeviceMesh) -> Array:
    axis = step.axes[0]
    to_sum = _op(step.dst, axis) == "sum"
    return mesh.backend.ops.scale(local, mesh.shape[axis], divide=to_sum)


def scatter_from(
    mesh: DeviceMesh,
    axis: int,
    whole: Array | None,
    like: Array,
    placement: Shard,
    src: int = 0,
) -> Array:
    """Cut `whole`, held by position `src` of the axis; each rank gets its piece.

    Args:
        mesh: the mesh.
        axis: the axis to scatter along.
        whole: the array on position `src`; None elsewhere.
        like: an array with the shape, dtype and device of `whole`.
        placement: which dim is cut, and how.
        src: the position along the axis that holds `whole`.

    Returns:
        This rank's piece, contiguous.
    """
    ops, comm = mesh.backend.ops, mesh.communicator(axis)
    dim, shape = placement.dim, tuple(like.shape)
    sizes = chunk_sizes(shape[dim], comm.size, placement.block)
    rest = [*shape[:dim], *shape[dim + 1 :]]
    out = ops.empty((max(sizes), *rest), like)
    pieces: list[Array] | None = None
    if whole is not None:
        pieces = []
        start = 0
        for size in sizes:
            piece = ops.movedim(ops.narrow(whole, dim, start, size), dim, 0)
            pieces.append(_pad_rows(ops, ops.contiguous(piece), max(sizes)))
            start += size
    mine = comm.scatter(out, pieces, src) if _numel(out.shape) else out
    return ops.clone(ops.movedim(ops.narrow(mine, 0, 0, sizes[comm.rank]), 0, dim))


def _shard(layout: Any, axis: int) -> Shard:
    placement = layout.placements[axis]
    assert isinstance(placement, Shard)
    return placement


def _op(layout: Any, axis: int) -> str:
    placement = layout.placements[axis]
    assert isinstance(placement, Partial)
    return placement.reduce_op


def _numel(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _is_empty(step: Step) -> bool:
    return 0 in step.src.shape


_STEPS: dict[str, Callable[[Step, Array, DeviceMesh], Array]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "fill": _fill,
    "scale": _scale,
}
