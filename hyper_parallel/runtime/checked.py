# SPDX-License-Identifier: Apache-2.0
"""Checked mode: before each collective the ranks of its group compare what they are about to call.

[Note: checked mode] A library that is given unlike calls hangs, ends the process, or adds up the
wrong bytes. Here each call is first told to the group as one fingerprint (a checksum of collective,
op, shape, dtype, source and sizes); where those differ the calls themselves are exchanged, and
every rank raises the first difference. Fingerprints travel as host integers, on the CPU library
where the group has one; so a rank that never comes is an error there too, and not a watchdog's.
"""

from __future__ import annotations

import functools
import inspect
import os
import zlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from hyper_parallel.errors import BackendError
from hyper_parallel.runtime.calls import Call, Said, check_parts, mismatch_text
from hyper_parallel.runtime.interface import Communicator

__all__ = ["CheckedCommunicator", "announced", "wants_checks"]

_VARIABLE = "HYPER_PARALLEL_CHECK"
_announced: ContextVar[Call | None] = ContextVar("announced", default=None)


def wants_checks(check: bool | None) -> bool:
    """Say whether checked mode is on: as the argument says, else as HYPER_PARALLEL_CHECK does.

    Raises:
        BackendError: the variable is neither 0 nor 1.
    """
    if check is not None:
        return check
    found = os.environ.get(_VARIABLE, "")
    if found not in ("", "0", "1"):
        raise BackendError(
            "init_device_mesh",
            f"{_VARIABLE} must be 0 or 1",
            "Set it to 1 on every rank, or on none",
            **{_VARIABLE: found},
        )
    return found == "1"


def announced() -> Call | None:
    """Give the call whose fingerprint this thread is exchanging, or None."""
    return _announced.get()


def _checked(name: str) -> Callable[..., Any]:
    """Make the method that compares a call and then makes it."""
    protocol = getattr(Communicator, name)
    signature = inspect.signature(protocol)

    @functools.wraps(protocol)
    def run(self: CheckedCommunicator, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        call = Call.to(name, given.arguments)
        token = _announced.set(call)
        try:
            self.compare(call)
            if dict(call.facts).get("parts") == (self.size, self.size):
                self.compare_parts(given.arguments["send_sizes"], given.arguments["recv_sizes"])
        finally:
            _announced.reset(token)
        return getattr(self.inner, name)(*args, **kwargs)

    return run


class CheckedCommunicator:
    """A communicator that compares each call over the group first; see [Note: checked mode].

    Args:
        inner: the communicator that makes the calls.
    """

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.ranks = inner.ranks
        self.rank = inner.rank
        self.size = inner.size

    all_reduce = _checked("all_reduce")
    all_gather = _checked("all_gather")
    all_gather_v = _checked("all_gather_v")
    reduce_scatter = _checked("reduce_scatter")
    reduce_scatter_v = _checked("reduce_scatter_v")
    all_to_all_v = _checked("all_to_all_v")
    broadcast = _checked("broadcast")
    scatter = _checked("scatter")
    all_gather_ints = _checked("all_gather_ints")
    barrier = _checked("barrier")

    def compare(self, call: Call) -> None:
        """Compare one call over the group.

        Raises:
            BackendError: the first difference, on every rank alike.
        """
        mine = zlib.crc32(str(call).encode())
        if len(set(self.inner.all_gather_ints([mine]))) > 1:
            said = [Said.unpacked(text) for text in self._all_gather_text(Said.here(call).packed())]
            raise BackendError(mismatch_text(said[0].call.name, self.ranks, said))

    def compare_parts(self, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> None:
        """Compare what each rank sends with what its peers expect.

        Raises:
            BackendError: a pair of ranks that disagrees, on every rank alike.
        """
        every = self.inner.all_gather_ints([*send_sizes, *recv_sizes])
        send, receive = ([row[: self.size] for row in every], [row[self.size :] for row in every])
        check_parts(self.ranks, send, receive)

    def _all_gather_text(self, text: str) -> list[str]:
        codes = list(text.encode())
        longest = max(count for (count,) in self.inner.all_gather_ints([len(codes)]))
        padded = [*codes, *[0] * (longest - len(codes))]
        return [bytes(one).rstrip(b"\0").decode() for one in self.inner.all_gather_ints(padded)]
