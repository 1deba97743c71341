# SPDX-License-Identifier: Apache-2.0
"""The states that a plan may pass through, numbered.

[Note: states] A state is, per tensor dim, the chain of the axes that cut it, and, per mesh axis,
the reduction that is pending on it. Those of a plan are made of the chains of `src` and `dst`, what
is left of these when axes are taken out, and the plain nestings of any axes on dims that `src` or
`dst` cuts, or that give pieces room to move in. States know neither ranks nor names, so a renamed
mesh has the same plans.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from hyper_parallel.core.chains import NO_AXES, Axes, Dim, dim_of
from hyper_parallel.core.cost import LinkModel
from hyper_parallel.core.nesting import Chain, Cut
from hyper_parallel.core.placement import Shard

__all__ = ["Ids", "Pending", "Problem", "Role", "State", "States", "stays_pending"]

_MOST_FREE = 3  # axes that nest freely: the number of states grows fast with them
Ids = tuple[int, ...]  # the number of each dim's chain
Pending = tuple[str | None, ...]


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


class Role(NamedTuple):
    """What the axes of a state do: which cut, and what is pending on which."""

    cut: Axes
    pending: Pending
    waits: Axes


def stays_pending(before: str | None, after: str | None) -> bool:
    """Tell whether what is pending on an axis is at most scaled."""
    return before is not None and (before == after or {before, after} == {"sum", "avg"})


class States:
    """The states of a problem, numbered from 0, the start. The base of `Space`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        ends = (problem.src, problem.dst)
        self._axes = frozenset(axis for axis, n in enumerate(problem.mesh_shape) if n > 1)
        self._cut_dims = _dims_to_cut(problem, len(self._axes))
        free = self._free_axes()
        self._dims = [self._dim(d, free) for d in self._cut_dims]
        uncut = [n for d, n in enumerate(problem.shape) if d not in self._cut_dims]
        self._rest = math.prod(uncut)
        self._ids: list[Ids] = []
        self._roles: list[Role] = []
        self._number: dict[tuple[Ids, Pending], int] = {}
        self._members: dict[Role, list[int]] = {}
        for state in ends:
            self._add(self._ids_of(state), state.pending)
        self.end = self._number[self._ids_of(problem.dst), problem.dst.pending]
        self._add_all()

    def __len__(self) -> int:
        return len(self._ids)

    def state(self, number: int) -> State:
        """Give a state by its number."""
        chains: list[Chain] = [()] * len(self.problem.shape)
        for d, dim, i in zip(self._cut_dims, self._dims, self._ids[number], strict=True):
            chains[d] = dim.chains[i]
        return State(tuple(chains), self._roles[number].pending)

    def _free_axes(self) -> Axes:
        """List the axes that may nest on the way as they like: not those that stay pending.

        Of more than `_MOST_FREE` axes only those that change, and none if these are still more.
        """
        src, dst = self.problem.src, self.problem.dst
        pending = zip(src.pending, dst.pending, strict=True)
        stay = {axis for axis, pair in enumerate(pending) if stays_pending(*pair)}
        free = self._axes - stay
        if len(free) > _MOST_FREE:
            ends = [{step for chain in state.chains for step in chain} for state in (src, dst)]
            free &= {step.axis for step in ends[0] ^ ends[1]} | {
                axis for axis in free if src.pending[axis] != dst.pending[axis]
            }
        return free if len(free) <= _MOST_FREE else NO_AXES

    def _options(self, axis: int) -> tuple[str | None, ...]:
        """List what may be pending on an axis that cuts nothing."""
        before, after = self.problem.src.pending[axis], self.problem.dst.pending[axis]
        options = (before, after) if stays_pending(before, after) else (None, before, after)
        return tuple(dict.fromkeys(options))

    def _dim(self, d: int, free: Axes) -> Dim:
        problem = self.problem
        cuts = tuple(Cut(axis, problem.mesh_shape[axis], Shard(d)) for axis in sorted(free))
        ends = (problem.src.chains[d], problem.dst.chains[d])
        if not self._cut_dims[d]:
            ends, cuts = (*ends, *((cut,) for cut in cuts)), ()
        return dim_of(problem.shape[d], ends, cuts)

    def _ids_of(self, state: State) -> Ids:
        return tuple(
            dim.index[state.chains[d]] for d, dim in zip(self._cut_dims, self._dims, strict=True)
        )

    def _add(self, ids: Ids, pending: Pending) -> None:
        number = self._number.setdefault((ids, pending), len(self._ids))
        if number == len(self._ids):
            cut = NO_AXES.union(*(dim.axes[i] for dim, i in zip(self._dims, ids, strict=True)))
            waits = frozenset(axis for axis, op in enumerate(pending) if op is not None)
            role = Role(cut, pending, waits)
            self._ids.append(ids)
            self._roles.append(role)
            self._members.setdefault(role, []).append(number)

    def _add_all(self) -> None:
        """Add every combination of chains on different axes and of pending reductions."""
        partly: list[tuple[Ids, Axes]] = [((), NO_AXES)]
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


def _dims_to_cut(problem: Problem, num_axes: int) -> dict[int, bool]:
    """List the dims that a plan may cut, in order, and whether axes may nest on them.

    Those that src or dst cuts; on several axes the largest others, too, to move pieces in, so that
    there are as many as axes that may move. From the third dim on, one axis at a time.
    """
    ends = (problem.src, problem.dst)
    found = [d for d in range(len(problem.shape)) if any(state.chains[d] for state in ends)]
    spare = [d for d in range(len(problem.shape)) if d not in found]
    spare.sort(key=problem.shape.__getitem__, reverse=True)
    room = min(num_axes, _MOST_FREE) if num_axes > 1 else 0
    nesting = [*found, *spare][: max(len(found), 2)] if room else found
    return {d: d in nesting for d in sorted([*found, *spare][: max(len(found), room)])}
