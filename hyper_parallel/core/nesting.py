# SPDX-License-Identifier: Apache-2.0
"""Nesting: how several mesh axes cut one tensor dim, as a chain of cuts, outermost first.

[Note: strides] Where every cut is even, a dim's indices are numbers of mixed radix. A cut fixes one
digit; a digit nobody fixes is a hole. `Shard` fixes the outermost free digit, `StridedShard` one
after holes whose sizes multiply to its split factor. So taking a cut out of a chain leaves a hole:
the cuts inside it become strided. Uneven cuts have no digits: there only the last cut can be taken
out, or the one before it if both are plain (then the last one becomes strided, by definition).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from hyper_parallel.core.interval import Intervals, chunk_sizes, count, cut, whole
from hyper_parallel.core.placement import Placement, Shard, StridedShard

__all__ = [
    "Chain",
    "Cut",
    "canonical",
    "digits",
    "held_at",
    "held_by",
    "is_even",
    "largest",
    "least",
    "places_of",
    "sizes_left",
    "without",
]


class Cut(NamedTuple):
    """One axis of a chain: which, of how many ranks, and how it cuts what is left to it."""

    axis: int
    num_ranks: int
    placement: Placement

    @property
    def stride(self) -> int | None:
        """The number of holes outside it (see [Note: strides]); None for blocks and packed."""
        if isinstance(self.placement, StridedShard):
            return self.placement.split_factor
        return 1 if isinstance(self.placement, Shard) and self.placement.block == 1 else None


Chain = tuple[Cut, ...]


@lru_cache(maxsize=65536)
def held_by(size: int, chain: Chain, places: tuple[int, ...]) -> Intervals:
    """Give the indices left to the rank at `places`, one place per cut of the chain."""
    if not chain:
        return whole(size)
    held = held_by(size, chain[:-1], places[:-1])
    last = chain[-1]
    return cut(held, last.placement.parts(count(held)), last.num_ranks, places[-1])


def held_at(size: int, chain: Chain, coordinate: Mapping[int, int] | Sequence[int]) -> Intervals:
    """Give the indices left to the rank at a coordinate, or at a place for each axis."""
    return held_by(size, chain, tuple([coordinate[step.axis] for step in chain]))


def sizes_left(sizes: frozenset[int], step: Cut) -> frozenset[int]:
    """Give every number of indices that some rank has after a cut of any of `sizes`."""
    return frozenset(left for size in sizes for left in _left(size, step))


def _left(size: int, step: Cut) -> set[int]:
    chunks = [chunk_sizes(n, step.num_ranks, block) for n, block in step.placement.parts(size)]
    return {sum(own) for own in zip(*chunks, strict=True)} or {0}


def largest(size: int, chain: Chain) -> int:
    """Give the largest number of indices that any rank holds."""
    return max(_sizes(size, chain))


def least(size: int, chain: Chain) -> int:
    """Give the least number of indices that any rank holds."""
    return min(_sizes(size, chain))


@lru_cache(maxsize=16384)
def _sizes(size: int, chain: Chain) -> frozenset[int]:
    sizes = frozenset((size,))
    for step in chain:
        sizes = sizes_left(sizes, step)
    return sizes


@lru_cache(maxsize=16384)
def canonical(size: int, chain: Chain) -> Chain:
    """Give the simplest chain under which every rank holds the same indices.

    Cuts of one rank go, and all cuts of an empty dim; blocks, packed parts and strides that make
    no difference become plain; even strides become digits in their order, see [Note: strides].
    """
    sizes = frozenset((size,))
    simple: list[Cut] = []
    for step in chain:
        if step.num_ranks > 1 and size:
            simple.append(_simplest(sizes, step))
            sizes = sizes_left(sizes, step)
    return _in_order_of_digits(size, tuple(simple)) or tuple(simple)


def _simplest(sizes: frozenset[int], step: Cut) -> Cut:
    """Write a cut as a plain or a strided one if that keeps the same of each of `sizes`."""
    dim = step.placement.cut_dim
    assert dim is not None
    num_parts = {len(step.placement.parts(size)) for size in sizes}
    others = [Shard(dim), *(StridedShard(dim, n) for n in sorted(num_parts) if n > 1)]
    for other in others:
        if other == step.placement:
            break
        plain = step._replace(placement=other)
        places = range(step.num_ranks)
        if all(_piece(s, step, i) == _piece(s, plain, i) for s in sizes for i in places):
            return plain
    return step


def _piece(size: int, step: Cut, index: int) -> Intervals:
    return cut(whole(size), step.placement.parts(size), step.num_ranks, index)


def _in_order_of_digits(size: int, chain: Chain) -> Chain:
    """Sort even plain and strided cuts by digit; empty if some cut is uneven or of another kind."""
    digits: list[tuple[Cut | None, int]] = []
    left = size
    for step in chain:
        if step.stride is None or left == 0 or left % (step.stride * step.num_ranks):
            return ()
        if not _insert(digits, step, step.stride):
            return ()
        left //= step.num_ranks
    result: list[Cut] = []
    holes = 1
    for found, n in digits:
        if found is None:
            holes *= n
        else:
            result.append(_strided(found, holes))
    return tuple(result)


def _insert(digits: list[tuple[Cut | None, int]], step: Cut, stride: int) -> bool:
    """Fix a digit after holes of `stride`, as far inside as can be; False if there is none."""
    passed, i = 1, 0
    while i < len(digits):
        found, n = digits[i]
        if found is None:
            outside = stride // passed if stride % passed == 0 else 0
            if outside == 0:
                return False
            if outside % n:  # the cut splits this hole
                inside, rest = divmod(n, outside * step.num_ranks)
                if rest:
                    return False
                split = [(None, outside), (step, step.num_ranks), (None, inside)]
                digits[i : i + 1] = [(d, m) for d, m in split if d is not None or m > 1]
                return True
            passed *= n
        i += 1
    if stride % passed:
        return False
    if stride > passed:
        digits.append((None, stride // passed))
    digits.append((step, step.num_ranks))
    return True


def _strided(step: Cut, stride: int) -> Cut:
    dim = step.placement.cut_dim
    assert dim is not None
    return step._replace(placement=StridedShard(dim, stride) if stride > 1 else Shard(dim))


@lru_cache(maxsize=65536)
def without(size: int, chain: Chain, axes: frozenset[int]) -> Chain | None:
    """Give the chain of what the ranks along `axes` hold together; None where no chain says it.

    Args:
        size: the dim's size.
        chain: a canonical chain.
        axes: the axes to take out; those that do not cut are ignored.

    Returns:
        The chain, or None.
    """
    kept = list(chain)
    while kept and kept[-1].axis in axes:
        kept.pop()
    out = [i for i, step in enumerate(kept) if step.axis in axes]
    if not out:
        return tuple(kept)
    if not is_even(size, chain):
        plain = kept[-1].stride == kept[out[0]].stride == 1
        if len(out) > 1 or out[0] != len(kept) - 2 or not plain:
            return None
        return (*kept[:-2], _strided(kept[-1], kept[-2].num_ranks))
    result: list[Cut] = []
    holes = 1
    for step in kept:
        if step.axis in axes:
            holes *= step.num_ranks
        else:
            result.append(_strided(step, (step.stride or 1) * holes))
    return tuple(result)


def is_even(size: int, chain: Chain) -> bool:
    """Tell whether a canonical chain cuts digits, see [Note: strides]."""
    strides = [step.stride for step in chain] or [1]
    if None in strides or size == 0 or strides != sorted(strides, key=lambda n: n or 0):
        return False
    return size % (math.prod(step.num_ranks for step in chain) * (strides[-1] or 1)) == 0


def digits(chain: Chain) -> dict[int, int]:
    """Give for each axis the product of all digits outside its own."""
    outside = 1
    found: dict[int, int] = {}
    for step in chain:
        found[step.axis] = outside * (step.stride or 1)
        outside *= step.num_ranks
    return found


def places_of(chains: tuple[Chain, ...], *, only_some: bool = False) -> Iterator[dict[int, int]]:
    """Yield every combination of places along the axes of chains, or of the outer places only."""
    sizes = {step.axis: step.num_ranks for chain in chains for step in chain}
    every = [range(n) if not only_some or n < 4 else (0, 1, n - 1) for n in sizes.values()]
    for places in itertools.product(*every):
        yield dict(zip(sizes, places, strict=True))
