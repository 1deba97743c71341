# SPDX-License-Identifier: Apache-2.0
"""Worlds: run a function on every rank: in threads, in new processes, or in those that are here."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from hyper_parallel.errors import BackendError
from hyper_parallel.runtime import simulate

__all__ = ["WORLDS", "in_a_world", "run_on_ranks"]

WORLDS = ("simulated", "processes", "here")

# Work is told of each check it begins, so that a process that dies says in which.
Tell = Callable[[str], None]
Work = Callable[..., Any]


def in_a_world() -> bool:
    """Say whether torchrun, or the like, started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_on_ranks(
    work: Work, *args: Any, world: str, ranks: int, device_type: str, timeout: float = 600
) -> list[Any]:
    """Run `work(*args, tell)` on every rank.

    Args:
        work: a function at module level.
        *args: its arguments, which can be pickled.
        world: one of WORLDS.
        ranks: how many ranks; "here" has those that were started.
        device_type: where simulated ranks' arrays live.
        timeout: seconds after which new processes are ended.

    Returns:
        The results by rank; for "here" this rank's only.

    Raises:
        BackendError: no such world, or a process died, failed, or took too long.
    """
    if world == "here":
        return [work(*args, _quiet)]
    if world == "simulated":
        return simulate(ranks, device_type=device_type).run(work, *args, _quiet)
    if world == "processes":
        return _Processes(work, args, ranks).results(time.monotonic() + timeout)
    text = f"world must be one of {WORLDS}"
    raise BackendError("run_conformance", text, "Name one of them", world=world)


def _quiet(_: str) -> None:
    """Tell nobody."""


class _Processes:
    """N processes of this machine, with torchrun's environment variables."""

    def __init__(self, work: Work, args: tuple[Any, ...], ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: dict[Connection, int] = {}
        self._processes: list[Any] = []
        self._at = ["its start"] * ranks
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            variables = _variables(rank, ranks, port)
            process = context.Process(target=_serve, args=(theirs, variables, work, args))
            process.daemon = True
            process.start()
            theirs.close()
            self._pipes[ours] = rank
            self._processes.append(process)

    def results(self, deadline: float) -> list[Any]:
        """Wait for all; end those that are left when one fails."""
        found: dict[int, Any] = {}
        try:
            while waiting := [pipe for pipe, rank in self._pipes.items() if rank not in found]:
                ready = wait(waiting, max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._failed(self._pipes[waiting[0]], "it took too long")
                for pipe in ready:
                    self._read(pipe, found)  # type: ignore[arg-type]
        finally:
            for process in self._processes:
                process.join(0 if len(found) < len(self._processes) else 5)
                process.kill()
        return [found[rank] for rank in sorted(found)]

    def _read(self, pipe: Connection, found: dict[int, Any]) -> None:
        rank = self._pipes[pipe]
        try:
            kind, value = pipe.recv()
        except EOFError:
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            raise self._failed(rank, f"the process died with exit code {code}") from None
        if kind == "failed":
            raise self._failed(rank, value)
        if kind == "at":
            self._at[rank] = value
        else:
            found[rank] = value

    def _failed(self, rank: int, why: str) -> BackendError:
        return BackendError(
            "run_conformance",
            "every rank must come to the end",
            f"Look at this check first: {why}",
            rank=rank,
            check=self._at[rank],
        )


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {**address, **{name: str(value) for name, value in places.items()}}


def _serve(pipe: Connection, variables: dict[str, str], work: Work, args: tuple[Any, ...]) -> None:
    """Be one of the processes."""
    os.environ.update(variables)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        pipe.send(("done", work(*args, lambda text: pipe.send(("at", text)))))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
