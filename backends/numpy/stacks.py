# SPDX-License-Identifier: Apache-2.0
"""The arrays of all ranks as one: stacks, how they are read and given back, and what lies where.

[Note: stacks] A stack has the mesh axes in front, then the tensor dims, each as long as the largest
shard. A mesh axis of length 1 there says that all its ranks hold the same, so a replica costs
nothing.

[Note: one formula] Which rank holds an index of a dim, and where, follows from that dim alone. So
an element of the stack before a step lies at a sum of offsets, one for each dim and one for each
axis along which a rank only sees itself; and every step that moves elements is one indexing, shards
uneven or not. Ranks reach others along the step's axes only. Of replicas on another mesh, the first
is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy as np

from hyper_parallel.backends.numpy.ops import Array
from hyper_parallel.core.interval import count
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import nest_ranks
from hyper_parallel.core.nesting import Chain, held_by, least
from hyper_parallel.errors import LayoutError

__all__ = [
    "LocalArrays",
    "elements",
    "from_stack",
    "offsets_in",
    "same_places",
    "spread",
    "to_stack",
]

# The array of the rank at coordinate (i, j) is local_arrays[i][j], in either form.
LocalArrays: TypeAlias = "Array | Sequence[Any]"


def same_places(a: Layout, b: Layout) -> bool:
    """Tell whether two layouts have their ranks at the same coordinates."""
    return a.mesh.shape == b.mesh.shape and a.mesh.ranks == b.mesh.ranks


def elements(stack: Array, src: Layout, dst: Layout, axes: Collection[int]) -> Array:
    """Give every rank the elements it holds of `dst`; see [Note: one formula]."""
    num_axes = src.mesh.ndim
    cut = [d for d in range(src.ndim) if src.simple_chains[d] or dst.simple_chains[d]]
    lead = num_axes + max(cut, default=-1) + 1  # the dims behind move as rows
    rows = stack.reshape((math.prod(stack.shape[:lead]), *stack.shape[lead:]))
    strides = [math.prod(stack.shape[i + 1 : lead]) for i in range(lead)]
    for axis in range(num_axes):
        strides[axis] *= stack.shape[axis] > 1
    return np.take(rows, offsets_in(src, dst, strides, num_axes, axes), axis=0)


def offsets_in(
    src: Layout, dst: Layout, strides: Sequence[int], num_axes: int, axes: Collection[int]
) -> Array:
    """Add up, for the elements that ranks hold of `dst`, where these lie in a stack of `src`.

    Args:
        src: the layout of the stack.
        dst: the layout wanted.
        strides: of the stack, one for each mesh axis and for each of the first tensor dims.
        num_axes: number of mesh axes of the stack.
        axes: the mesh axes along which ranks reach others; between meshes, all of them.

    Returns:
        The offsets; 1 long along axes whose ranks read the same.
    """
    ndim = dst.mesh.ndim + len(strides) - num_axes
    total = np.zeros((1,) * ndim, np.intp)
    cutting = {cut.axis for chain in src.simple_chains for cut in chain}
    if not same_places(src, dst):
        axes = range(num_axes)
    else:
        for axis in range(num_axes):
            if strides[axis] and not (axis in axes and axis in cutting):
                places = np.arange(src.mesh.shape[axis]) * strides[axis]
                total = total + spread(places, [axis], ndim)
    reached = [n if axis in axes else 0 for axis, n in enumerate(strides[:num_axes])]
    for dim, stride in enumerate(strides[num_axes:]):
        chain, wanted = src.simple_chains[dim], dst.simple_chains[dim]
        if not stride and not any(reached[cut.axis] for cut in chain):
            continue
        held = _held(dst.shape[dim], wanted)[0]
        found = _origins(src.shape[dim], chain, reached, stride)[held]
        along = [*(cut.axis for cut in wanted), dst.mesh.ndim + dim]
        total = total + spread(found, along, ndim)
    return total


def spread(values: Array, along: Sequence[int], ndim: int) -> Array:
    """Put the dims of an array at the given ones of `ndim`; the others are 1 long."""
    shape = [1] * ndim
    for size, dim in zip(values.shape, along, strict=True):
        shape[dim] = size
    return values.transpose(np.argsort(along)).reshape(shape)


def _held(size: int, chain: Chain) -> tuple[Array, Array]:
    """Tabulate the indices that are held at each place along a chain, and how many; 0 fills up."""
    sizes = [cut.num_ranks for cut in chain]
    held = [held_by(size, chain, places) for places in itertools.product(*map(range, sizes))]
    counts = np.array([count(own) for own in held])
    table = np.zeros((len(held), counts.max()), np.intp)
    for row, own in zip(table, held, strict=True):
        done = 0
        for start, stop in own:
            row[done : done + stop - start] = np.arange(start, stop)
            done += stop - start
    return table.reshape(*sizes, -1), counts.reshape(sizes)


def _origins(size: int, chain: Chain, strides: Sequence[int], stride: int) -> Array:
    """Give, for each index of a dim, the offset of its holder and of its position there."""
    table, counts = _held(size, chain)
    positions = np.arange(table.shape[-1])
    offsets = positions * stride
    for i, cut in enumerate(chain):
        offsets = offsets + spread(np.arange(cut.num_ranks), [i], table.ndim) * strides[cut.axis]
    is_held = positions < counts[..., None]
    found = np.empty(size, np.intp)
    found[table[is_held]] = np.broadcast_to(offsets, table.shape)[is_held]
    return found


def _even_shape(layout: Layout) -> tuple[int, ...] | None:
    """Give the one local shape that all ranks have, or None."""
    smallest = tuple(map(least, layout.shape, layout.simple_chains))
    return smallest if smallest == layout.largest_shape else None


def from_stack(stack: Array, layout: Layout) -> LocalArrays:
    """Give what the ranks hold: one array if all shards are alike, else nested lists."""
    mesh = layout.mesh
    every = np.broadcast_to(stack, (*mesh.shape, *stack.shape[mesh.ndim :]))
    if _even_shape(layout) is not None:
        return stack if stack.shape == every.shape else every
    local_arrays = [
        every[(*coordinate, *map(slice, layout.local_shape(rank)))].copy()
        for rank, coordinate in zip(mesh.ranks, np.ndindex(mesh.shape), strict=True)
    ]
    return nest_ranks(local_arrays, mesh.shape)  # type: ignore[arg-type]


def to_stack(local_arrays: LocalArrays, layout: Layout, where: str) -> Array:
    """Read the arrays of all ranks, and check that they fit; see [Note: stacks]."""
    mesh = layout.mesh
    if isinstance(local_arrays, np.ndarray):
        even = _even_shape(layout)
        expected = None if even is None else (*mesh.shape, *even)
        if local_arrays.shape != expected:
            raise LayoutError(
                where,
                f"the stack of all ranks' arrays must have shape {expected} for {layout!r}"
                if expected
                else f"uneven shards must be lists, nested as the mesh {mesh.shape}",
                "Pass what distribute gives, or lists of arrays, one per rank of each axis",
                shape=local_arrays.shape,
            )
        strides = local_arrays.strides[: mesh.ndim]
        own = tuple(slice(None) if stride else slice(1) for stride in strides)
        return np.ascontiguousarray(local_arrays[own])
    flat = _flat(local_arrays, mesh.shape, where)
    stack = np.zeros((*mesh.shape, *layout.largest_shape), flat[0].dtype)
    for rank, coordinate, own in zip(mesh.ranks, np.ndindex(mesh.shape), flat, strict=True):
        expected = layout.local_shape(rank)
        if own.shape != expected or own.dtype != stack.dtype:
            raise LayoutError(
                where,
                f"the array of rank {rank} must have shape {expected} and dtype"
                f" {stack.dtype} for {layout!r}",
                "Pass the ranks' arrays in the order of their coordinates",
                shape=own.shape,
                dtype=own.dtype,
            )
        stack[(*coordinate, *map(slice, expected))] = own
    return stack


def _flat(nested: Any, shape: Sequence[int], where: str) -> list[Array]:
    if not shape:
        return [np.asarray(nested)]
    if not isinstance(nested, (list, tuple, np.ndarray)) or len(nested) != shape[0]:
        raise LayoutError(
            where,
            f"local_arrays must have {shape[0]} entries at each place of this mesh axis",
            "Nest lists of arrays as the mesh is, one entry per rank of each axis",
            entries=len(nested) if isinstance(nested, (list, tuple)) else type(nested).__name__,
        )
    return [own for part in nested for own in _flat(part, shape[1:], where)]
