# SPDX-License-Identifier: Apache-2.0
"""watch: tell an observer of each collective that this rank issues, whoever issues it.

[Note: watched calls] While somebody watches, the collective methods of all communicators' classes
are wrapped; while nobody does, they are the backend's own, so that watching costs nothing then. A
bound method that was taken before stays what it was. So programs, which keep some, are worked out
anew when watching begins and ends, and others keep the communicator, not its method.

A call is told of once, after it was issued: an asynchronous one before it is waited for, a refused
one never, and what a communicator calls of itself for it not again.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hyper_parallel.runtime.baton import current_rank
from hyper_parallel.runtime.interface import Communicator

__all__ = ["IssuedCollective", "introduce", "tell", "watch"]


@dataclass(frozen=True, slots=True)
class IssuedCollective:
    """One collective that this rank issued.

    Args:
        op: the method of `Communicator`, or the kind of fused matmul.
        axes: the names of the mesh axes of its group; empty where no mesh knows it.
        ranks: the global ranks of its group.
        bytes_in: bytes of what this rank passed in.
        bytes_out: bytes of what it got.
    """

    op: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    bytes_in: int
    bytes_out: int


class _Mesh(Protocol):
    """What is asked of a mesh here."""

    programs: dict[Any, Any]

    def axes_of(self, communicator: Communicator) -> tuple[str, ...]: ...


class _Inside(threading.local):
    """Whether this thread is inside a watched call."""

    value = False


Observer = Callable[[IssuedCollective], None]

_inside = _Inside()
_meshes: weakref.WeakValueDictionary[int, _Mesh] = weakref.WeakValueDictionary()
_classes: dict[type[Any], dict[str, Any]] = {}  # each with what it had, while it is wrapped
_observers: list[tuple[int | None, Observer]] = []  # with the simulated rank that watches


def introduce(communicator: Communicator, mesh: _Mesh) -> None:
    """Note a communicator that a mesh is about to give to others for the first time."""
    _meshes[id(mesh)] = mesh
    kind = type(communicator)
    if kind not in _classes:
        _classes[kind] = {}
        if _observers:
            _wrap(kind)


@contextmanager
def watch(observer: Observer) -> Generator[None, None, None]:
    """Call `observer` for each collective of this rank, on whichever thread, until the block ends.

    Several may watch at a time. Inside `simulate`, each rank watches its own.
    """
    entry = (current_rank(), observer)
    _observers.append(entry)
    try:
        _update()
        yield
    finally:
        _observers.remove(entry)
        _update()


def _update() -> None:
    """Wrap or unwrap what is not as it must be, and forget what programs kept of it."""
    for kind, own in _classes.items():
        if _observers and not own:
            _wrap(kind)
        elif own and not _observers:
            _unwrap(kind)
    for mesh in list(_meshes.values()):
        mesh.programs.clear()


def _wrap(kind: type[Any]) -> None:
    _classes[kind] = {name: vars(kind).get(name) for name in _BYTES if hasattr(kind, name)}
    for name in _classes[kind]:
        setattr(kind, name, _watched(name, getattr(kind, name)))


def _unwrap(kind: type[Any]) -> None:
    for name, own in _classes[kind].items():
        if own is None:  # inherited
            delattr(kind, name)
        else:
            setattr(kind, name, own)
    _classes[kind] = {}


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(getattr(Communicator, name))
    count_bytes = _BYTES[name]

    @functools.wraps(method)
    def run(self: Communicator, *args: Any, **kwargs: Any) -> Any:
        if _inside.value:
            return method(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        moved = count_bytes(self, given.arguments)  # before x is given up
        _inside.value = True
        try:
            result = method(self, *args, **kwargs)
        finally:
            _inside.value = False
        tell(name, self, *moved)
        return result

    return run


def tell(op: str, communicator: Communicator, bytes_in: int, bytes_out: int) -> None:
    """Tell those that watch of a call that was issued."""
    axes = next(filter(None, (mesh.axes_of(communicator) for mesh in list(_meshes.values()))), ())
    call = IssuedCollective(op, axes, communicator.ranks, bytes_in, bytes_out)
    for rank, observer in tuple(_observers):
        if rank == current_rank():
            observer(call)


def _rows(x: Any, num_rows: int) -> int:
    """Give the bytes of so many rows of dim 0."""
    return num_rows * math.prod(x.shape[1:]) * x.itemsize


Given = Mapping[str, Any]

# What a rank passes in and gets, by method: (communicator, arguments) -> bytes in, bytes out.
_BYTES: dict[str, Callable[[Communicator, Given], tuple[int, int]]] = {
    "all_reduce": lambda comm, a: (a["x"].nbytes, a["x"].nbytes),
    "all_gather": lambda comm, a: (a["x"].nbytes, a["x"].nbytes * comm.size),
    "all_gather_v": lambda comm, a: (a["x"].nbytes, _rows(a["x"], sum(a["sizes"]))),
    "reduce_scatter": lambda comm, a: (a["x"].nbytes, a["x"].nbytes // comm.size),
    "reduce_scatter_v": lambda comm, a: (a["x"].nbytes, _rows(a["x"], a["sizes"][comm.rank])),
    "all_to_all_v": lambda comm, a: (a["x"].nbytes, _rows(a["x"], sum(a["recv_sizes"]))),
    "broadcast": lambda comm, a: (a["x"].nbytes * (comm.rank == a["src"]), a["x"].nbytes),
    "scatter": lambda comm, a: (sum(x.nbytes for x in a["pieces"] or ()), a["out"].nbytes),
    "all_gather_ints": lambda comm, a: (8 * len(a["values"]), 8 * len(a["values"]) * comm.size),
    "barrier": lambda comm, a: (0, 0),
}
