# SPDX-License-Identifier: Apache-2.0
"""Calls: what a rank asks of its group, where it waits, and what an error says of either.

[Note: places] An error names the line and the module that led to a collective. Both are read off
the Python frames, and only once something is wrong, so that a call that succeeds pays nothing.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

from hyper_parallel.errors import BackendError, describe

__all__ = [
    "Call",
    "Said",
    "Wait",
    "check_parts",
    "deadlock_text",
    "mismatch_text",
    "place_of",
    "user_line",
]

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

    @classmethod
    def to(cls, method: str, given: Mapping[str, Any]) -> Call:
        """Make the call of a Communicator's method from its arguments by name."""
        facts: dict[str, Hashable] = {name: given[name] for name in ("op", "src") if name in given}
        if "sizes" in given:
            facts["sizes"] = tuple(given["sizes"])
        if "values" in given:
            facts["count"] = len(given["values"])
        if "send_sizes" in given:
            facts["parts"] = len(given["send_sizes"]), len(given["recv_sizes"])
        x = given.get("x", given.get("out"))
        if x is not None:
            shape = tuple(x.shape)
            # What the ranks may differ in is left out: rows that `sizes` counts, parts sent.
            if method == "all_gather_v":
                facts["rest"] = shape[1:]
            elif method != "all_to_all_v":
                facts["shape"] = shape
            facts["dtype"] = str(x.dtype).rpartition(".")[2]
        return cls.of(method, **facts)

    def difference(self, other: Call) -> str:
        """Name the first fact in which another call differs."""
        if self.name != other.name:
            return "collective"
        pairs = zip(self.facts, other.facts, strict=False)
        return next((mine[0] for mine, its in pairs if mine != its), "arguments")

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.facts)})"


@dataclass(frozen=True, slots=True)
class Said:
    """A call with the line and the place it came from, as one rank tells it to others."""

    call: Call
    line: str
    place: str = ""

    @classmethod
    def here(cls, call: Call) -> Said:
        """Tell a call of this thread, which is inside it."""
        return cls(call, user_line(), place_of(inspect.currentframe()))

    def packed(self) -> str:
        """Give a text that `unpacked` reads; values of facts become text."""
        facts = [[name, str(value)] for name, value in self.call.facts]
        return json.dumps([self.call.name, facts, self.line, self.place])

    @classmethod
    def unpacked(cls, text: str) -> Said:
        """Read what `packed` gave."""
        name, facts, line, place = json.loads(text)
        return cls(Call(name, tuple((key, value) for key, value in facts)), line, place)

    @property
    def where(self) -> str:
        """The line, and the module if there is one."""
        return f"{self.line} in {self.place}" if self.place else self.line

    def __str__(self) -> str:
        return f"{self.call} at {self.where}"


@dataclass(frozen=True, slots=True)
class Wait:
    """One rank's call that the group has not answered yet, the line and frame that made it."""

    ranks: tuple[int, ...]
    call: Call
    payload: Any
    line: str
    frame: FrameType | None = None

    def said(self) -> Said:
        """Give what the group is told of it."""
        return Said(self.call, self.line, place_of(self.frame))

    def __str__(self) -> str:
        return f"{self.call} over ranks {self.ranks} at {self.said().where}"


def mismatch_text(where: str, ranks: Sequence[int], said: Sequence[Said]) -> str:
    """Say alike on all ranks how the first call unlike that of the group's first rank differs."""
    first = said[0]
    odd = next(i for i, one in enumerate(said) if one.call != first.call)
    what = first.call.difference(said[odd].call)
    return describe(
        where,
        f"every rank of the group {tuple(ranks)} must make the same call",
        f"Make ranks {ranks[0]} and {ranks[odd]} agree on the {what}",
        **{
            f"rank {ranks[0]}": _Words(str(first)),
            f"rank {ranks[odd]}": _Words(str(said[odd])),
        },
    )


def check_parts(
    ranks: Sequence[int], send: Sequence[Sequence[int]], receive: Sequence[Sequence[int]]
) -> None:
    """Refuse an all_to_all_v where a rank expects another size than is sent to it.

    Raises:
        BackendError: naming the first such pair of ranks.
    """
    for i, sent in enumerate(send):
        for j, expected in enumerate(receive):
            if sent[j] != expected[i]:
                raise BackendError(
                    "all_to_all_v",
                    f"rank {ranks[j]} must expect from rank {ranks[i]} what that rank sends",
                    "Compute both sizes from the same layout",
                    sent=sent[j],
                    expected=expected[i],
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


def place_of(frame: FrameType | None) -> str:
    """Name the innermost module on the way to a frame, or give "".

    Args:
        frame: where to begin, outward.

    Returns:
        What an edge of a parallel module says of itself (`where`; in backward its autograd context
        leads to it); else the path of the module in the outermost one. A module is what has
        `named_modules`.
    """
    modules: list[Any] = []
    while frame is not None:
        local = frame.f_locals
        owner: Any = local.get("self")
        edge = getattr(local.get("ctx"), "edge", owner)
        where: Any = getattr(edge, "where", None)
        if isinstance(where, str) and not modules:
            return where
        if owner is not None and hasattr(cast(object, type(owner)), "named_modules"):
            modules.append(owner)
        frame = frame.f_back
    if not modules:
        return ""
    named = cast("list[tuple[str, Any]]", list(modules[-1].named_modules()))
    path = next((name for name, module in named if module is modules[0]), "")
    return f"module {path!r}" if path else type(modules[0]).__name__
