# SPDX-License-Identifier: Apache-2.0
"""Baton: N ranks in N threads of which exactly one runs, switching only inside `exchange`.

[Note: baton order] The baton goes to the lowest rank that can run, so between two collectives the
ranks run in rank order, and a run with the same inputs takes the same course every time.

[Note: exact deadlock] When no rank can run and some have not ended, nothing can ever happen again.
So a deadlock is a fact seen at once, without any timer, and every waiting rank is told the whole of
it: who waits where, and who has ended.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.errors import BackendError, describe
from hyper_parallel.runtime.calls import Call, Wait, deadlock_text, mismatch_text, user_line
from hyper_parallel.runtime.held import Held, find_held
from hyper_parallel.runtime.process_state import ProcessPart

__all__ = ["Baton", "Outcome", "Released", "current_rank"]

_GRACE_S = 1.0  # until a rank that does not communicate is interrupted
_LAST_GRACE_S = 10.0  # until one that cannot be is left alone
_LOOK_EVERY_S = 1.0


class _Here(threading.local):
    """Which rank of which run this thread is."""

    baton: Baton | None = None
    rank: int | None = None


_here = _Here()


def current_rank() -> int | None:
    """Give the simulated rank that this thread runs, or None outside `simulate`."""
    return _here.rank


class Released(BaseException):
    """Ends a rank that waits for one that failed; no `except Exception` of the user stops it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended: with a value, or an error and its place among all errors."""

    value: Any = None
    error: BaseException | None = None
    order: int = -1


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank's place in the schedule. It can run if it neither waits nor has ended."""

    rank: int
    state: list[Any]
    turn: threading.Lock = field(default_factory=lambda: _taken_lock())
    wait: Wait | None = None
    reply: Any = None
    refusal: BaseException | None = None
    outcome: Outcome | None = None

    def answer(self, stopping: bool) -> Any:
        """Take the reply, raise the refusal, or end with the run that is stopping."""
        self.wait, reply, refusal = None, self.reply, self.refusal
        self.reply = self.refusal = None
        if refusal is not None:
            raise refusal
        if stopping:
            raise Released("at a collective")
        return reply


