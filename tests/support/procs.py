# SPDX-License-Identifier: Apache-2.0
"""Run test functions on N real processes with a gloo world, once or on a pool that stays up.

A test function is at module level. It goes by file and name, so that test modules need not be
importable; arguments and results are pickled. Torch is imported in the processes only.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["ProcessError", "ProcessPool", "dies", "free_port", "load_module", "run_processes"]

GLOO_TIMEOUT = 30
GRACE = 3


class ProcessError(RuntimeError):
    """A rank failed, died or took too long; the text has its traceback."""


def run_processes(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 100, group: bool = True
) -> list[Any]:
    """Run `fn(*args)` on fresh processes; give the results by rank.

    The processes have torchrun's environment variables. `group=False` leaves the default process
    group to `fn`.
    """
    pool = ProcessPool(world_size, group=group)
    try:
        return pool.run(fn, *args, timeout=timeout)
    finally:
        pool.close()


class ProcessPool:
    """N processes that run one function after another in one gloo world.

    They start at the first run, and anew after a function failed or touched the default group.
    """

    def __init__(self, world_size: int, *, group: bool = True) -> None:
        self.world_size = world_size
        self._group = group
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 100) -> list[Any]:
        """Run `fn(*args)` on every process; give the results by rank.

        Raises:
            ProcessError: a rank failed; the text is that of the first, with its traceback.
        """
        if not self._workers:
            self._start()
        task = (fn.__module__, inspect.getsourcefile(fn), fn.__qualname__, pickle.dumps(args))
        results: list[Any] = [None] * self.world_size
        finished = False
        try:
            for _, pipe in self._workers:
                pipe.send(task)
            finished = self._collect(results, time.monotonic() + timeout, fn.__qualname__)
        finally:
            if not finished:
                self.close()
        return results

    def close(self) -> None:
        """End the processes; those that do not end by themselves are killed."""
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, port, self._group), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, results: list[Any], deadline: float, name: str) -> bool:
        """Fill `results`; say whether the processes can go on. Raise the first error."""
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        error: str | None = None
        reusable = True
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload, arg-type]
                ok, value, clean = _receive(pipe)  # type: ignore[arg-type]
                reusable = reusable and clean
                if ok:
                    results[rank] = pickle.loads(value)
                elif error is None:
                    error = f"{name} failed on rank {rank} of {self.world_size}:\n{value}"
                    deadline = min(deadline, time.monotonic() + GRACE)
        if error is None and waiting:
            error = f"{name} did not end in time on ranks {sorted(waiting.values())}"
        if error is not None:
            for process, _ in self._workers:
                process.kill()
            raise ProcessError(error)
        return reusable


def _receive(pipe: Connection) -> tuple[bool, Any, bool]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):  # the latter if it left a task unread
        return False, "the process died", False


def dies(which: int, name: str, tell: Callable[[str], None]) -> None:
    """Tell a name, then end rank `which` without a word; the others sleep."""
    tell(name)
    if os.environ["RANK"] == str(which):
        os._exit(5)
    time.sleep(60)


def free_port() -> int:
    """Give a TCP port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(pipe: Connection, rank: int, world_size: int, port: int, group: bool) -> None:
    """Be one of the processes: run tasks until the pipe closes."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch

    torch.set_num_threads(1)
    if os.environ.get("HYPER_PARALLEL_TEST_DEVICE", "cpu") != "cpu":
        from support.device import use_device

        use_device()
    with _world(group):
        while True:
            try:
                task = pipe.recv()
            except EOFError:
                return
            pipe.send(_run(task))


@contextmanager
def _world(group: bool) -> Iterator[None]:
    import torch.distributed as dist

    try:
        if group:
            dist.init_process_group(_libraries(), timeout=timedelta(seconds=GLOO_TIMEOUT))
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _libraries() -> str:
    """Name the libraries of the default group, as torch does."""
    device = os.environ.get("HYPER_PARALLEL_TEST_DEVICE", "cpu")
    return {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[device]


def _run(task: tuple[str, str, str, bytes]) -> tuple[bool, Any, bool]:
    """Run one task: (True, pickled result, still clean) or (False, traceback, False)."""
    import torch
    import torch.distributed as dist

    before = dist.group.WORLD if dist.is_initialized() else None
    module, file, name, args = task
    try:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fn = _load(module, file, name)
            result = pickle.dumps(fn(*pickle.loads(args)))
    except BaseException:
        return False, traceback.format_exc(), False
    after = dist.group.WORLD if dist.is_initialized() else None
    return True, result, before is after


def _load(module: str, file: str, name: str) -> Callable[..., Any]:
    return getattr(sys.modules.get(module) or load_module(module, file), name)


def load_module(module: str, file: str) -> Any:
    """Import a file under a module name."""
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise
    return loaded
