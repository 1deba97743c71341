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

from hyper_parallel.core.chains import Dim
from hyper_parallel.core.collective import StepKind
from hyper_parallel.core.cost import elements_moved
from hyper_parallel.core.states import NO_AXES, Axes, Ids, Problem, Role, States

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
        self._prices: dict[Axes, tuple[int, float]] = {}
        self._swapped: dict[tuple[Ids, Ids], list[tuple[Axes, int, int]]] = {}
        self._counts: dict[Axes, int] = {}
        self._end_role = self._roles[self.end]
        self._bounds: list[int | None] = [None] * len(self._ids)
        single = [self._terms(frozenset((axis,))) for axis in self._axes]
        self._least = min(fixed for fixed, _ in single)
        self._per_element = min(per_element for _, per_element in single)

    def bound(self, number: int) -> int:
        """Give picoseconds that any way from a state to the end takes at least; [Note: bound]."""
        found = self._bounds[number]
        if found is None:
            found = self._bounds[number] = self._bound(number)
        return found

    def _bound(self, number: int) -> int:
        cut, _, waits = self._roles[number]
        reduced = waits - self._end_role.waits
        received = self._received(number, bool(reduced))
        slower, moved = 0.0, NO_AXES
        for axis in cut | reduced:
            crossing = self._crossing(number, axis, axis in reduced)
            if crossing:
                moved |= {axis}
                extra = self._terms(frozenset((axis,)))[1] - self._per_element
                slower = max(slower, extra * crossing)
        if not moved and not received:
            return 0
        fixed = sum(self._terms(axes)[0] for axes in (reduced, moved - reduced) if axes)
        data = int(received * self._per_element + slower) - 4  # for what steps round off
        return (fixed or self._least) + max(data, 0)

    def _received(self, number: int, is_reduction: bool) -> int:
        """Give the most elements that the first or the last rank has to receive until the end."""
        need, own, last_need, last_own = self._rest, self._rest, self._rest, self._rest
        for dim, i, j in zip(self._dims, self._ids[number], self._ids[self.end], strict=True):
            (wanted, both), (last_wanted, last_both) = dim.at_corners(i, j)
            need, own = need * wanted, own * both
            last_need, last_own = last_need * last_wanted, last_own * last_both
        # Ranks that fill a pending reduction in place share what it is filled from; [Note: images].
        filled = self._count(
            (self._end_role.waits - self._roles[number].waits) & self._roles[0].cut
        )
        if filled > 1:
            need, last_need = need // filled, last_need // filled
            own = last_own = self._largest(number)
        if is_reduction:
            own = last_own = 0
        return max(need - own, last_need - last_own, 0)

    def _crossing(self, number: int, axis: int, is_reduced: bool) -> float:
        """Give the elements that each rank at the first or last place of an axis must have over it.

        Together they need what no rank at that place holds; of a reduction along it, all.
        """
        if not is_reduced and axis in self._end_role.waits:
            return 0.0
        need, own, last_need, last_own = self._rest, self._rest, self._rest, self._rest
        for dim, i, j in zip(self._dims, self._ids[number], self._ids[self.end], strict=True):
            (wanted, both), (last_wanted, last_both) = dim.at_places(i, j, axis)
            need, own = need * wanted, own * both
            last_need, last_own = last_need * last_wanted, last_own * last_both
        if is_reduced:
            own = last_own = 0
        most = max(need - own, last_need - last_own)
        return most / self._count(frozenset(self._axes) - {axis})

    def moves(self, here: int, room: float) -> Iterator[Move]:
        """Yield the steps from a state after which at most `room` picoseconds have passed.

        Several for one target where their costs differ.
        """
        mine, ids = self._roles[here], self._ids[here]
        for role, members in self._members.items():
            lost, gained = mine.waits - role.waits, role.waits - mine.waits
            new, old = role.cut - mine.cut, mine.cut - role.cut
            if lost:
                if not gained and not old and new in (NO_AXES, lost):
                    yield from self._reductions(here, role, lost, new)
            elif gained:
                if len(gained) == 1 and not new and old <= gained:
                    yield from self._fills(here, role, gained, old)
            elif mine.pending != role.pending:
                yield from self._scalings(here, role)
            else:
                target, only_new = -1, bool(new) and not old
                if old and not new:
                    target = self._number.get((self._taken_out(here, old), role.pending), -1)
                    if target >= 0:
                        yield self._even(here, target, "all_gather", old)
                sliced = {i for i in members if self._taken_out(i, new) == ids} if only_new else ()
                for there in members:
                    if there in sliced:
                        yield Move(there, "slice", new)
                    elif there not in (target, here) and self._least + self.bound(there) <= room:
                        for group, cost, size in self._swaps(here, there):
                            yield Move(there, "all_to_all", group, cost, size)

    def _reductions(self, here: int, role: Role, lost: Axes, new: Axes) -> Iterator[Move]:
        pending = self._roles[here].pending
        ops = {pending[axis] for axis in lost}
        kept = all(role.pending[axis] == pending[axis] for axis in role.waits)
        if len(ops) > 1 or not kept:
            return
        if not new:
            target = self._number.get((self._ids[here], role.pending))
            if target is not None:
                yield self._even(here, target, "all_reduce", lost)
            return
        for there in self._members[role]:
            if self._taken_out(there, lost) == self._ids[here]:
                yield self._even(here, there, "reduce_scatter", lost)

    def _fills(self, here: int, role: Role, gained: Axes, old: Axes) -> Iterator[Move]:
        (axis,) = gained
        pending = self._roles[here].pending
        kept = all(role.pending[other] == pending[other] for other in role.waits - gained)
        if not kept or role.pending[axis] != self.problem.dst.pending[axis]:
            return
        ids = self._ids[here]
        if old:  # only the innermost cut of a dim is a share in place; see [Note: images]
            if axis not in self._roles[0].cut:
                return
            for dim, i in zip(self._dims, ids, strict=True):
                if axis in dim.axes[i] and dim.chains[i][-1].axis != axis:
                    return
            ids = self._taken_out(here, gained)
        target = self._number.get((ids, role.pending))
        if target is not None:
            yield Move(target, "fill", gained)

    def _scalings(self, here: int, role: Role) -> Iterator[Move]:
        pairs = zip(self._roles[here].pending, role.pending, strict=True)
        changed = {axis: pair for axis, pair in enumerate(pairs) if pair[0] != pair[1]}
        target = self._number.get((self._ids[here], role.pending))
        if target is not None and len(changed) == 1 and set(*changed.values()) == {"sum", "avg"}:
            yield Move(target, "scale", frozenset(changed))

    def _swaps(self, here: int, there: int) -> list[tuple[Axes, int, int]]:
        """List direct exchanges: over the axes that must, or also over replicas to share work."""
        key = self._ids[here], self._ids[there]
        found = self._swapped.get(key)
        if found is not None:
            return found
        found = self._swapped[key] = []
        pairs = [pair for pair in zip(self._dims, *key, strict=True) if pair[1] != pair[2]]
        must = NO_AXES.union(*[dim.moved(i, j) for dim, i, j in pairs])
        if not must:
            return found
        before, after = self._roles[here].cut, self._roles[there].cut
        spare = sorted(after - before)
        for n in range(len(spare) + 1):
            for more in itertools.combinations(spare, n):
                group = must.union(more) if more else must
                ratio = self._count(group - after), self._count(group - before)
                received, sent = self._swap_elements(key, pairs, group, ratio)
                fixed, per_element = self._terms(group)
                most = max(received, sent)
                size = most * self.problem.itemsize
                found.append((group, fixed + round(most * per_element), size))
                if n == 0 and sent <= received:
                    return found
        return found

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
        most = (self._count(group) - 1) * part
        return min(received, most), min(hot * ratio[0] // ratio[1] - kept, most)

    def _count(self, axes: Axes) -> int:
        """Count the ranks along axes."""
        found = self._counts.get(axes)
        if found is None:
            found = math.prod(self.problem.mesh_shape[axis] for axis in axes)
            self._counts[axes] = found
        return found

    def _taken_out(self, number: int, axes: Axes) -> Ids:
        return tuple(
            i if dim.axes[i].isdisjoint(axes) else dim.without(i, axes)
            for dim, i in zip(self._dims, self._ids[number], strict=True)
        )

    def _even(self, here: int, there: int, kind: StepKind, axes: Axes) -> Move:
        more, less = (there, here) if kind == "all_gather" else (here, there)
        pieces = self._least_held(less), self._largest(less)
        elements = elements_moved(kind, self._count(axes), self._largest(more), pieces)
        fixed, per_element = self._terms(axes)
        cost = fixed + round(elements * per_element)
        return Move(there, kind, axes, cost, elements * self.problem.itemsize)

    def _terms(self, axes: Axes) -> tuple[int, float]:
        """Give picoseconds of a collective without data, and per element."""
        found = self._prices.get(axes)
        if found is None:
            fixed, per_byte = self.problem.model.terms(self.problem.mesh_shape, sorted(axes))
            found = round(fixed * 1e12), per_byte * 1e12 * self.problem.itemsize
            self._prices[axes] = found
        return found

    def _largest(self, number: int) -> int:
        sizes = (dim.largest[i] for dim, i in zip(self._dims, self._ids[number], strict=True))
        return self._rest * math.prod(sizes)

    def _least_held(self, number: int) -> int:
        sizes = (dim.least[i] for dim, i in zip(self._dims, self._ids[number], strict=True))
        return self._rest * math.prod(sizes)