class Baton:
    """Runs a function once per rank, each in its own thread, one at a time.

    Args:
        size: number of ranks.
        parts: what threads share and ranks must not; each rank has its own, swapped with the baton.
    """

    def __init__(self, size: int, parts: Sequence[ProcessPart] = ()) -> None:
        self.size = size
        self.parts = parts
        self._ranks: list[_Rank] = []
        self._groups: dict[Hashable, list[_Rank]] = {}
        self._failed = 0
        self._stop_early = False
        self._stopping = False
        self._abandoned = False
        self._held: Held | None = None
        self._running: _Rank | None = None
        self._done = _taken_lock()

    def run(self, work: Callable[[], Any], *, stop_early: bool) -> list[Outcome]:
        """Run `work` on every rank and say how each ended.

        Args:
            work: called in each rank's thread, in a copy of the caller's context.
            stop_early: after a rank's error, release the others at their next exchange; else they
                go on as long as they need no rank that failed.

        Returns:
            One outcome for each rank, in rank order.
        """
        self._stop_early = stop_early
        self._ranks = [_Rank(r, [part.fork() for part in self.parts]) for r in range(self.size)]
        threads = [
            threading.Thread(
                target=copy_context().run, args=(self._body, me, work), name=f"rank {me.rank}"
            )
            for me in self._ranks
        ]
        callers: list[Any] | None = None
        try:
            for thread in threads:
                thread.daemon = True
                thread.start()
            callers = self._swap(self._ranks[0].state)
            self._wake(self._ranks[0])
            while not self._done.acquire(timeout=_LOOK_EVERY_S):
                self._look(threads)
        except BaseException:
            self._stop(threads)
            raise
        finally:
            if callers is not None:
                self._swap(callers)
        for thread in threads:
            thread.join()
        outcomes = [me.outcome or Outcome() for me in self._ranks]
        self._ranks = []
        return outcomes

    def exchange(
        self,
        ranks: tuple[int, ...],
        call: Call,
        payload: Any = None,
        *,
        tag: Hashable = None,
        combine: Callable[[list[Any]], Sequence[Any]] | None = None,
    ) -> Any:
        """Meet the other members of a group; the one primitive every collective is made of.

        Args:
            ranks: the group, in the same order on every member.
            call: what every member must agree on.
            payload: what this rank brings.
            tag: tells groups of the same ranks apart.
            combine: makes the members' results of their payloads, both in group order; runs once,
                on the last member to come, while all others wait.

        Returns:
            This member's result, or without `combine` the list of all payloads.

        Raises:
            BackendError: the members disagree, `combine` refused, or a deadlock; on every member.
        """
        me = self._me()
        if self._stopping:
            raise Released(f"in {call}")
        me.wait = Wait(ranks, call, payload, user_line(), inspect.currentframe())
        group = self._groups.setdefault((tag, ranks), [])
        group.append(me)
        if len(group) == len(ranks):
            del self._groups[tag, ranks]
            self._complete([self._ranks[rank] for rank in ranks], combine)
        self._give_up(me)
        return me.answer(self._stopping)

    def _me(self) -> _Rank:
        if _here.rank is None or _here.baton is not self:
            raise BackendError(
                "simulate",
                "a mesh and its collectives must be used on the ranks' own threads, in the run"
                " that made the mesh",
                "Make the mesh inside the simulated function",
                rank=current_rank(),
                thread=threading.current_thread().name,
            )
        return self._ranks[_here.rank]

    def _complete(
        self, members: list[_Rank], combine: Callable[[list[Any]], Sequence[Any]] | None
    ) -> None:
        """Give every member its reply, or every member a refusal with the same text."""
        waits = [member.wait for member in members if member.wait is not None]
        for member in members:
            member.wait = None
        if any(wait.call != waits[0].call for wait in waits):
            said = [wait.said() for wait in waits]
            _refuse(members, mismatch_text("simulate", waits[0].ranks, said))
            return
        payloads = [wait.payload for wait in waits]
        try:
            replies = [list(payloads) for _ in members] if combine is None else combine(payloads)
        except BackendError as error:
            _refuse(members, str(error), error)
        except Exception as error:
            text = describe("simulate", f"{waits[0]} must be possible", f"{error}")
            _refuse(members, text, error)
        else:
            for member, reply in zip(members, replies, strict=True):
                member.reply = reply

    def _body(self, me: _Rank, work: Callable[[], Any]) -> None:
        me.turn.acquire()
        _here.baton, _here.rank = self, me.rank
        try:
            me.outcome = Outcome() if self._stopping else Outcome(work())
        except BaseException as error:
            me.outcome = Outcome(error=error, order=self._failed)
            self._failed += 1
            self._stopping |= self._stop_early
        following = self._following()
        if following is None:
            self._done.release()
        else:
            self._swap(following.state)
            self._wake(following)

    def _give_up(self, me: _Rank) -> None:
        following = self._following()
        if following is not None and following is not me:
            # Kept before the other wakes: it may come back to this rank before this thread goes on.
            me.state = self._swap(following.state)
            self._wake(following)
            me.turn.acquire()

    def _wake(self, rank: _Rank) -> None:
        self._running = rank
        rank.turn.release()

    def _swap(self, state: list[Any]) -> list[Any]:
        if self._abandoned:  # the process's state is the caller's again
            return state
        return [part.swap(own) for part, own in zip(self.parts, state, strict=True)]

    def _following(self) -> _Rank | None:
        """Choose who runs next, telling all of a deadlock; None if every rank has ended."""
        going = [rank for rank in self._ranks if rank.outcome is None]
        if going and not self._stopping and all(rank.wait is not None for rank in going):
            self._report_stuck(going)
        return next((rank for rank in going if rank.wait is None or self._stopping), None)

    def _report_stuck(self, waiting: list[_Rank]) -> None:
        text = deadlock_text([rank.wait for rank in self._ranks])
        for rank in waiting:
            rank.refusal = Released(f"in {rank.wait}") if self._failed else BackendError(text)
            rank.wait = None
        self._groups.clear()

    def _look(self, threads: Sequence[threading.Thread]) -> None:
        """End a run that hangs outside of collectives; see [Note: held properties]."""
        idents = [thread.ident for thread in threads]
        before, held = self._held, find_held(self._running.rank if self._running else 0, idents)
        self._held = held
        if held is None or held != before or self._stopping:
            return
        text = f"a rank must not communicate inside the cached_property {held.name!r}"
        do = "Compute the value before, or use Python 3.12, where such a property has no lock"
        got = {"rank inside": held.holder, "rank that waits for its lock": held.waiting}
        holder = self._ranks[held.holder]
        holder.refusal = BackendError("simulate", text, do, **got)
        self._stopping = True
        holder.turn.release()

    def _stop(self, threads: list[threading.Thread]) -> None:
        """End all ranks after an exception in the caller's thread, such as an interrupt."""
        self._stopping = True
        if self._running is None:
            for rank, thread in zip(self._ranks, threads, strict=True):
                if thread.ident is None:
                    rank.outcome = Outcome()
            following = self._following()
            if following is None:
                return
            self._swap(following.state)
            self._wake(following)
        ended = self._done.acquire(timeout=_GRACE_S)
        if not ended:
            # The running rank computes without any exchange: raise inside it.
            ident = threads[self._running.rank].ident if self._running else None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(ident or 0), ctypes.py_object(Released)
            )
            ended = self._done.acquire(timeout=_LAST_GRACE_S)
            self._abandoned = not ended
        for thread in threads:
            if ended and thread.ident is not None:
                thread.join()


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _refuse(members: list[_Rank], text: str, cause: BaseException | None = None) -> None:
    for member in members:
        member.refusal = BackendError(text)
        member.refusal.__cause__ = cause
