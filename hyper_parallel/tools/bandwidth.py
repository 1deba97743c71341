# SPDX-License-Identifier: Apache-2.0
"""Bandwidth: how fast each collective is in the world this process belongs to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyper_parallel.runtime import DeviceMesh

__all__ = ["Speed", "measure"]

SIZES = (64 << 10, 1 << 20, 16 << 20)  # bytes of the whole array
CALLS, BURSTS = 5, 3
_ITEM = 4  # bytes of an int32, which every library reduces


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one collective was.

    Args:
        collective: its name.
        bytes: of the whole array: what all_gather gives, what the others take.
        seconds: for one call, the least of several bursts, on the slowest rank.
        gigabytes_per_second: of the link ("bus bandwidth"): the bytes that each rank must send at
            least, by the seconds. An all-reduce sends 2 (n - 1) / n of the array.
    """

    collective: str
    bytes: int
    seconds: float
    gigabytes_per_second: float


def measure(mesh: DeviceMesh) -> list[Speed]:
    """Measure the collectives of a mesh of one axis.

    Args:
        mesh: the mesh; all its ranks call this.

    Returns:
        One row for each collective and size, alike on all ranks. With one rank nothing crosses a
        link, so there only the seconds say something.

    Communicates:
        Each collective some twenty times, up to 16 MiB.
    """
    comm, ops = mesh.communicator(0), mesh.backend.ops
    like = _on_device(mesh)
    n = comm.size
    rows: list[Speed] = []
    for size in SIZES:
        numel = size // _ITEM // n * n
        whole, part = ops.identity((numel,), "sum", like), ops.identity((numel // n,), "sum", like)
        even = [numel // n] * n
        calls: dict[str, tuple[Callable[[], Any], float]] = {
            "all_reduce": (lambda w=whole: comm.all_reduce(w), 2 * (n - 1) / n),
            "reduce_scatter": (lambda w=whole: comm.reduce_scatter(w), (n - 1) / n),
            "all_gather": (lambda p=part: comm.all_gather(p), (n - 1) / n),
            "all_to_all": (lambda w=whole, e=even: comm.all_to_all_v(w, e, e), (n - 1) / n),
            "broadcast": (lambda w=whole: comm.broadcast(w), float(n > 1)),
        }
        for name, (call, share) in calls.items():
            seconds = _seconds(comm, call)
            speed = share * numel * _ITEM / seconds / 1e9
            rows.append(Speed(name, numel * _ITEM, seconds, speed))
    return rows


def _on_device(mesh: DeviceMesh) -> Any:
    """Give an array of the framework's integers on the backend's device."""
    index = mesh.backend.index_array(mesh)
    return index.to(mesh.backend.device()) if hasattr(index, "to") else index


def _seconds(comm: Any, call: Callable[[], Any]) -> float:
    call()
    best = float("inf")
    for _ in range(BURSTS):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        comm.barrier()  # a device is done, too
        best = min(best, (time.perf_counter() - start) / CALLS)
    return max(n for (n,) in comm.all_gather_ints([round(best * 1e9)])) / 1e9
