# SPDX-License-Identifier: Apache-2.0
"""The steps between the states that a plan may pass through, and what they cost.

[Note: images] A rank's part of a pending reduction is fixed by how it began: R -> P and
P(a) -> P(b) fill from the replicated value, only an axis that `src` cuts fills from its share, and
an axis that stays pending is left alone.

[Note: bound] Until the end some rank has to receive what it needs and does not hold, of a reduction
at least one more value of each element, at the fastest link's rate. What the ranks at one place of
an axis need and none of them holds has to come over that axis: so it takes part in a step, and each
of these ranks receives at least its share of it at that axis's rate. Reductions are steps of their
own. A share that is filled in place stays where it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from hyper_parallel.core.chains import NO_AXES, Axes, Dim, Ends
from hyper_parallel.core.collective import COMMUNICATING, StepKind
from hyper_parallel.core.cost import elements_moved
from hyper_parallel.core.states import Ids, Problem, Role, States

__all__ = ["Move", "Space"]


class Move(NamedTuple):
    """One step to a state: its kind and axes, and its cost in picoseconds and bytes."""

    target: int
    kind: StepKind
    axes: Axes
    cost: int = 0
    size: int = 0


class Space(States):
    """The states of a problem and the moves between them."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        groups = [
            frozenset(axes)
            for n in range(len(self._axes) + 1)
            for axes in itertools.combinations(sorted(self._axes), n)
        ]
        self._count = {axes: math.prod(problem.mesh_shape[a] for a in axes) for axes in groups}
        # Picoseconds of a collective without data, and per element.
        self._terms: dict[Axes, tuple[int, float]] = {}
        for axes in groups:
            fixed, per_byte = problem.model.terms(problem.mesh_shape, sorted(axes))
            self._terms[axes] = round(fixed * 1e12), per_byte * 1e12 * problem.itemsize
        single = [self._terms[axes] for axes in groups if len(axes) == 1]
        self._least = min(fixed for fixed, _ in single)
        self._per_element = min(per_element for _, per_element in single)
        self.bounds = [self._bound(number) for number in range(len(self))]

    def _bound(self, number: int) -> int:
        """Give picoseconds that any way from a state to the end takes at least; [Note: bound]."""
        role, end = self._roles[number], self._roles[self.end]
        reduced = role.waits - end.waits
        need, own, last_need, last_own = self._at_ends(number, self._axes)
        # Ranks that fill a pending reduction in place share what it is filled from; [Note: images].
        filled = self._count[(end.waits - role.waits) & self._roles[0].cut]
        if filled > 1:
            need, last_need = need // filled, last_need // filled
            own = last_own = self._held(number)[1]
        received = max(need, last_need) if reduced else max(need - own, last_need - last_own, 0)
        slower, moved = 0.0, NO_AXES
        for axis in (role.cut | reduced) - end.waits:
            line = frozenset((axis,))
            need, own, last_need, last_own = self._at_ends(number, line)
            crossing = max(need, last_need)
            if axis not in reduced:
                crossing = max(need - own, last_need - last_own)
            if crossing:
                moved |= line
                extra = self._terms[line][1] - self._per_element
                slower = max(slower, extra * (crossing / self._count[self._axes - line]))
        if not moved and not received:
            return 0
        fixed = sum(self._terms[axes][0] for axes in (reduced, moved - reduced) if axes)
        data = int(received * self._per_element + slower) - 4  # for what steps round off
        return (fixed or self._least) + max(data, 0)

    def _at_ends(self, number: int, axes: Axes) -> Ends:
        """Count what all ranks at the first, or last, places of axes need at the end, and hold."""
        need = own = last_need = last_own = self._rest
        for dim, i, j in zip(self._dims, self._ids[number], self._ids[self.end], strict=True):
            first = dim.at_ends(i, j, axes)
            need, own = need * first[0], own * first[1]
            last_need, last_own = last_need * first[2], last_own * first[3]
        return need, own, last_need, last_own

    def moves(self, here: int, room: float, *, straight: bool = False) -> Iterator[Move]:
        """Yield the steps from a state after which at most `room` picoseconds have passed.

        Several for one target where their costs differ. Straight: only the direct exchange to the
        end, besides the other kinds of steps.
        """
        for role, members in self._members.items():
            kind, axes = self._step(here, role)
            if kind is None:
                continue
            reached = self._reached(here, role, kind)
            yield from (self._simple(here, there, kind, axes) for there in reached)
            if kind in ("all_gather", "slice", "all_to_all"):
                others = {self.end}.intersection(members) if straight else members
                for there in others:
                    if self._least + self.bounds[there] <= room and there not in reached:
                        yield from self._swaps(here, there, room)

    def _step(self, here: int, role: Role) -> tuple[StepKind | None, Axes]:
        """Say what one step leads from a state to those of a role, and over which axes."""
        mine, nothing = self._roles[here], (None, NO_AXES)
        lost, gained = mine.waits - role.waits, role.waits - mine.waits
        new, old = role.cut - mine.cut, mine.cut - role.cut
        before, after = mine.pending, role.pending
        changed = [axis for axis in mine.waits & role.waits if before[axis] != after[axis]]
        if changed:
            is_alone = len(changed) == 1 and not (lost or gained or new or old)
            is_scaled = {before[changed[0]], after[changed[0]]} == {"sum", "avg"}
            return ("scale", frozenset(changed)) if is_alone and is_scaled else nothing
        if lost:
            is_alike = len({before[axis] for axis in lost}) == 1
            if gained or old or new not in (NO_AXES, lost) or not is_alike:
                return nothing
            return "reduce_scatter" if new else "all_reduce", lost
        if gained:
            axis, *others = gained
            is_final = after[axis] == self.problem.dst.pending[axis]
            if others or new or not old <= gained or not is_final:
                return nothing
            return ("fill", gained) if not old or self._is_share(here, axis) else nothing
        if (new and old) or not (new or old):
            return "all_to_all", NO_AXES
        return ("slice", new) if new else ("all_gather", old)

    def _reached(self, here: int, role: Role, kind: StepKind) -> list[int]:
        """List the states of a role that are reached by one step that is no direct exchange."""
        if kind == "all_to_all":
            return []
        cut = self._roles[here].cut
        new, left = role.cut - cut, self._taken_out(here, cut - role.cut)
        if new:
            return [i for i in self._members[role] if self._taken_out(i, new) == left]
        found = self._number.get((left, role.pending))
        return [] if found is None else [found]

    def _is_share(self, here: int, axis: int) -> bool:
        """Tell whether what an axis cuts may be filled in place; see [Note: images].

        Only the innermost cut of a dim is a share in place.
        """
        return axis in self._roles[0].cut and all(
            axis not in dim.axes[i] or dim.chains[i][-1].axis == axis
            for dim, i in zip(self._dims, self._ids[here], strict=True)
        )

    def _swaps(self, here: int, there: int, room: float) -> Iterator[Move]:
        """Yield direct exchanges: over the axes that must, or also over replicas to share work."""
        ends = self._ids[here], self._ids[there]
        pairs = [pair for pair in zip(self._dims, *ends, strict=True) if pair[1] != pair[2]]
        must = NO_AXES.union(*[dim.moved(i, j) for dim, i, j in pairs])
        if not must or self._terms[must][0] + self.bounds[there] > room:
            return
        before, after = self._roles[here].cut, self._roles[there].cut
        spare = sorted(after - before)
        for n in range(len(spare) + 1):
            for more in itertools.combinations(spare, n):
                group = must.union(more)
                ratio = self._count[group - after], self._count[group - before]
                received, sent = self._swap_elements(ends, pairs, group, ratio)
                yield self._move(there, "all_to_all", group, max(received, sent))
                if n == 0 and sent <= received:
                    return

    def _swap_elements(
        self,
        ends: tuple[Ids, Ids],
        pairs: list[tuple[Dim, int, int]],
        group: Axes,
        ratio: tuple[int, int],
    ) -> tuple[int, int]:
        """Estimate the most elements that a rank receives, and that a rank sends.

        Uneven dims are looked at one by one, so what they give together may be too much; it is no
        more than the largest part that can go from one rank to another, to all others.

        Args:
            ends: the numbers of all dims' chains, before and after.
            pairs: the dims that change, with theirs.
            group: the axes that take part.
            ratio: how many of the group's ranks need a part, and how many offer it.
        """
        need = self._rest
        for dim, i, j in zip(self._dims, *ends, strict=True):
            if i == j:
                need *= dim.largest[i]
        own = hot = kept = lack = part = need
        for dim, i, j in pairs:
            found = dim.overlap(i, j, group)
            need, own, lack = need * found.need, own * found.own, lack * found.lack
            hot, kept = hot * found.hot, kept * found.kept
            part *= min(dim.largest[i], dim.largest[j])
        received = lack if len(pairs) == 1 else need - own
        most = (self._count[group] - 1) * part
        return min(received, most), min(hot * ratio[0] // ratio[1] - kept, most)

    def _taken_out(self, number: int, axes: Axes) -> Ids:
        """Give the chains of a state without axes; -1 for what no chain says."""
        ids = self._ids[number]
        if not axes:
            return ids
        return tuple(
            i if dim.axes[i].isdisjoint(axes) else dim.without(i, axes)
            for dim, i in zip(self._dims, ids, strict=True)
        )

    def _simple(self, here: int, there: int, kind: StepKind, axes: Axes) -> Move:
        if kind not in COMMUNICATING:
            return Move(there, kind, axes)
        more, less = self._held(here), self._held(there)
        if kind == "all_gather":
            more, less = less, more
        return self._move(there, kind, axes, elements_moved(kind, self._count[axes], more[1], less))

    def _move(self, there: int, kind: StepKind, axes: Axes, elements: int) -> Move:
        fixed, per_element = self._terms[axes]
        cost = fixed + round(elements * per_element)
        return Move(there, kind, axes, cost, elements * self.problem.itemsize)

    def _held(self, number: int) -> tuple[int, int]:
        """Give the least and the most elements that a rank holds."""
        least = most = self._rest
        for dim, i in zip(self._dims, self._ids[number], strict=True):
            least, most = least * dim.least[i], most * dim.largest[i]
        return least, most
