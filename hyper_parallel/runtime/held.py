# SPDX-License-Identifier: Apache-2.0
"""Find the rank that holds what the running rank waits for.

[Note: held properties] Until Python 3.12 functools.cached_property computes a value under one lock
for all instances. A simulated rank that communicates inside such a property passes the baton on and
keeps the lock; a rank that then reads the property has the baton and waits for the lock, so nothing
goes on. As it waits outside of any collective this is no deadlock that the baton sees; it is read
off the threads' frames, by the thread that waits for the run, and told as an error.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

__all__ = ["Held", "find_held"]

_GET: CodeType = vars(functools.cached_property)["__get__"].__code__


class Held(NamedTuple):
    """A rank inside a cached_property, which another one waits for. Equal while nothing happens."""

    holder: int
    waiting: int
    name: str
    place: tuple[int, int]


def find_held(running: int, idents: Sequence[int | None]) -> Held | None:
    """Say who holds what the running rank is about to compute; the same a while later is a hang."""
    frames: Mapping[int, FrameType] = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    mine = frames.get(idents[running] or 0)
    if mine is None or mine.f_code is not _GET:
        return None
    wanted: Any = mine.f_locals["self"]
    for rank, ident in enumerate(idents):
        frame = frames.get(ident or 0) if rank != running else None
        while frame is not None:
            if frame.f_code is _GET and frame.f_locals["self"] is wanted:
                return Held(rank, running, str(wanted.attrname), (id(mine), mine.f_lasti))
            frame = frame.f_back
    return None
