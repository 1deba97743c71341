# SPDX-License-Identifier: Apache-2.0
"""The cheapest way through the states of a problem: A*, with one answer on every rank.

Ways are compared by time, then steps, then bytes, then the numbers of the states they pass, which
follow from the problem alone; costs are whole picoseconds, so that equal times are equal.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache
from typing import NamedTuple

from hyper_parallel.core.collective import StepKind
from hyper_parallel.core.space import Space
from hyper_parallel.core.states import Problem, State

__all__ = ["Leg", "Way", "cheapest_way"]


class Leg(NamedTuple):
    """One step of a way, and the state it leads to."""

    kind: StepKind
    axes: tuple[int, ...]
    state: State


class Way(NamedTuple):
    """The legs from the start to the end, and their time in picoseconds."""

    legs: tuple[Leg, ...]
    cost: float


_Key = tuple[int, int, int, tuple[int, ...]]


@lru_cache(maxsize=4096)
def cheapest_way(problem: Problem) -> Way:
    """Find the cheapest way from the start of a problem to its end.

    Args:
        problem: where to start and to end, with chains in canonical form.

    Returns:
        The way; without legs if both ends are one state.
    """
    if problem.src == problem.dst:
        return Way((), 0)
    space = Space(problem)
    # Few steps lead straight to the end. The best way of these says what others may take at most.
    straight = _search(space, Way((), math.inf), straight=True)
    found = _search(space, straight)
    assert found.legs, f"no way in {problem}"
    return found


def _search(space: Space, known: Way, *, straight: bool = False) -> Way:
    """Find the cheapest way, or `known` if none seems cheaper; straight: see `Space.moves`."""
    limit = known.cost
    start: _Key = (0, 0, 0, (0,))
    best: dict[int, _Key] = {0: start}
    came: dict[int, tuple[int, StepKind, frozenset[int]]] = {}
    queue: list[tuple[int, _Key]] = [(space.bounds[0], start)]
    while queue:
        _, key = heapq.heappop(queue)
        cost, steps, size, path = key
        here = path[-1]
        if key != best[here]:
            continue
        if here == space.end:
            return Way(_legs(space, came), cost)
        for there, kind, axes, price, moved in space.moves(here, limit - cost, straight=straight):
            total = cost + price
            least = total + space.bounds[there]
            if least > limit:
                continue
            found = (total, steps + 1, size + moved, (*path, there))
            if there not in best or found < best[there]:
                best[there] = found
                came[there] = (here, kind, axes)
                heapq.heappush(queue, (least, found))
                if there == space.end:
                    limit = total
    return known  # bounds may be a little above what uneven pieces are taken to cost


def _legs(space: Space, came: dict[int, tuple[int, StepKind, frozenset[int]]]) -> tuple[Leg, ...]:
    legs: list[Leg] = []
    here = space.end
    while here != 0:
        before, kind, axes = came[here]
        legs.append(Leg(kind, tuple(sorted(axes)), space.state(here)))
        here = before
    return tuple(reversed(legs))
