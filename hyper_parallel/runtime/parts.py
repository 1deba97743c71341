# SPDX-License-Identifier: Apache-2.0
"""Parts of local arrays: take one, write one, pack several into a flat buffer and unpack them.

The functions that make a packer or an unpacker look at the positions once; what they give copies
every element at most once where the parts are alike or follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.exchange import Region, region_shape
from hyper_parallel.runtime.interface import ArrayOps

__all__ = ["consecutive", "packer", "put", "take", "unpacker"]

Array = Any
Run = Callable[[Array], Array]


def consecutive(
    regions: Sequence[Region], shape: Sequence[int]
) -> tuple[int, tuple[int, ...]] | None:
    """Give the dim along which parts follow each other in an array, and their sizes; else None.

    Args:
        regions: the parts, in order; together they are the array.
        shape: the array's shape.

    Returns:
        The dim and the sizes, or None.

    Example:
        >>> consecutive([(((0, 3),),), (((3, 5),),)], (5,))
        (0, (3, 2))
    """
    shapes = [region_shape(region) for region in regions]
    cut = [dim for dim, size in enumerate(shape) if any(own[dim] != size for own in shapes)]
    if len(cut) != 1:
        return None
    dim, start = cut[0], 0
    for region, own in zip(regions, shapes, strict=True):
        if own[dim] and region[dim] != ((start, start + own[dim]),):
            return None
        start += own[dim]
    return (dim, tuple(own[dim] for own in shapes)) if start == shape[dim] else None


def take(ops: ArrayOps, x: Array, region: Region) -> Array:
    """Give a part of an array: a view if it is one box."""
    for dim, runs in enumerate(region):
        if len(runs) > 1:
            x = ops.cat([ops.narrow(x, dim, start, stop - start) for start, stop in runs], dim)
            continue
        start, stop = runs[0] if runs else (0, 0)
        if stop - start != x.shape[dim]:
            x = ops.narrow(x, dim, start, stop - start)
    return x


def put(ops: ArrayOps, x: Array, region: Region, part: Array) -> None:
    """Write a part of an array."""
    boxes = [(x, part)]
    for dim, runs in enumerate(region):
        cut: list[tuple[Array, Array]] = []
        for whole, piece in boxes:
            done = 0
            for start, stop in runs:
                size = stop - start
                views = (ops.narrow(whole, dim, start, size), ops.narrow(piece, dim, done, size))
                cut.append(views)
                done += size
        boxes = cut
    for whole, piece in boxes:
        ops.copy_into(whole, piece)


def packer(ops: ArrayOps, regions: Sequence[Region], shape: Sequence[int]) -> Run:
    """Make a function that gives parts, one after the other, in a flat buffer; a view if it can be.

    Args:
        ops: the backend's array operations.
        regions: the parts, in order.
        shape: the shape of the array that holds them.

    Returns:
        The function.
    """
    full = tuple(shape)
    along = consecutive(regions, full)
    if along is not None and along[0] == 0:
        return lambda x: ops.reshape(ops.contiguous(x), (math.prod(full),))
    used = [region for region in regions if math.prod(region_shape(region))]
    shapes = {region_shape(region) for region in used}
    if len(shapes) == 1:
        (own,) = shapes
        size = math.prod(own) * len(used)
        return lambda x: ops.reshape(
            ops.cat([ops.reshape(take(ops, x, part), (1, *own)) for part in used], 0), (size,)
        )

    def pack(x: Array) -> Array:
        parts = [ops.contiguous(take(ops, x, region)) for region in used]
        flat = [ops.reshape(part, (math.prod(part.shape),)) for part in parts]
        return ops.cat(flat, 0) if flat else ops.empty((0,), x)

    return pack


def unpacker(ops: ArrayOps, regions: Sequence[Region], shape: Sequence[int]) -> Run:
    """Make a function that makes an array of the parts in a flat buffer; a view where it can be.

    Args:
        ops: the backend's array operations.
        regions: where the parts belong, in the order of the buffer.
        shape: the shape of the array.

    Returns:
        The function.
    """
    full = tuple(shape)
    along = consecutive(regions, full)
    if along is not None and along[0] == 0:
        return lambda buffer: ops.reshape(buffer, full)
    pieces: list[tuple[int, int, tuple[int, ...], Region]] = []
    start = 0
    for region in regions:
        own = region_shape(region)
        size = math.prod(own)
        if size:
            pieces.append((start, size, own, region))
        start += size

    def parts(buffer: Array) -> list[Array]:
        return [
            ops.reshape(ops.narrow(buffer, 0, start, size), own) for start, size, own, _ in pieces
        ]

    if along is not None and pieces:
        dim = along[0]
        return lambda buffer: ops.cat(parts(buffer), dim)

    def unpack(buffer: Array) -> Array:
        whole = ops.empty(full, buffer)
        for part, (_, _, _, region) in zip(parts(buffer), pieces, strict=True):
            put(ops, whole, region, part)
        return whole

    return unpack
