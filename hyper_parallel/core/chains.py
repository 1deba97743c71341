# SPDX-License-Identifier: Apache-2.0
"""The chains that may cut one dim on the way of a plan, and how they follow from each other.

They are numbered, so that a search compares and looks up numbers.
"""

from __future__ import annotations

import itertools
import math
from functools import cache, lru_cache
from typing import NamedTuple

from hyper_parallel.core.interval import count, intersect
from hyper_parallel.core.nesting import (
    Chain,
    Cut,
    canonical,
    digits,
    held_at,
    is_even,
    largest,
    least,
    places_of,
    without,
)

__all__ = ["NO_AXES", "Axes", "Dim", "Ends", "dim_of"]

Axes = frozenset[int]
NO_AXES: Axes = frozenset()
# At the first and at the last rank: how many indices it needs, and how many of these it holds.
Ends = tuple[int, int, int, int]


class Overlap(NamedTuple):
    """How what ranks hold of a dim before and after a step overlaps; see `Dim.overlap`.

    Args:
        need: the most that a rank holds after it.
        own: the least of it that a rank holds before it.
        lack: the most that a rank holds only after it.
        hot: what the rank that gives the most away holds before it, and its group after it.
        kept: what of that this rank holds after it itself.
    """

    need: int
    own: int
    lack: int
    hot: int
    kept: int


class Dim:
    """The chains that may cut one dim, numbered. Make one with `dim_of`.

    Args:
        size: the dim's size.
        ends: the chains of it at both ends of the plan, in canonical form.
        free: cuts by the axes that may nest as they like on the way.
    """

    def __init__(self, size: int, ends: tuple[Chain, ...], free: tuple[Cut, ...]) -> None:
        self.size = size
        self.chains: list[Chain] = []
        self.index: dict[Chain, int] = {}
        seen: dict[object, int] = {}
        for chain in _candidates(size, ends, free):
            number = seen.setdefault(_written_once(size, chain), len(self.chains))
            self.index[chain] = number
            if number == len(self.chains):
                self.chains.append(chain)
        self.axes = [frozenset(step.axis for step in chain) for chain in self.chains]
        self.largest = [largest(size, chain) for chain in self.chains]
        self.least = [least(size, chain) for chain in self.chains]
        self.without = cache(self._without)
        self.moved = cache(self._moved)
        self.overlap = cache(self._overlap)
        self.at_ends = cache(self._at_ends)

    def _without(self, i: int, axes: Axes) -> int:
        """Give the number of chain `i` with axes taken out; -1 where there is none."""
        left = without(self.size, self.chains[i], axes)
        return -1 if left is None else self.index.get(left, -1)

    def _moved(self, i: int, j: int) -> Axes:
        """Give the axes of chain `i` along which some rank needs, for `j`, what another holds."""
        a, b = self.chains[i], self.chains[j]
        if is_even(self.size, a) and is_even(self.size, b):
            return frozenset(axis for axis, _ in digits(a).items() - digits(b).items())
        same = 0
        while same < min(len(a), len(b)) and a[same] == b[same]:
            same += 1
        return frozenset(step.axis for step in a[same:])

    def _overlap(self, i: int, j: int, group: Axes) -> Overlap:
        """Estimate what ranks of `group` need and offer when the dim goes from chain `i` to `j`.

        Exact for even cuts; else an estimate from the first and last places of each axis.
        """
        size, a, b = self.size, self.chains[i], self.chains[j]
        together = without(size, b, group)
        if together is None:
            first = next(i for i, step in enumerate(b) if step.axis in group)
            together = b[:first]
        own, lack = size, 0
        hottest = (-1, 0)
        for places in places_of((a, b), only_some=True):
            before, after = held_at(size, a, places), held_at(size, b, places)
            wanted = held_at(size, together, places)
            both = count(intersect(before, after))
            own, lack = min(own, both), max(lack, count(after) - both)
            hot = count(intersect(before, wanted))
            hottest = max(hottest, (hot - both, hot))
        sent, hot = hottest
        return Overlap(self.largest[j], own, lack, hot, hot - sent)

    def _at_ends(self, i: int, j: int, axes: Axes) -> Ends:
        """Count what all ranks at the first, or the last, places of axes need for chain `j`.

        And what of it they hold in chain `i`. Where no chain says what they hold together, nothing
        counts as missing.
        """
        found: list[int] = []
        held, wanted = (without(self.size, self.chains[k], self.axes[k] - axes) for k in (i, j))
        if held is None or wanted is None:
            return 1, 1, 1, 1
        for last in (0, 1):
            places = {step.axis: last * (step.num_ranks - 1) for step in (*held, *wanted)}
            need = held_at(self.size, wanted, places)
            found += [count(need), count(intersect(held_at(self.size, held, places), need))]
        return found[0], found[1], found[2], found[3]


@lru_cache(maxsize=512)
def dim_of(size: int, ends: tuple[Chain, ...], free: tuple[Cut, ...]) -> Dim:
    """Give the `Dim` of these facts, with what it has found so far."""
    return Dim(size, ends, free)


def _candidates(size: int, ends: tuple[Chain, ...], free: tuple[Cut, ...]) -> list[Chain]:
    """List the ends, what is left of them without some axes, and nestings of the free cuts."""
    found: list[Chain] = []
    for chain in ends:
        axes = sorted(step.axis for step in chain)
        for n in range(len(axes) + 1):
            for out in itertools.combinations(axes, n):
                left = without(size, chain, frozenset(out))
                found += [] if left is None else [left]
    for n in range(len(free) + 1):
        found += itertools.permutations(free, n)
    for pair in itertools.permutations(free, 2):
        found.append(without(size, pair, frozenset((pair[0].axis,))) or ())
    return list(dict.fromkeys(canonical(size, chain) for chain in dict.fromkeys(found)))


def _written_once(size: int, chain: Chain) -> object:
    """Give a key of what ranks hold: small uneven dims may be cut alike by different chains."""
    num_ranks = math.prod(step.num_ranks for step in chain)
    if size > 4 * num_ranks or num_ranks > 256 or is_even(size, chain):
        return chain
    ordered = tuple(sorted(chain, key=lambda step: step.axis))
    held: list[object] = [step.axis for step in ordered]
    held += [held_at(size, chain, places) for places in places_of((ordered,))]
    return tuple(held)
