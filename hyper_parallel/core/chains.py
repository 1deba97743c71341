# SPDX-License-Identifier: Apache-2.0
"""The chains that may cut one dim on the way of a plan, and how they follow from each other.

They are numbered, so that a search compares and looks up numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hyper_parallel.core.interval import count, intersect
from hyper_parallel.core.nesting import (
    Chain,
    Cut,
    Overlap,
    canonical,
    held_at,
    held_by,
    is_even,
    largest,
    least,
    moved_axes,
    overlap,
    places_of,
    without,
)

__all__ = ["Dim"]

Axes = frozenset[int]
# At the first and at the last rank: how many indices it needs, and how many of these it holds.
Ends = tuple[tuple[int, int], tuple[int, int]]


def _candidates(size: int, ends: Sequence[Chain], free: Sequence[Cut]) -> list[Chain]:
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


class Dim:
    """The chains that may cut one dim, numbered.

    Args:
        size: the dim's size.
        ends: the chains of it at both ends of the plan, in canonical form.
        free: cuts by the axes that may nest as they like on the way.
    """

    def __init__(self, size: int, ends: Sequence[Chain], free: Sequence[Cut]) -> None:
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
        self._without: dict[tuple[int, Axes], int] = {}
        self._moved: dict[tuple[int, int], Axes] = {}
        self._overlaps: dict[tuple[int, int, Axes], Overlap] = {}
        self._corners: dict[tuple[int, int], Ends] = {}
        self._places: dict[tuple[int, int, int], Ends] = {}

    def without(self, i: int, axes: Axes) -> int:
        """Give the number of chain `i` with axes taken out; -1 where there is none."""
        found = self._without.get((i, axes))
        if found is None:
            left = without(self.size, self.chains[i], axes)
            found = -1 if left is None else self.index.get(left, -1)
            self._without[i, axes] = found
        return found

    def at_corners(self, i: int, j: int) -> Ends:
        """Count what the first and last rank need for chain `j`, and of it hold in chain `i`."""
        found = self._corners.get((i, j))
        if found is None:
            found = self._corners[i, j] = self._at_ends(self.chains[i], self.chains[j])
        return found

    def at_places(self, i: int, j: int, axis: int) -> Ends:
        """Count the same of all ranks at the first and at the last place of an axis together.

        Where no chain says what they hold together, nothing is counted as missing.
        """
        found = self._places.get((i, j, axis))
        if found is None:
            left = [
                without(self.size, self.chains[k], self.axes[k] - {axis})
                if axis in self.axes[k]
                else ()
                for k in (i, j)
            ]
            known = None not in left
            found = self._at_ends(left[0] or (), left[1] or ()) if known else ((1, 1), (1, 1))
            self._places[i, j, axis] = found
        return found

    def _at_ends(self, before: Chain, after: Chain) -> Ends:
        ends: list[tuple[int, int]] = []
        for last in (False, True):
            held, wanted = (
                held_by(
                    self.size, chain, tuple([step.num_ranks - 1 if last else 0 for step in chain])
                )
                for chain in (before, after)
            )
            ends.append((count(wanted), count(intersect(held, wanted))))
        return ends[0], ends[1]

    def moved(self, i: int, j: int) -> Axes:
        """Give the axes along which a step from chain `i` to `j` must exchange."""
        found = self._moved.get((i, j))
        if found is None:
            found = self._moved[i, j] = moved_axes(self.size, self.chains[i], self.chains[j])
        return found

    def overlap(self, i: int, j: int, group: Axes) -> Overlap:
        """Say how what ranks hold in chains `i` and `j` overlaps."""
        found = self._overlaps.get((i, j, group))
        if found is None:
            found = overlap(self.size, self.chains[i], self.chains[j], group)
            self._overlaps[i, j, group] = found
        return found


def _written_once(size: int, chain: Chain) -> object:
    """Give a key of what ranks hold: small uneven dims may be cut alike by different chains."""
    num_ranks = math.prod(step.num_ranks for step in chain)
    if size > 4 * num_ranks or num_ranks > 256 or is_even(size, chain):
        return chain
    ordered = tuple(sorted(chain, key=lambda step: step.axis))
    held: list[object] = [step.axis for step in ordered]
    for places in places_of((ordered,)):
        held.append(held_at(size, chain, places))
    return tuple(held)
