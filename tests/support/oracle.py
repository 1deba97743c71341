# SPDX-License-Identifier: Apache-2.0
"""What placements mean, by brute force: the indices each rank holds, and the value all ranks hold.

Written from the definition and not from the library: placements are read, layouts are not asked.
`grid` is the mesh as an integer array of global ranks; `held` maps a global rank to its array.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from hyper_parallel.core import Packed, Partial, Placement, Shard, StridedShard

Array = np.ndarray[Any, Any]
Placements = Sequence[Placement]


def chunk(held: list[int], num_chunks: int, index: int, block: int = 1) -> list[int]:
    """Cut a list as torch.chunk does: chunks of ceil(blocks / n) blocks, the last ones shorter."""
    assert len(held) % block == 0
    blocks = [held[i : i + block] for i in range(0, len(held), block)]
    per_chunk = (len(blocks) + num_chunks - 1) // num_chunks
    return [i for part in blocks[index * per_chunk : (index + 1) * per_chunk] for i in part]


def indices(
    grid: Array, placements: Placements, shape: Sequence[int], rank: int
) -> list[list[int]]:
    """List, per tensor dim, the indices that `rank` holds; axes cut from left to right."""
    coordinate = np.unravel_index(grid.ravel().tolist().index(rank), grid.shape)
    return _indices(grid.shape, tuple(map(int, coordinate)), tuple(placements), tuple(shape))


@cache
def _indices(
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
) -> list[list[int]]:
    held = [list(range(size)) for size in shape]
    for size, c, placement in zip(sizes, coordinate, placements, strict=True):
        if isinstance(placement, (Shard, StridedShard, Packed)):
            held[placement.dim] = keep(held[placement.dim], placement, size, c)
    return held


def keep(held: list[int], placement: Placement, num_chunks: int, index: int) -> list[int]:
    """List what rank `index` of an axis keeps of the indices that the axis cuts."""
    if isinstance(placement, StridedShard):
        parts = [chunk(held, placement.split_factor, i) for i in range(placement.split_factor)]
        return [i for part in parts for i in chunk(part, num_chunks, index)]
    if isinstance(placement, Packed):
        assert sum(placement.sizes) == len(held)
        blocks = placement.blocks or (1,) * len(placement.sizes)
        ends = np.cumsum(placement.sizes).tolist()
        parts = [held[end - n : end] for n, end in zip(placement.sizes, ends, strict=True)]
        pairs = zip(parts, blocks, strict=True)
        return [i for part, block in pairs for i in chunk(part, num_chunks, index, block)]
    assert isinstance(placement, Shard)
    return chunk(held, num_chunks, index, placement.block)


def local_shape(
    grid: Array, placements: Placements, shape: Sequence[int], rank: int
) -> tuple[int, ...]:
    """Give the shape of what `rank` holds."""
    return tuple(len(held) for held in indices(grid, placements, shape, rank))


def take(whole: Array, own: Sequence[Sequence[int]]) -> Array:
    """Copy the entries at the product of index lists."""
    return np.array(whole[np.ix_(*own)])


def pieces(grid: Array, placements: Placements, whole: Array) -> dict[int, Array]:
    """Cut `whole` for every rank; a Partial axis gets whole copies."""
    return {
        rank: take(whole, indices(grid, placements, whole.shape, rank))
        for rank in grid.ravel().tolist()
    }


def combine(arrays: Sequence[Array], op: str) -> Array:
    """Reduce contributions in group order."""
    stacked = np.stack(arrays)
    if op == "avg":
        return np.asarray(stacked.sum(0) / len(arrays))
    reduce = {"sum": np.sum, "max": np.max, "min": np.min, "product": np.prod}[op]
    return np.asarray(reduce(stacked, axis=0))


def reconstruct(
    grid: Array, placements: Placements, shape: Sequence[int], held: Mapping[int, Array]
) -> Array:
    """Give the one value that all ranks hold together; replicas that differ are an error."""
    by_coordinate = {c: held[int(rank)] for c, rank in np.ndenumerate(grid)}
    where = {c: indices(grid, placements, shape, int(rank)) for c, rank in np.ndenumerate(grid)}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            by_coordinate = _reduce_axis(by_coordinate, axis, placement.reduce_op)
    dtype = next(iter(by_coordinate.values())).dtype
    whole = np.zeros(tuple(shape), dtype)
    written = np.zeros(tuple(shape), bool)
    for coordinate, array in by_coordinate.items():
        place = np.ix_(*where[coordinate])
        assert array.shape == whole[place].shape, (coordinate, array.shape)
        seen = written[place]
        assert np.array_equal(whole[place][seen], array[seen]), f"replicas differ at {coordinate}"
        whole[place] = array
        written[place] = True
    assert written.all(), "nobody holds some element"
    return whole


def _reduce_axis(held: dict[tuple[int, ...], Array], axis: int, op: str) -> dict[Any, Array]:
    size = 1 + max(coordinate[axis] for coordinate in held)
    return {
        c: combine([held[(*c[:axis], i, *c[axis + 1 :])] for i in range(size)], op) for c in held
    }


def image(
    src: Placement, dst: Partial, value: Array, own: Sequence[Sequence[int]], index: int, size: int
) -> Array:
    """Give the one array that index `index` of a `size`-rank axis holds after R or S -> `dst`.

    Args:
        src: Replicate or a cut before.
        dst: the pending reduction after.
        value: the logical value.
        own: the indices that this rank held before.
        index: this rank's index on the axis.
        size: the number of ranks of the axis, at least 2.
    """
    neutral = {"sum": 0, "avg": 0, "product": 1, "max": -np.inf, "min": np.inf}[dst.reduce_op]
    if not isinstance(src, (Shard, StridedShard, Packed)):
        keeps = index == 0 or dst.reduce_op in ("avg", "max", "min")
        return value.copy() if keeps else np.full_like(value, neutral)
    result = np.full_like(value, neutral)
    place = np.ix_(*own)
    result[place] = value[place] * (size if dst.reduce_op == "avg" else 1)
    return result


def contributions(
    grid: Array, placements: Placements, shape: Sequence[int], rng: np.random.Generator
) -> dict[int, Array]:
    """Make every rank's array of a legal state: equal replicas, different contributions.

    Whole floats, chosen so that any order of sums, products and divisions by axis sizes is exact.
    """
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    partial = [isinstance(p, Partial) for p in placements]
    held: dict[int, Array] = {}
    for picks in itertools.product(
        *(range(n) if p else (0,) for n, p in zip(grid.shape, partial, strict=True))
    ):
        if "product" in ops:
            whole = np.asarray(rng.choice([-1.0, 1.0, 2.0], tuple(shape)))
        else:
            whole = np.asarray(rng.integers(-9, 10, tuple(shape)) * float(grid.size**2))
        selected = grid[
            tuple(
                slice(c, c + 1) if p else slice(None) for c, p in zip(picks, partial, strict=True)
            )
        ]
        for rank in selected.ravel().tolist():
            held[rank] = take(whole, indices(grid, placements, shape, rank))
    return held
