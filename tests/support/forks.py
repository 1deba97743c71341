# SPDX-License-Identifier: Apache-2.0
"""Run functions on forked processes that may die: all cases at once, torch imported once.

A case is (function name, world size, arguments) of a test module. The processes of a case have
torchrun's environment variables, and a gloo world of their own. They end at once after the
function, with no farewell, as a process that failed does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

from support.procs import free_port, load_module

__all__ = ["Ended", "run_forked"]

TIMEOUT = 60


class Ended(NamedTuple):
    """How a process ended: what its function returned (None if nothing came), its exit status."""

    result: Any
    status: int


def run_forked(file: str, cases: list[tuple[str, int, list[Any]]]) -> list[list[Ended]]:
    """Run every case; give for each how its ranks ended, by rank."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "support.forks", file, json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return [[Ended(*one) for one in ranks] for ranks in json.loads(done.stdout.splitlines()[-1])]


def main(file: str, cases: list[Any]) -> None:
    """Fork all cases, then print how they ended."""
    module = load_module("forked_tests", file)
    running = []
    for name, world_size, args in cases:
        port = free_port()
        ranks = range(world_size)
        running.append([_fork(getattr(module, name), r, world_size, port, args) for r in ranks])
    print(json.dumps([[_ended(*process) for process in case] for case in running]))


def _fork(fn: Any, rank: int, world_size: int, port: int, args: list[Any]) -> tuple[int, int]:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    status = 1
    try:
        os.write(theirs, json.dumps(fn(rank, *args)).encode())
        status = 0
    finally:
        os._exit(status)


def _ended(pid: int, pipe: int) -> tuple[Any, int]:
    with open(pipe, encoding="utf-8") as stream:
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    return (json.loads(text) if text else None), os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
