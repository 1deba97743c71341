# SPDX-License-Identifier: Apache-2.0
"""The states a plan may pass through, and the single steps between them.

[Note: states] A state is, per tensor dim, the chain of the axes that cut it, and, per mesh axis,
the reduction that is pending on it. Those of a plan are made of the chains of `src` and `dst`, what
is left of these when axes are taken out, and the plain nestings of any axes on dims that `src` or
`dst` cuts. States know neither ranks nor names, so a renamed mesh has the same plans.

[Note: images] A rank's part of a pending reduction is fixed by how it began: R -> P and
P(a) -> P(b) fill from the replicated value, only an axis that `src` cuts fills from its share, and
an axis that stays pending is left alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from hyper_parallel.core.chains import Dim
from hyper_parallel.core.collective import StepKind
from hyper_parallel.core.cost import LinkModel, elements_moved
from hyper_parallel.core.nesting import Chain, Cut
from hyper_parallel.core.placement import Shard

__all__ = ["Move", "Problem", "Space", "State"]

Axes = frozenset[int]
Pending = tuple[str | None, ...]
_NONE: Axes = frozenset()


class State(NamedTuple):
    """What a plan has reached; see [Note: states]."""

    chains: tuple[Chain, ...]
    pending: Pending


class Problem(NamedTuple):
    """Where a plan starts and ends, in canonical chains, and what its steps cost."""

    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    src: State
    dst: State
    itemsize: int
    model: LinkModel


class Move(NamedTuple):
    """One step to a state: its kind and axes, and its cost in picoseconds and bytes."""

    target: int
    kind: StepKind
    axes: Axes
    cost: int = 0
    size: int = 0


class _Role(NamedTuple):
    """What the axes of a state do: which cut, and what is pending on which."""

    cut: Axes
    pending: Pending
    waits: Axes


_Ids = tuple[int, ...]


class Space:
    """The states of a problem, numbered, and the moves between them. State 0 is the start."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        ends = (problem.src, problem.dst)
        self._axes = [axis for axis, n in enumerate(problem.mesh_shape) if n > 1]
        self._cut_dims = _dims_to_cut(problem, len(self._axes))
        free = self._free_axes()
        self._dims = [self._dim(d, free) for d in self._cut_dims]
        uncut = [n for d, n in enumerate(problem.shape) if d not in self._cut_dims]
        self._rest = math.prod(uncut)
        self._ids: list[_Ids] = []
        self._roles: list[_Role] = []
        self._number: dict[tuple[_Ids, Pending], int] = {}
        self._members: dict[_Role, list[int]] = {}
        self._prices: dict[Axes, tuple[int, float]] = {}
        for state in ends:
            self._add(self._ids_of(state), state.pending)
        self.end = self._number[self._ids_of(problem.dst), problem.dst.pending]
        self._add_all()
        self._end_role = self._roles[self.end]
        self._bounds: list[int | None] = [None] * len(self._ids)
        single = [self._terms(frozenset((axis,))) for axis in self._axes]
        self._least = min(fixed for fixed, _ in single)
        self._per_element = min(per_element for _, per_element in single)

    def state(self, number: int) -> State:
        """Give a state by its number."""
        chains: list[Chain] = [()] * len(self.problem.shape)
        for d, dim, i in zip(self._cut_dims, self._dims, self._ids[number], strict=True):
            chains[d] = dim.chains[i]
        return State(tuple(chains), self._roles[number].pending)

    def bound(self, number: int) -> int:
        """Give picoseconds that any way from a state to the end takes at least.

        What the first or the last rank needs and does not hold has to come over the fastest link;
        of a reduction at least one more value of each element.
        """
        found = self._bounds[number]
        if found is None:
            found = self._bounds[number] = self._bound(number)
        return found

    def _bound(self, number: int) -> int:
        cut, _, waits = self._roles[number]
        end = self._end_role
        reduces = not waits <= end.waits
        if not reduces and cut <= end.cut | end.waits:
            return 0
        most = 0
        for last in (False, True):
            need = own = self._rest
            for dim, i, j in zip(self._dims, self._ids[number], self._ids[self.end], strict=True):
                wanted, both = dim.at_corner(i, j, last)
                need, own = need * wanted, own * both
            most = max(most, need if reduces else need - own)
        return self._least + round(most * self._per_element)

    def moves(self, here: int, room: float) -> Iterator[Move]:
        """Yield the steps from a state after which at most `room` picoseconds have passed.

        Several for one target where their costs differ.
        """
        mine = self._roles[here]
        for role, members in self._members.items():
            lost, gained = mine.waits - role.waits, role.waits - mine.waits
            new, old = role.cut - mine.cut, mine.cut - role.cut
            if lost:
                if not gained and not old and new in (_NONE, lost):
                    yield from self._reductions(here, role, lost, new)
            elif gained:
                if len(gained) == 1 and not new and old <= gained:
                    yield from self._fills(here, role, gained, old)
            elif mine.pending != role.pending:
                yield from self._scalings(here, role)
            else:
                target = -1
                if old and not new:
                    target = self._number.get((self._taken_out(here, old), role.pending), -1)
                    if target >= 0:
                        yield self._even(here, target, "all_gather", old)
                for there in members:
                    if new and not old and self._taken_out(there, new) == self._ids[here]:
                        yield Move(there, "slice", new)
                    elif there not in (target, here) and self._least + self.bound(there) <= room:
                        yield from self._swaps(here, there, room)

    def _reductions(self, here: int, role: _Role, lost: Axes, new: Axes) -> Iterator[Move]:
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

    def _fills(self, here: int, role: _Role, gained: Axes, old: Axes) -> Iterator[Move]:
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

    def _scalings(self, here: int, role: _Role) -> Iterator[Move]:
        pairs = zip(self._roles[here].pending, role.pending, strict=True)
        changed = {axis: pair for axis, pair in enumerate(pairs) if pair[0] != pair[1]}
        target = self._number.get((self._ids[here], role.pending))
        if target is not None and len(changed) == 1 and set(*changed.values()) == {"sum", "avg"}:
            yield Move(target, "scale", frozenset(changed))

    def _swaps(self, here: int, there: int, room: float) -> Iterator[Move]:
        """Yield direct exchanges: over the axes that must, or also over replicas to share work."""
        must: Axes = _NONE
        for dim, i, j in zip(self._dims, self._ids[here], self._ids[there], strict=True):
            if i != j:
                must |= dim.moved(i, j)
        if not must:
            return
        spare = sorted(self._roles[there].cut - self._roles[here].cut)
        for n in range(len(spare) + 1):
            for more in itertools.combinations(spare, n):
                group = must.union(more)
                if self._terms(group)[0] + self.bound(there) > room:
                    continue
                received, sent = self._swap_elements(here, there, group)
                yield self._priced(there, "all_to_all", group, max(received, sent))
                if n == 0 and sent <= received:
                    return

    def _swap_elements(self, here: int, there: int, group: Axes) -> tuple[int, int]:
        """Estimate the most elements that a rank receives, and that a rank sends."""
        need = own = hot = lack = kept = self._rest
        num_changed = 0
        for dim, i, j in zip(self._dims, self._ids[here], self._ids[there], strict=True):
            if i == j:
                most = dim.largest[i]
                need, own, lack = need * most, own * most, lack * most
                hot, kept = hot * most, kept * most
            else:
                found = dim.overlap(i, j, group)
                need, own, lack = need * found.need, own * found.own, lack * found.lack
                hot, kept = hot * found.hot, kept * found.kept
                num_changed += 1
        sizes = self.problem.mesh_shape
        wanted, offered = 1, 1
        for axis in group:
            wanted *= 1 if axis in self._roles[there].cut else sizes[axis]
            offered *= 1 if axis in self._roles[here].cut else sizes[axis]
        sent = hot * wanted // offered - kept
        return lack if num_changed == 1 else need - own, sent

    def _taken_out(self, number: int, axes: Axes) -> _Ids:
        return tuple(
            i if dim.axes[i].isdisjoint(axes) else dim.without(i, axes)
            for dim, i in zip(self._dims, self._ids[number], strict=True)
        )

    def _even(self, here: int, there: int, kind: StepKind, axes: Axes) -> Move:
        num_ranks = math.prod(self.problem.mesh_shape[axis] for axis in axes)
        before, after = self._largest(here), self._largest(there)
        return self._priced(there, kind, axes, elements_moved(kind, num_ranks, before, after))

    def _priced(self, there: int, kind: StepKind, axes: Axes, elements: int) -> Move:
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

    def _free_axes(self) -> Axes:
        """List the axes that may nest on the way as they like: not those that stay pending.

        Of more than three axes only those that change, and none if these are still more.
        """
        src, dst = self.problem.src, self.problem.dst
        pending = zip(src.pending, dst.pending, strict=True)
        stay = {axis for axis, pair in enumerate(pending) if self._stays(*pair)}
        free = frozenset(self._axes) - stay
        if len(free) > 3:
            ends = [{step for chain in state.chains for step in chain} for state in (src, dst)]
            free &= {step.axis for step in ends[0] ^ ends[1]} | {
                axis for axis in free if src.pending[axis] != dst.pending[axis]
            }
        return free if len(free) <= 3 else _NONE

    def _stays(self, before: str | None, after: str | None) -> bool:
        """Tell whether what is pending on an axis is at most scaled."""
        return before is not None and (before == after or {before, after} == {"sum", "avg"})

    def _options(self, axis: int) -> tuple[str | None, ...]:
        """List what may be pending on an axis that cuts nothing."""
        before, after = self.problem.src.pending[axis], self.problem.dst.pending[axis]
        options = (before, after) if self._stays(before, after) else (None, before, after)
        return tuple(dict.fromkeys(options))

    def _dim(self, d: int, free: Axes) -> Dim:
        problem = self.problem
        cuts = [Cut(axis, problem.mesh_shape[axis], Shard(d)) for axis in sorted(free)]
        return Dim(problem.shape[d], (problem.src.chains[d], problem.dst.chains[d]), cuts)

    def _ids_of(self, state: State) -> _Ids:
        return tuple(
            dim.index[state.chains[d]] for d, dim in zip(self._cut_dims, self._dims, strict=True)
        )

    def _add(self, ids: _Ids, pending: Pending) -> None:
        number = self._number.setdefault((ids, pending), len(self._ids))
        if number == len(self._ids):
            cut = _NONE.union(*(dim.axes[i] for dim, i in zip(self._dims, ids, strict=True)))
            waits = frozenset(axis for axis, op in enumerate(pending) if op is not None)
            role = _Role(cut, pending, waits)
            self._ids.append(ids)
            self._roles.append(role)
            self._members.setdefault(role, []).append(number)

    def _add_all(self) -> None:
        """Add every combination of chains on different axes and of pending reductions."""
        partly: list[tuple[_Ids, Axes]] = [((), _NONE)]
        for dim in self._dims:
            partly = [
                ((*ids, i), cut | axes)
                for ids, cut in partly
                for i, axes in enumerate(dim.axes)
                if cut.isdisjoint(axes)
            ]
        options = [self._options(axis) for axis in range(len(self.problem.mesh_shape))]
        for ids, cut in partly:
            every = [(None,) if axis in cut else found for axis, found in enumerate(options)]
            for pending in itertools.product(*every):
                ops = {op for op in pending if op is not None}
                if len(ops) < 2 or ops == {"sum", "avg"}:
                    self._add(ids, pending)


def _dims_to_cut(problem: Problem, num_axes: int) -> list[int]:
    """List the dims that src or dst cuts, and on two axes one more, to move pieces in."""
    ends = (problem.src, problem.dst)
    found = [d for d in range(len(problem.shape)) if any(state.chains[d] for state in ends)]
    spare = [d for d in range(len(problem.shape)) if d not in found]
    if spare and ((num_axes == 2 and len(found) < 2) or (num_axes > 2 and not found)):
        found.append(max(spare, key=problem.shape.__getitem__))
    return sorted(found)
