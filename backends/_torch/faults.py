# SPDX-License-Identifier: Apache-2.0
"""Faults: how a wait for a rank that left ends, and what its error says.

[Note: roll call] A rank whose collective failed writes into the group's store what it was doing,
and reads what the others wrote. Ranks still inside the library look for such a report every half
second, so a loss that only the neighbours of the lost rank notice reaches all. Who has not written
after two seconds is missing. The store may live in rank 0's process: rank 0 stays until those that
wrote have read, and if the store does not answer, it is rank 0 that left.

This needs waits that return, as gloo's do. NCCL and HCCL end the process in a watchdog instead.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hyper_parallel.errors import BackendError, describe
from hyper_parallel.runtime.calls import Call, Said, mismatch_text
from hyper_parallel.runtime.checked import announced

__all__ = ["Faults"]

LOOK_EVERY = timedelta(seconds=0.5)
GRACE_S = 2.0

_KEY = "hyper_parallel/fault"
_NOT_YET = "Operation timed out"
# What torch and gloo say when a peer or a link is lost; other errors are this rank's own.
_LOST = (
    "gloo/transport",
    "gave this collective up",
    "timed out",
    "Timed out",
    "Connection closed",
    "Connection reset",
    "Broken pipe",
)


class Faults:
    """Waits of one group of ranks that end with an error if one of them is lost.

    Args:
        group: the process group.
        ranks: its global ranks by mesh coordinate.
        rank: this process's global rank.
    """

    __slots__ = ("_group", "_rank", "_ranks")

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int) -> None:
        self._group = group
        self._ranks = ranks
        self._rank = rank

    def wait(self, work: Any) -> None:
        """Wait on the host for a collective of CPU tensors; see [Note: roll call]."""
        while True:
            try:
                work.wait(LOOK_EVERY)
                return
            except RuntimeError as error:
                if _NOT_YET not in str(error):
                    raise
                if self._alarm():
                    raise RuntimeError("another rank gave this collective up") from error

    def failed(self, name: str, given: Mapping[str, Any], error: Exception) -> BackendError:
        """Give the error of a collective that did not complete; if a peer was lost, who it was."""
        call = announced() or Call.to(name, given)
        said = Said.here(call)
        lost = any(text in str(error) for text in _LOST)
        heard = self._roll_call(said) if lost else {}
        calls = [heard[rank][1] for rank in self._ranks if rank in heard] if heard else []
        if len(calls) == len(self._ranks) and any(one.call != calls[0].call for one in calls):
            return BackendError(mismatch_text(call.name, self._ranks, calls))
        missing, do = self._missing(heard, lost)
        got: dict[str, object] = {"group": self._ranks, "rank": self._rank, "missing": missing}
        text = describe(
            call.name,
            "every rank of the group must take part, with the same shape and dtype",
            do,
            **{name: value for name, value in got.items() if value is not None},
            call=str(said),
            error=str(error).strip().split("\n")[0],
        )
        return BackendError(text)

    def _missing(
        self, heard: dict[int, tuple[float, Said]] | None, lost: bool
    ) -> tuple[tuple[int, ...] | None, str]:
        """Name the ranks that are missing, if that is known, and say what to do."""
        do = "Look for the first error of the other ranks: one may have died, or called another"
        if not lost:
            return None, f"{do} collective"
        if heard is None:
            if not self._follows_rank_0():
                return None, f"{do} collective; the store by which ranks report does not answer"
            return (0,), "Look for the first error of rank 0: it left, and its store with it"
        missing = tuple(rank for rank in self._ranks if rank not in heard)
        if missing:
            word, they = ("rank", "it") if len(missing) == 1 else ("ranks", "they")
            who = (
                f"{word} {', '.join(map(str, missing))}: {they} left, or did not come to this call"
            )
            return missing, f"Look for the first error of {who}"
        times = sorted((at, rank) for rank, (at, _) in heard.items())
        last, after = times[-1][1], times[-1][0] - times[0][0]
        return (), (
            f"All ranks came, rank {last} {after:.1f} s after the first gave up: it was late, or a"
            " link failed. Raise the timeout of the process group if such delays are normal"
        )

    def _roll_call(self, said: Said) -> dict[int, tuple[float, Said]] | None:
        """Tell what this rank was doing; give what each rank told and when, None without store."""
        try:
            store = self._group.get_group_store()
            keys = {rank: f"{_KEY}/{rank}" for rank in self._ranks}
            store.set(keys[self._rank], json.dumps([time.time(), said.packed()]))
            store.set(_KEY, "raised")
            _await(store, list(keys.values()))
            told = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
            store.set(f"{_KEY}/read/{self._rank}", "")
            if self._rank == 0:
                _await(store, [f"{_KEY}/read/{rank}" for rank in told])
        except RuntimeError:
            return None
        heard = {rank: json.loads(text) for rank, text in told.items()}
        return {rank: (at, Said.unpacked(packed)) for rank, (at, packed) in heard.items()}

    def _alarm(self) -> bool:
        """Say whether another rank has failed in this group, or took the store away."""
        try:
            return self._group.get_group_store().check([_KEY])
        except RuntimeError:
            return self._follows_rank_0()

    def _follows_rank_0(self) -> bool:
        """Say whether a store that does not answer means that rank 0 of this group has left."""
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return 0 in self._ranks and self._rank != 0 and not agents


def _await(store: Any, keys: list[str]) -> None:
    """Wait until all keys are there, or the grace is over (the store's own wait warns)."""
    until = time.monotonic() + GRACE_S
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(0.02)
