# SPDX-License-Identifier: Apache-2.0
"""Run a plan on this rank's local array. With a backend's batched form, the only place that does.

[Note: layouts decide] Whether a collective is skipped or padded is read off the layouts, never off
the local array, so every rank issues the same collectives.

[Note: programs] What a step does on this rank (its group, counts, positions) follows from the plan,
so it is worked out once, at the plan's first run on a mesh; later runs call the result.

Even and uneven pieces of one dim move along dim 0: the dim goes to the front before and back after.
Pieces of several dims, or in several runs, move as flat parts of one buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.collective import Step
from hyper_parallel.core.exchange import (
    group_ranks,
    parts_of,
    region_shape,
    transfers,
)
from hyper_parallel.core.interval import chunk_sizes
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Partial, Shard
from hyper_parallel.core.plan import Plan
from hyper_parallel.runtime.interface import ArrayOps, Communicator
from hyper_parallel.runtime.mesh import DeviceMesh
from hyper_parallel.runtime.parts import consecutive, packer, put, take, unpacker

__all__ = ["execute", "gather_dim", "reduce", "reduce_scatter_dim", "scatter_from"]

Array = Any
Run = Callable[[Array], Array]
Axes = int | tuple[int, ...]

_MOST_PROGRAMS = 4096


def execute(plan: Plan, local: Array, mesh: DeviceMesh) -> Array:
    """Turn this rank's local array from `plan.src` into `plan.dst`.

    Args:
        plan: what to do.
        local: this rank's array, of `plan.src.local_shape(rank)`; it is not changed.
        mesh: this process's mesh, equal to that of the plan's `dst`. A plan between
            meshes is one of layouts on this process's meshes.

    Returns:
        The array in `plan.dst`, contiguous; `local` itself if the plan is empty or this rank is
        outside the mesh.

    Communicates:
        What the plan's communicating steps name, in order, on the steps' axes.
    """
    if not plan.steps:
        return local
    program = mesh.programs.get(id(plan))
    if program is None:
        program = _program(plan, mesh)
    for run in program[1]:
        local = run(local)
    return local


def _program(plan: Plan, mesh: DeviceMesh) -> tuple[Plan, tuple[Run, ...]]:
    """Work a plan out for this rank; the plan is kept with it, so that its id stays its own."""
    runs: tuple[Run, ...] = ()
    if mesh.get_coordinate() is not None:
        runs = tuple(_STEPS[step.kind](step, _mesh_of(step, mesh)) for step in plan.steps)
    if len(mesh.programs) >= _MOST_PROGRAMS:
        mesh.programs.clear()
    mesh.programs[id(plan)] = plan, runs
    return plan, runs


def _mesh_of(step: Step, mesh: DeviceMesh) -> DeviceMesh:
    """Give the mesh a step runs on; a plan between meshes begins on that of its source."""
    own = step.dst.mesh
    return own if isinstance(own, DeviceMesh) else mesh


def _all_reduce(step: Step, mesh: DeviceMesh) -> Run:
    if _is_empty(step):
        return lambda local: local
    axes, op, clone = _axes(step), _op(step.src, step.axes[0]), mesh.backend.ops.clone
    if op != "avg" or mesh.backend.capabilities.native_avg:
        all_reduce = mesh.communicator(axes).all_reduce
        return lambda local: all_reduce(clone(local), op)
    return lambda local: reduce(mesh, axes, clone(local), op)


def reduce(mesh: DeviceMesh, axis: Axes, x: Array, op: str = "sum") -> Array:
    """All-reduce the contiguous `x`, which the caller gives up, along an axis."""
    comm = mesh.communicator(axis)
    if op == "avg" and not mesh.backend.capabilities.native_avg:
        return mesh.backend.ops.scale(comm.all_reduce(x, "sum"), comm.size, divide=True)
    return comm.all_reduce(x, op)


def _all_gather(step: Step, mesh: DeviceMesh) -> Run:
    ops, rank, axes = mesh.backend.ops, mesh.get_rank(), _axes(step)
    shape = step.dst.local_shape(rank)
    if _is_empty(step):
        return lambda local: ops.empty(shape, local)
    regions = parts_of(step.dst, rank, step.src, group_ranks(step, rank))
    along = consecutive(regions, shape)
    if along is not None:
        dim, sizes = along
        return lambda local: gather_dim(mesh, axes, local, dim, sizes)
    counts = [_numel(region_shape(region)) for region in regions]
    unpack = unpacker(ops, regions, shape)

    def run(local: Array) -> Array:
        flat = ops.reshape(ops.contiguous(local), (_numel(local.shape),))
        return unpack(gather_dim(mesh, axes, flat, 0, counts))

    return run


def gather_dim(mesh: DeviceMesh, axis: Axes, local: Array, dim: int, sizes: Sequence[int]) -> Array:
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


def _reduce_scatter(step: Step, mesh: DeviceMesh) -> Run:
    ops, rank, axes = mesh.backend.ops, mesh.get_rank(), _axes(step)
    shape = step.dst.local_shape(rank)
    if _is_empty(step):
        return lambda local: ops.empty(shape, local)
    op = _op(step.src, step.axes[0])
    regions = parts_of(step.src, rank, step.dst, group_ranks(step, rank))
    before = step.src.local_shape(rank)
    along = consecutive(regions, before)
    if along is not None:
        dim, sizes = along
        return lambda local: reduce_scatter_dim(mesh, axes, local, dim, sizes, op)
    counts = [_numel(region_shape(region)) for region in regions]
    pack = packer(ops, regions, before)
    return lambda local: ops.reshape(_scatter_rows(mesh, axes, pack(local), counts, op), shape)


def reduce_scatter_dim(
    mesh: DeviceMesh, axis: Axes, local: Array, dim: int, sizes: Sequence[int], op: str = "sum"
) -> Array:
    """Reduce over a mesh axis and keep the own piece of tensor dim `dim`; `local` stays as is."""
    ops = mesh.backend.ops
    mine = _scatter_rows(mesh, axis, ops.clone(ops.movedim(local, dim, 0)), sizes, op)
    return ops.contiguous(ops.movedim(mine, 0, dim))


def _scatter_rows(
    mesh: DeviceMesh, axis: Axes, given: Array, sizes: Sequence[int], op: str
) -> Array:
    """Reduce the contiguous `given`, which the caller gives up, and keep the own rows."""
    ops, comm = mesh.backend.ops, mesh.communicator(axis)
    average = op == "avg" and not mesh.backend.capabilities.native_avg
    native = "sum" if average else op
    if len(set(sizes)) == 1:
        mine = comm.reduce_scatter(given, native)
    elif mesh.backend.capabilities.uneven_gather:
        mine = comm.reduce_scatter_v(given, sizes, native)
    else:
        mine = _reduce_scatter_padded(ops, comm, given, sizes, native)
    return ops.scale(mine, comm.size, divide=True) if average else mine


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


def _all_to_all(step: Step, mesh: DeviceMesh) -> Run:
    ops, rank, axes = mesh.backend.ops, mesh.get_rank(), _axes(step)
    shape = step.dst.local_shape(rank)
    if _is_empty(step):
        return lambda local: ops.empty(shape, local)
    table = transfers(step, rank)
    send, receive = (
        [_numel(region_shape(region)) for region in regions]
        for regions in (table.send, table.receive)
    )
    all_to_all = mesh.communicator(axes).all_to_all_v
    pack = packer(ops, table.send, step.src.local_shape(rank))
    unpack = unpacker(ops, table.receive, shape)
    return lambda local: unpack(all_to_all(pack(local), send, receive))


def _slice(step: Step, mesh: DeviceMesh) -> Run:
    """Keep the own piece, as a copy, so that the whole is not kept alive."""
    ops, rank = mesh.backend.ops, mesh.get_rank()
    (region,) = parts_of(step.src, rank, step.dst, [rank])
    return lambda local: ops.clone(take(ops, local, region))


def _fill(step: Step, mesh: DeviceMesh) -> Run:
    """Turn R or a cut into a pending reduction without communication (exact for every dtype)."""
    (axis,) = step.axes
    ops, rank, op = mesh.backend.ops, mesh.get_rank(), _op(step.dst, step.axes[0])
    if step.src.placements[axis].cut_dim is None:
        keeps = mesh.my_coordinate[axis] == 0 or op in ("avg", "max", "min")
        return ops.clone if keeps else lambda local: ops.identity(local.shape, op, local)
    (region,) = parts_of(step.dst, rank, step.src, [rank])
    shape, count = step.dst.local_shape(rank), mesh.shape[axis]

    def run(local: Array) -> Array:
        whole = ops.identity(shape, op, local)
        put(ops, whole, region, ops.scale(local, count) if op == "avg" else local)
        return whole

    return run


def _scale(step: Step, mesh: DeviceMesh) -> Run:
    (axis,) = step.axes
    to_sum, count, scale = _op(step.dst, axis) == "sum", mesh.shape[axis], mesh.backend.ops.scale
    return lambda local: scale(local, count, divide=to_sum)


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


def _axes(step: Step) -> Axes:
    return step.axes[0] if len(step.axes) == 1 else step.axes


def _op(layout: Layout, axis: int) -> str:
    placement = layout.placements[axis]
    assert isinstance(placement, Partial)
    return placement.reduce_op


def _numel(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _is_empty(step: Step) -> bool:
    return 0 in step.src.shape


_STEPS: dict[str, Callable[[Step, DeviceMesh], Run]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "exchange": _all_to_all,
    "slice": _slice,
    "fill": _fill,
    "scale": _scale,
}
