# SPDX-License-Identifier: Apache-2.0
"""Parts of local arrays: take one, write one, pack several into a flat buffer and unpack them.

Each function here looks at the positions once and gives a function of arrays. Packing and unpacking
copy every element at most once where the parts are alike or follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hyper_parallel.core.exchange import Region, region_shape
from hyper_parallel.runtime.interface import Array, ArrayOps
from hyper_parallel.runtime.program import Run

__all__ = ["consecutive", "packer", "putter", "taker", "unpacker"]

Runs = Sequence[tuple[int, int]]


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


def taker(ops: ArrayOps, region: Region, shape: Sequence[int]) -> Run:
    """Make a function that gives a part of an array of a shape; a view if the part is one box."""
    cuts: list[tuple[int, Runs]] = []
    for dim, runs in enumerate(region):
        if len(runs) > 1 or (runs or ((0, 0),))[0] != (0, shape[dim]):
            cuts.append((dim, runs))
    if len(cuts) == 1 and len(cuts[0][1]) == 1:
        (dim, ((start, stop),)) = cuts[0]
        narrow, size = ops.narrow, stop - start
        return lambda x: narrow(x, dim, start, size)

    def take(x: Array) -> Array:
        for dim, runs in cuts:
            parts = [ops.narrow(x, dim, start, stop - start) for start, stop in runs or ((0, 0),)]
            x = parts[0] if len(parts) == 1 else ops.cat(parts, dim)
        return x

    return take


def putter(ops: ArrayOps, region: Region, shape: Sequence[int]) -> Callable[[Array, Array], None]:
    """Make a function of an array of a shape and a part that writes the part into the array."""
    own = region_shape(region)
    boxes: list[list[tuple[int, int, int, int]]] = [[]]
    for dim, runs in enumerate(region):
        if runs == ((0, shape[dim]),):
            continue
        cut: list[list[tuple[int, int, int, int]]] = []
        done = 0
        for start, stop in runs:
            cut += [[*box, (dim, start, done, stop - start)] for box in boxes]
            done += stop - start
        boxes = cut

    def put(whole: Array, part: Array) -> None:
        for box in boxes:
            target, piece = whole, part
            for dim, start, done, size in box:
                target = ops.narrow(target, dim, start, size)
                if size != own[dim]:
                    piece = ops.narrow(piece, dim, done, size)
            ops.copy_into(target, piece)

    return put


def packer(ops: ArrayOps, regions: Sequence[Region], shape: Sequence[int]) -> Run:
    """Make a function that gives an array's parts in order in a flat buffer; a view if it can."""
    full, flat = tuple(shape), (math.prod(shape),)
    along = consecutive(regions, full)
    if along is not None and along[0] == 0:
        return lambda x: ops.reshape(ops.contiguous(x), flat)
    if along is not None and len(set(along[1])) == 1:
        dim = along[0]
        pieces = (*full[:dim], len(along[1]), along[1][0], *full[dim + 1 :])
        return lambda x: ops.contiguous(
            ops.reshape(ops.movedim(ops.reshape(x, pieces), dim, 0), flat)
        )
    used = [region for region in regions if math.prod(region_shape(region))]
    takes = [taker(ops, region, full) for region in used]
    shapes = {region_shape(region) for region in used}
    if len(shapes) == 1:
        (own,) = shapes
        size = math.prod(own) * len(used)
        return lambda x: ops.reshape(
            ops.cat([ops.reshape(take(x), (1, *own)) for take in takes], 0), (size,)
        )

    def pack(x: Array) -> Array:
        parts = [ops.contiguous(take(x)) for take in takes]
        flat = [ops.reshape(part, (math.prod(part.shape),)) for part in parts]
        return ops.cat(flat, 0) if flat else ops.empty((0,), x)

    return pack


def unpacker(ops: ArrayOps, regions: Sequence[Region], shape: Sequence[int]) -> Run:
    """Make a function that makes an array of the parts in a flat buffer; a view if it can."""
    full = tuple(shape)
    along = consecutive(regions, full)
    if along is not None and along[0] == 0:
        return lambda buffer: ops.reshape(buffer, full)
    if along is not None and len(set(along[1])) == 1:
        dim, stack = along[0], (len(regions), *region_shape(regions[0]))
        return lambda buffer: ops.contiguous(
            ops.reshape(ops.movedim(ops.reshape(buffer, stack), 0, dim), full)
        )
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

    puts = [putter(ops, region, full) for _, _, _, region in pieces]

    def unpack(buffer: Array) -> Array:
        whole = ops.empty(full, buffer)
        for part, put in zip(parts(buffer), puts, strict=True):
            put(whole, part)
        return whole

    return unpack
