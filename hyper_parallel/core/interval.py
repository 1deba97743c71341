# SPDX-License-Identifier: Apache-2.0
"""Index sets of one tensor dim as sorted, disjoint, non-touching half-open intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

__all__ = [
    "Intervals",
    "chunk_bounds",
    "chunk_sizes",
    "count",
    "cut",
    "intersect",
    "join",
    "positions",
    "whole",
]

Intervals = tuple[tuple[int, int], ...]


def chunk_bounds(size: int, num_chunks: int, index: int, block: int = 1) -> tuple[int, int]:
    """Give the half-open range that chunk `index` of `num_chunks` covers (torch.chunk's sizes).

    Example:
        >>> [chunk_bounds(5, 4, i) for i in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    chunk = -(-(size // block) // num_chunks) * block
    return min(index * chunk, size), min((index + 1) * chunk, size)


def chunk_sizes(size: int, num_chunks: int, block: int = 1) -> tuple[int, ...]:
    """Give the sizes of all chunks, in order.

    Example:
        >>> chunk_sizes(9, 4)
        (3, 3, 3, 0)
    """
    bounds = (chunk_bounds(size, num_chunks, i, block) for i in range(num_chunks))
    return tuple(stop - start for start, stop in bounds)


def whole(size: int) -> Intervals:
    """Give all indices of a dim; no interval where it has none."""
    return ((0, size),) if size else ()


def count(held: Intervals) -> int:
    """Give the number of indices."""
    return sum(stop - start for start, stop in held)


def cut(
    held: Intervals, parts: Sequence[tuple[int, int]], num_chunks: int, index: int
) -> Intervals:
    """Cut what is held into parts, each part into chunks, and keep chunk `index` of each.

    Args:
        held: the indices that are cut.
        parts: (size, block) of each part, in order; the sizes add up to those held.
        num_chunks: number of chunks of each part.
        index: which chunk to keep.

    Returns:
        The kept indices.

    Example:
        >>> cut(((0, 8),), ((4, 1), (4, 1)), 2, 1)
        ((2, 4), (6, 8))
    """
    ranges: list[tuple[int, int]] = []
    offset = 0
    for size, block in parts:
        start, stop = chunk_bounds(size, num_chunks, index, block)
        if start < stop:
            ranges.append((offset + start, offset + stop))
        offset += size
    if len(held) == 1:  # a plain nesting; the common case
        base = held[0][0]
        return join((base + start, base + stop) for start, stop in ranges)
    return join(_at(held, ranges))


def _at(held: Intervals, ranges: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Give the indices that `held` has at ranges of positions; sorted, perhaps touching."""
    done = 0
    pending = list(reversed(ranges))
    for start, stop in held:
        size = stop - start
        while pending and pending[-1][0] < done + size:
            low, high = pending[-1]
            yield start + max(low - done, 0), start + min(high - done, size)
            if high > done + size:
                break
            pending.pop()
        done += size


def join(ranges: Iterable[tuple[int, int]]) -> Intervals:
    """Merge sorted, disjoint ranges that touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


@lru_cache(maxsize=65536)
def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Give the indices that are in both.

    Example:
        >>> intersect(((0, 4), (6, 9)), ((3, 7),))
        ((3, 4), (6, 7))
    """
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def positions(part: Intervals, held: Intervals) -> Intervals:
    """Give the positions inside `held` of the indices `part`, all of which it has.

    Example:
        >>> positions(((3, 4), (6, 7)), ((2, 4), (6, 9)))
        ((1, 3),)
    """
    found: list[tuple[int, int]] = []
    offset = i = 0
    for start, stop in held:
        while i < len(part) and part[i][0] < stop:
            found.append((offset + part[i][0] - start, offset + part[i][1] - start))
            i += 1
        offset += stop - start
    return join(found)
