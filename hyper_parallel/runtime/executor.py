# SPDX-License-Identifier: Apache-2.0
"""Run a plan on this rank's local array. With a backend's batched form, the only place that does.

[Note: layouts decide] Whether a collective is skipped or padded is read off the layouts, never off
the local array, so every rank issues the same collectives.

Pieces of one dim move as rows (rows.py); those of several dims, or in several runs, move as flat
parts of one buffer (parts.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hyper_parallel.core.collective import Step
from hyper_parallel.core.exchange import (
    Region,
    Transfers,
    group_ranks,
    parts_of,
    region_shape,
    transfers,
)
from hyper_parallel.core.interval import count
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Partial
from hyper_parallel.core.plan import Plan, plan
from hyper_parallel.runtime.interface import Array, Communicator
from hyper_parallel.runtime.mesh import DeviceMesh
from hyper_parallel.runtime.parts import consecutive, packer, putter, taker, unpacker
from hyper_parallel.runtime.program import Collective, Program, Run, chain, whole
from hyper_parallel.runtime.rows import Axes, gather, reducer, scatter

__all__ = ["execute", "pending_op", "program"]

_MOST_PROGRAMS = 4096


def execute(plan: Plan, local: Array, mesh: DeviceMesh) -> Array:
    """Turn this rank's local array from `plan.src` into `plan.dst`.

    Args:
        plan: what to do.
        local: this rank's array, of `plan.src.local_shape(rank)`; it is not changed.
        mesh: this process's mesh, equal to that of the plan's `dst`. A plan between
            meshes is one of layouts on this process's meshes.

    Returns:
        The array in `plan.dst`, contiguous, of shape (0,) on a rank that leaves; `local` itself
        if the plan is empty or this rank is in no mesh of it.

    Communicates:
        What the plan's communicating steps name, in order, on the steps' axes. An exchange with
        a mesh of other ranks: among the ranks of both, no others.
    """
    if not plan.steps:
        return local
    found = mesh.programs.get(id(plan)) or _program(plan, id(plan), mesh)
    return found.run(local)


def program(src: Layout, dst: Layout) -> Program:
    """Give what `plan(src, dst)` does on this rank, of layouts on this process's meshes.

    Args:
        src: the layout before.
        dst: the layout after.

    Returns:
        The same object each time, found in one look.
    """
    mesh = dst.mesh
    assert isinstance(mesh, DeviceMesh)
    return mesh.programs.get((src, dst)) or _program(plan(src, dst), (src, dst), mesh)


def _program(plan: Plan, key: Any, mesh: DeviceMesh) -> Program:
    """Work a plan out for this rank; see [Note: programs] in program.py."""
    steps = [(step, _mesh_of(step, mesh)) for step in plan.steps]
    parts = tuple(_part(step, on) for step, on in steps if _takes_part(step, on))
    if len(mesh.programs) >= _MOST_PROGRAMS:
        mesh.programs.clear()
    found = mesh.programs[key] = Program(plan, parts, chain(*map(whole, parts)))
    return found


def _mesh_of(step: Step, mesh: DeviceMesh) -> DeviceMesh:
    """Give the mesh a step runs on; a plan between meshes begins on that of its source."""
    own = step.dst.mesh
    return own if isinstance(own, DeviceMesh) else mesh


def _takes_part(step: Step, mesh: DeviceMesh) -> bool:
    """Tell whether a step means this rank: it is in its mesh, or in one of the two."""
    return any(at.mesh.coordinate(mesh.get_rank()) is not None for at in (step.src, step.dst))


def _part(step: Step, mesh: DeviceMesh) -> Run | Collective:
    """Work a step out for this rank; where there are no elements, nothing is sent."""
    if 0 not in step.src.shape:
        return _STEPS[step.kind](step, mesh)
    shape = step.dst.local_shape(mesh.get_rank())
    return lambda local: mesh.backend.ops.empty(shape, local)


def _all_reduce(step: Step, mesh: DeviceMesh) -> Collective:
    start, after = reducer(mesh, _axes(step), "all_reduce", pending_op(step.src, step.axes[0]))
    return Collective(start, mesh.backend.ops.clone, after, copies=True)


def _all_gather(step: Step, mesh: DeviceMesh) -> Collective:
    ops, rank, axes = mesh.backend.ops, mesh.get_rank(), _axes(step)
    shape = step.dst.local_shape(rank)
    regions = parts_of(step.dst, rank, step.src, group_ranks(step, rank))
    along = consecutive(regions, shape)
    if along is not None:
        return gather(mesh, axes, *along)
    rows = gather(mesh, axes, 0, _sizes(regions))
    return Collective(
        rows.start,
        chain(lambda x: ops.reshape(ops.contiguous(x), (math.prod(x.shape),)), rows.before),
        chain(rows.after, unpacker(ops, regions, shape)),
    )


def _reduce_scatter(step: Step, mesh: DeviceMesh) -> Collective:
    ops, rank, axes = mesh.backend.ops, mesh.get_rank(), _axes(step)
    shape = step.dst.local_shape(rank)
    op = pending_op(step.src, step.axes[0])
    regions = parts_of(step.src, rank, step.dst, group_ranks(step, rank))
    before = step.src.local_shape(rank)
    along = consecutive(regions, before)
    if along is not None:
        return scatter(mesh, axes, *along, op)
    rows = scatter(mesh, axes, 0, _sizes(regions), op)
    return Collective(
        rows.start,
        chain(packer(ops, regions, before), rows.before),
        chain(rows.after, lambda flat: ops.reshape(flat, shape)),
    )


def _all_to_all(step: Step, mesh: DeviceMesh) -> Collective:
    ops, rank = mesh.backend.ops, mesh.get_rank()
    before, shape = step.src.local_shape(rank), step.dst.local_shape(rank)
    table, comm = transfers(step, rank), _exchanging(step, mesh)
    send, receive = _sizes(table.send), _sizes(table.receive)
    how = {"even": True} if _has_equal_parts(step, table) else {}
    pack = packer(ops, table.send, before or (1,))
    unpack = unpacker(ops, table.receive, shape or (1,))
    if not step.src.shape:  # see `Transfers` on tensors without dims
        pack = chain(lambda local: ops.reshape(local, before or (1,)), pack)
        unpack = chain(unpack, lambda whole: ops.reshape(whole, shape))
    start = partial(comm.all_to_all_v, send_sizes=send, recv_sizes=receive, **how)
    return Collective(start, pack, unpack)


def _exchanging(step: Step, mesh: DeviceMesh) -> Communicator:
    source = step.src.mesh
    if set(source.ranks) == set(mesh.ranks):
        return mesh.communicator(_axes(step))
    assert isinstance(source, DeviceMesh)
    return mesh.communicator_with(source)


def _has_equal_parts(step: Step, table: Transfers) -> bool:
    """Tell whether all parts that all ranks send have one size; all ranks find the same.

    From one dim to another on one axis, rank i sends rows_i x columns_j to rank j: all rows_i and
    all columns_j are seen in this rank's parts, also where these hold nothing or lie scattered.
    """
    if step.kind != "all_to_all" or len(step.axes) != 1:
        return False
    rows, columns = (at.placements[step.axes[0]].cut_dim for at in (step.src, step.dst))
    if rows is None or columns is None or rows == columns:
        return False
    sizes = {count(part[columns]) for part in table.send}
    return len(sizes) == len({count(part[rows]) for part in table.receive}) == 1


def _slice(step: Step, mesh: DeviceMesh) -> Run:
    """Keep the own piece, as a copy, so that the whole is not kept alive."""
    ops, rank = mesh.backend.ops, mesh.get_rank()
    if step.dst.mesh.coordinate(rank) is None:
        return lambda local: ops.empty((0,), local)
    (region,) = parts_of(step.src, rank, step.dst, [rank])
    return chain(taker(ops, region, step.src.local_shape(rank)), ops.clone)


def _fill(step: Step, mesh: DeviceMesh) -> Run:
    """Turn R or a cut into a pending reduction without communication (exact for every dtype)."""
    (axis,) = step.axes
    ops, rank, op = mesh.backend.ops, mesh.get_rank(), pending_op(step.dst, step.axes[0])
    if step.src.placements[axis].cut_dim is None:
        keeps = mesh.my_coordinate[axis] == 0 or op in ("avg", "max", "min")
        return ops.clone if keeps else lambda local: ops.identity(local.shape, op, local)
    (region,) = parts_of(step.dst, rank, step.src, [rank])
    shape, num_ranks = step.dst.local_shape(rank), mesh.shape[axis]
    put = putter(ops, region, shape)

    def run(local: Array) -> Array:
        whole = ops.identity(shape, op, local)
        put(whole, ops.scale(local, num_ranks) if op == "avg" else local)
        return whole

    return run


def _scale(step: Step, mesh: DeviceMesh) -> Run:
    (axis,) = step.axes
    to_sum, num_ranks = pending_op(step.dst, axis) == "sum", mesh.shape[axis]
    return lambda local: mesh.backend.ops.scale(local, num_ranks, divide=to_sum)


def _axes(step: Step) -> Axes:
    return step.axes[0] if len(step.axes) == 1 else step.axes


def pending_op(layout: Layout, axis: int) -> str:
    """Name the reduction that is pending along an axis."""
    placement = layout.placements[axis]
    assert isinstance(placement, Partial)
    return placement.reduce_op


def _sizes(regions: Sequence[Region]) -> list[int]:
    return [math.prod(region_shape(region)) for region in regions]


_STEPS: dict[str, Callable[[Step, DeviceMesh], Run | Collective]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "exchange": _all_to_all,
    "slice": _slice,
    "fill": _fill,
    "scale": _scale,
}
