# SPDX-License-Identifier: Apache-2.0
"""Collectives of pieces along one dim: even, uneven as the backend can, or padded.

The dim goes to the front before and back after, so that pieces are rows. What is prepared here is
a `Collective`, to be run whole or launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hyper_parallel.core.interval import chunk_sizes
from hyper_parallel.core.placement import Shard
from hyper_parallel.runtime.interface import Array, ArrayOps
from hyper_parallel.runtime.mesh import DeviceMesh
from hyper_parallel.runtime.program import Collective, Run, chain

__all__ = ["Axes", "gather", "reduce", "reducer", "scatter", "scatter_from"]

Axes = int | tuple[int, ...]


def reduce(mesh: DeviceMesh, axis: Axes, x: Array, op: str = "sum") -> Array:
    """All-reduce the contiguous `x`, which the caller gives up, along an axis."""
    start, after = reducer(mesh, axis, "all_reduce", op)
    return start(x) if after is None else after(start(x))


def reducer(
    mesh: DeviceMesh, axis: Axes, name: str, op: str, **how: Any
) -> tuple[Callable[..., Any], Run | None]:
    """Give a reduction of the communicator, and what makes an average of a sum where it must."""
    comm = mesh.communicator(axis)
    if op != "avg" or mesh.backend.capabilities.native_avg:
        return partial(getattr(comm, name), op=op, **how), None
    average = partial(mesh.backend.ops.scale, factor=comm.size, divide=True)
    return partial(getattr(comm, name), op="sum", **how), average


def gather(mesh: DeviceMesh, axis: Axes, dim: int, sizes: Sequence[int]) -> Collective:
    """Prepare an all-gather of pieces of the given sizes along tensor dim `dim`."""
    ops, comm = mesh.backend.ops, mesh.communicator(axis)
    front, back = _to_front(ops, dim), _from_front(ops, dim)
    if len(set(sizes)) == 1:
        return Collective(comm.all_gather, front, back)
    if mesh.backend.capabilities.uneven_gather:
        return Collective(partial(comm.all_gather_v, sizes=sizes), front, back)
    largest = max(sizes)

    def unpad(whole: Array) -> Array:
        parts = [ops.narrow(whole, 0, i * largest, size) for i, size in enumerate(sizes)]
        return ops.cat(parts, 0)

    pad = partial(_pad_rows, ops, rows=largest)
    return Collective(comm.all_gather, chain(front, pad), chain(unpad, back))


def _to_front(ops: ArrayOps, dim: int) -> Run:
    """Give what moves a dim to the front, contiguous."""
    return ops.contiguous if dim == 0 else lambda x: ops.contiguous(ops.movedim(x, dim, 0))


def _from_front(ops: ArrayOps, dim: int) -> Run | None:
    """Give what moves the first dim back to its place, contiguous; None: it is there."""
    return None if dim == 0 else lambda x: ops.contiguous(ops.movedim(x, 0, dim))


def _pad_rows(ops: ArrayOps, x: Array, rows: int) -> Array:
    if x.shape[0] == rows:
        return x
    padded = ops.identity((rows, *x.shape[1:]), "sum", x)
    ops.copy_into(ops.narrow(padded, 0, 0, x.shape[0]), x)
    return padded


def scatter(mesh: DeviceMesh, axis: Axes, dim: int, sizes: Sequence[int], op: str) -> Collective:
    """Prepare a reduction of which each rank keeps its piece of tensor dim `dim`."""
    ops = mesh.backend.ops
    front, back = _to_front(ops, dim), _from_front(ops, dim)
    is_even, pads = len(set(sizes)) == 1, not mesh.backend.capabilities.uneven_gather
    if is_even or pads:
        start, average = reducer(mesh, axis, "reduce_scatter", op)
    else:
        start, average = reducer(mesh, axis, "reduce_scatter_v", op, sizes=sizes)
    if is_even or not pads:
        return Collective(start, front, chain(average, back) if average or back else None)
    largest, own = max(sizes), sizes[mesh.communicator(axis).rank]

    def pad(rows: Array) -> Array:
        padded = ops.identity((largest * len(sizes), *rows.shape[1:]), "sum", rows)
        begin = 0
        for i, size in enumerate(sizes):
            piece = ops.narrow(rows, 0, begin, size)
            ops.copy_into(ops.narrow(padded, 0, i * largest, size), piece)
            begin += size
        return padded

    def unpad(mine: Array) -> Array:
        return ops.contiguous(ops.narrow(mine, 0, 0, own))

    return Collective(start, chain(front, pad), chain(unpad, average, back))


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
    mine = comm.scatter(out, pieces, src) if math.prod(out.shape) else out
    return ops.clone(ops.movedim(ops.narrow(mine, 0, 0, sizes[comm.rank]), 0, dim))
