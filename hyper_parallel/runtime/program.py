# SPDX-License-Identifier: Apache-2.0
"""Program: a plan worked out for this rank, to be run whole or with its last collective in flight.

[Note: programs] What a step does on this rank (its group, counts, positions, whether it pads)
follows from the plan, so it is worked out once on a mesh, when it is first asked for by the plan or
by its two layouts; runs call the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.plan import Plan
from hyper_parallel.runtime.interface import Array, Work

__all__ = ["Collective", "Program", "Rest", "Run", "chain", "whole"]

Run = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Collective:
    """A step that communicates, in three parts, of which only `start` can stay in flight.

    Args:
        start: the collective; it takes `async_op`, too.
        before: what makes its operand; None: the local array is that.
        after: what makes the step's result; None: the collective's is that.
        copies: whether the operand is surely a copy, so that the local array may change meanwhile.
    """

    start: Callable[..., Any]
    before: Run | None = None
    after: Run | None = None
    copies: bool = False

    def whole(self) -> Run:
        """Give all of it as one function, which waits for the collective."""
        return chain(self.before, self.start, self.after)


@dataclass(frozen=True, slots=True)
class Program:
    """What a plan does on this rank.

    Args:
        plan: the plan; kept, so that its id stays its own.
        parts: its steps.
        run: all of them, one after the other.
    """

    plan: Plan
    parts: Sequence[Run | Collective]
    run: Run

    def launch(self, local: Array, clone: Run) -> Work | None:
        """Run it up to its last collective and leave that in flight.

        Args:
            local: this rank's array; it may change as soon as this returns.
            clone: copies an array.

        Returns:
            A handle whose `wait` does the rest; None, and nothing was run, if nothing communicates.
        """
        last = len(self.parts) - 1
        while last >= 0 and not isinstance(self.parts[last], Collective):
            last -= 1
        if last < 0:
            return None
        step = self.parts[last]
        assert isinstance(step, Collective)
        if last == 0 and not step.copies:
            local = clone(local)
        local = chain(*map(whole, self.parts[:last]), step.before)(local)
        return Rest(
            step.start(local, async_op=True),
            chain(step.after, *map(whole, self.parts[last + 1 :])),
        )


@dataclass(frozen=True, slots=True)
class Rest:
    """A collective in flight, and the steps that follow it; a `Work`.

    Args:
        work: the collective.
        rest: the steps, as one function of its result.
    """

    work: Work
    rest: Run

    def wait(self) -> Array:
        """Wait for the collective, then do the rest."""
        return self.rest(self.work.wait())


def whole(part: Run | Collective) -> Run:
    """Give a step as one function, which waits for its collective."""
    return part.whole() if isinstance(part, Collective) else part


def chain(*runs: Run | None) -> Run:
    """Give one function that calls all those that are not None, the first one first.

    Example:
        >>> chain(abs, None, float)(-2)
        2.0
    """
    steps = [run for run in runs if run is not None]
    if not steps:
        return lambda local: local
    if len(steps) == 1:
        return steps[0]
    before, last = chain(*steps[:-1]), steps[-1]
    return lambda local: last(before(local))
