# SPDX-License-Identifier: Apache-2.0
"""Calls: what a rank asks of its group, where it waits, and what an error says of either."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.errors import describe

__all__ = ["Call", "Wait", "deadlock_text", "mismatch_text", "user_line"]

# Lines of these packages are not the user's.
_LIBRARIES = ("hyper_parallel", "torch", "torch_npu", "threading", "contextlib")
_OWN = ("hyper_parallel.runtime.baton", "hyper_parallel.runtime.simulation", "threading")


class _Words(str):
    """Text that an error shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank asks of its group: a name and the facts that every member must agree on."""

    name: str
    facts: tuple[tuple[str, Hashable], ...] = ()

    @classmethod
    def of(cls, name: str, /, **facts: Hashable) -> Call:
        """Make a call from facts by name."""
        return cls(name, tuple(facts.items()))

    def difference(self, other: Call) -> str:
        """Name the first fact in which another call differs."""
        if self.name != other.name:
            return "collective"
        pairs = zip(self.facts, other.facts, strict=False)
        return next((mine[0] for mine, its in pairs if mine != its), "arguments")

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.facts)})"


@dataclass(frozen=True, slots=True)
class Wait:
    """One rank's call that the group has not answered yet, and the line that made it."""

    ranks: tuple[int, ...]
    call: Call
    payload: Any
    line: str

    def __str__(self) -> str:
        return f"{self.call} over ranks {self.ranks} at {self.line}"


def mismatch_text(first: Wait, other: Wait, *, other_rank: int) -> str:
    """Say how the call of one rank differs from that of its group's first."""
    what = first.call.difference(other.call)
    return describe(
        "simulate",
        f"every rank of the group {first.ranks} must make the same call",
        f"Make ranks {first.ranks[0]} and {other_rank} agree on the {what}",
        **{
            f"rank {first.ranks[0]}": _Words(f"{first.call} at {first.line}"),
            f"rank {other_rank}": _Words(f"{other.call} at {other.line}"),
        },
    )


def deadlock_text(waits: Sequence[Wait | None]) -> str:
    """Say where every rank waits; None stands for a rank that has ended."""
    says: dict[str, list[int]] = {}
    for rank, wait in enumerate(waits):
        text = "ended" if wait is None else f"waiting in {wait}"
        says.setdefault(text, []).append(rank)
    named = {
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}": _Words(text)
        for text, who in says.items()
    }
    return describe(
        "simulate",
        "every rank of a group must come to the group's collective",
        "Make all ranks of each group call the same collectives in the same order",
        **named,
    )


def user_line() -> str:
    """Name the nearest line outside the libraries; the outermost of theirs if there is none."""
    frame = inspect.currentframe()
    line = "an unknown line"
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        here = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if module.partition(".")[0] not in _LIBRARIES:
            return here
        if module not in _OWN:
            line = here
        frame = frame.f_back
    return line
