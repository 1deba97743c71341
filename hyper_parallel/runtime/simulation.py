# SPDX-License-Identifier: Apache-2.0
"""simulate: run a function on N ranks inside this process, one thread each, with no network."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from hyper_parallel.errors import BackendError
from hyper_parallel.runtime.baton import Baton, Outcome, Released, current_rank
from hyper_parallel.runtime.interface import Backend
from hyper_parallel.runtime.registry import override_backend

__all__ = ["SimulatedWorld", "Simulation", "current_rank", "simulate"]

P = ParamSpec("P")
T = TypeVar("T")

# Named as text: this room knows no framework.
_TARGET = "hyper_parallel.backends._torch.simulated:SimulatedBackend"

_one_at_a_time = threading.Lock()


class SimulatedWorld(Backend, Protocol):
    """A backend whose ranks are threads of this process; made anew for each run.

    Its collectives use the exchange of its baton, which also has the framework's process-wide
    state, for each rank to own.
    """

    baton: Baton

    def carry(self) -> Callable[[], AbstractContextManager[None]]:
        """Read the caller's per-thread modes; give what enters them on a rank's thread."""
        ...


@dataclass(frozen=True, slots=True)
class Simulation:
    """N simulated ranks; a decorator, and a runner of functions. Made by `simulate`."""

    world_size: int
    device_type: str | None = None
    seed: int | None = None

    def __call__(self, fn: Callable[P, T]) -> Callable[P, list[T] | None]:
        """Decorate a function: calling it runs it on every rank.

        The signature stays, so that a pytest test keeps its fixtures and parameters; every rank
        gets the same argument objects.

        Args:
            fn: the function.

        Returns:
            A function that gives the ranks' results as `run` does, or None if all are None.
        """

        @functools.wraps(fn)
        def on_every_rank(*args: P.args, **kwargs: P.kwargs) -> list[T] | None:
            results = self.run(fn, *args, **kwargs)
            return None if all(result is None for result in results) else results

        return on_every_rank

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Run a function on every rank.

        Args:
            fn: the function.
            *args: passed on, the same objects to every rank.
            **kwargs: passed on, as `args`.

        Returns:
            What each rank returned, in rank order.

        Raises:
            BackendError: ranks disagree or deadlock, or this is called inside a simulation.
            BaseException: the first error of any rank, as it was raised, with a note of the rank.
        """
        outcomes = self._run(lambda: fn(*args, **kwargs), stop_early=True)
        first = _first_error(outcomes)
        if first is not None:
            error = cast(BaseException, outcomes[first].error)
            _add_note(error, f"on rank {first} of {self.world_size}")
            raise error
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T | BaseException]:
        """Run a function on every rank and raise nothing.

        A rank's error does not stop the others, unless they wait for that rank: then theirs is a
        BackendError that says so.

        Args:
            fn: the function.
            *args: passed on, the same objects to every rank.
            **kwargs: passed on, as `args`.

        Returns:
            What each rank returned or raised, in rank order.
        """
        outcomes = self._run(lambda: fn(*args, **kwargs), stop_early=False)
        first = _first_error(outcomes)
        given: list[T | BaseException] = []
        for outcome in outcomes:
            error = outcome.error
            if isinstance(error, Released) and first is not None:
                error = _left_alone(error, first, cast(BaseException, outcomes[first].error))
            given.append(outcome.value if error is None else error)
        return given

    def _run(self, call: Callable[[], Any], *, stop_early: bool) -> list[Outcome]:
        if current_rank() is not None or not _one_at_a_time.acquire(blocking=False):
            raise BackendError(
                "simulate",
                "only one simulation may run in a process at a time, and none inside another",
                "Call the inner function directly: it already runs on every rank",
                world_size=self.world_size,
                rank=current_rank(),
            )
        try:
            world = _load_world(self.world_size, self.device_type)
            modes = world.carry()

            def work() -> Any:
                with override_backend(world), modes():
                    if self.seed is not None:
                        for part in world.baton.parts:
                            part.seed(self.seed)
                    return call()

            return world.baton.run(work, stop_early=stop_early)
        finally:
            _one_at_a_time.release()


def simulate(
    world_size: int, *, device_type: str | None = None, seed: int | None = None
) -> Simulation:
    """Run functions on N ranks inside this process, deterministically.

    The ranks are threads of which one runs at a time; they switch only inside collectives, in rank
    order. Each rank has its own random states (torch, `random`, NumPy), as processes have.

    Args:
        world_size: number of ranks.
        device_type: where the ranks' tensors live; default: the framework's default device.
        seed: seeds every rank alike; default: each starts from the caller's state.

    Returns:
        A decorator, which also has `run(fn, *args)` and `outcomes(fn, *args)`.

    Raises:
        BackendError: world_size is not a positive int, or that device cannot be used here.

    Example:
        >>> from hyper_parallel import DeviceMesh, simulate
        >>> @simulate(2)
        ... def places():
        ...     return DeviceMesh("cpu", [1, 0]).get_local_rank()
        >>> places()
        [1, 0]
    """
    if type(world_size) is not int or world_size < 1:
        raise BackendError(
            "simulate",
            "world_size must be a positive int",
            "Write @simulate(4) or simulate(4).run(fn)",
            world_size=world_size,
        )
    return Simulation(world_size, device_type, seed)


def _load_world(world_size: int, device_type: str | None) -> SimulatedWorld:
    module, _, name = _TARGET.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise BackendError(
            "simulate", "torch must be importable", f"Install torch ({error})"
        ) from error
    return made(world_size, device_type)


def _first_error(outcomes: list[Outcome]) -> int | None:
    """Find the rank whose error came first; of ranks with the same error, the lowest."""
    failed = [
        (outcome.order, rank, outcome.error)
        for rank, outcome in enumerate(outcomes)
        if outcome.error is not None and not isinstance(outcome.error, Released)
    ]
    if not failed:
        return None
    first = min(failed, key=lambda one: one[0])[2]
    alike = type(first), str(first)
    return min(rank for _, rank, error in failed if (type(error), str(error)) == alike)


def _left_alone(released: Released, rank: int, error: BaseException) -> BackendError:
    told = BackendError(
        "simulate",
        "a rank that others wait for must not fail",
        f"Look at rank {rank}'s error; this rank waited {released}",
        **{f"rank {rank}": error},
    )
    told.__cause__ = error
    return told


def _add_note(error: BaseException, note: str) -> None:
    """Add a note, which Python shows from 3.11 on; before, the error only carries it."""
    notes: list[str] = [*getattr(error, "__notes__", ()), note]
    setattr(error, "__notes__", notes)  # noqa: B010  # unknown to typeshed for 3.10
