# SPDX-License-Identifier: Apache-2.0
"""A hostile NumPy backend: one thread per rank, ranks meet inside each collective, no torch.

It takes every freedom the interface grants: all_reduce overwrites the array it was given, fresh
arrays hold garbage, and what the interface forbids (a collective of a non-contiguous array, or not
the same on every rank) fails the test.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_parallel.backends.numpy import NumpyOps
from hyper_parallel.core import AbstractMesh
from hyper_parallel.runtime import Capabilities, DeviceMesh, override_backend

Array = np.ndarray[Any, Any]
Call = tuple[Any, ...]
TIMEOUT_SECONDS = 100.0  # a loaded machine may stall for a while; pytest stops a test at 120
GARBAGE = 77

_REDUCE: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}


def reduce_all(arrays: Sequence[Array], op: str) -> Array:
    """Reduce in group order."""
    if op == "avg":
        return np.asarray(reduce_all(arrays, "sum") / len(arrays), arrays[0].dtype)
    return np.array(functools.reduce(_REDUCE[op], arrays))


class _Arrival:
    """One rank waiting in a collective."""

    def __init__(self, index: int, call: Call, value: Any) -> None:
        self.index, self.call, self.value = index, call, value
        self.result: Any = None
        self.error: str | None = None
        self.done = threading.Lock()
        self.done.acquire()


class World:
    """N ranks, each a thread while `run` runs."""

    def __init__(self, size: int, **capabilities: bool) -> None:
        self.size = size
        self.capabilities = Capabilities(checks_calls=True, **capabilities)  # by _finish
        self.calls: list[list[Call]] = [[] for _ in range(size)]
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, ...], list[_Arrival]] = {}
        self._ended: set[int] = set()
        self._failed: str | None = None

    def run(self, work: Callable[[int, DeviceMesh], Any], mesh: AbstractMesh) -> list[Any]:
        """Call `work(rank, mesh)` on every rank of the world; the first error is raised here."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def target(rank: int) -> None:
            backend = LockstepBackend(self, rank)
            try:
                with override_backend(backend):
                    results[rank] = work(rank, DeviceMesh.attached(mesh, backend, None))
            except BaseException as error:
                errors.append(error)
                self._leave(rank, error)
            else:
                self._leave(rank, None)

        self._ended.clear()
        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def meet(self, ranks: tuple[int, ...], me: _Arrival, combine: Callable[..., list[Any]]) -> Any:
        """Wait for the group's other ranks; the last to arrive computes everyone's result."""
        with self._lock:
            gone = self._ended.intersection(ranks)
            if gone:
                self._failed = self._failed or f"{me.call}: ranks {sorted(gone)} have ended"
            if self._failed:
                raise AssertionError(self._failed)
            arrived = self._waiting.setdefault(ranks, [])
            arrived.append(me)
            complete = len(arrived) == len(ranks)
            if complete:
                del self._waiting[ranks]
        if complete:
            _finish(arrived, combine)
        if not me.done.acquire(timeout=TIMEOUT_SECONDS):
            raise AssertionError(f"the ranks {ranks} never met in {me.call}")
        if me.error is not None:
            raise AssertionError(me.error)
        return me.result

    def _leave(self, rank: int, error: BaseException | None) -> None:
        """Wake whoever waits for a rank that will not come."""
        with self._lock:
            self._ended.add(rank)
            if error is None and not any(rank in ranks for ranks in self._waiting):
                return
            self._failed = self._failed or f"rank {rank} ended: {error!r}"
            for arrival in (a for arrived in self._waiting.values() for a in arrived):
                arrival.error = self._failed
                arrival.done.release()
            self._waiting.clear()


def _finish(arrived: list[_Arrival], combine: Callable[..., list[Any]]) -> None:
    arrived.sort(key=lambda arrival: arrival.index)
    error: str | None = None
    results: list[Any] = [None] * len(arrived)
    if len({arrival.call for arrival in arrived}) != 1:
        error = f"ranks disagree: {[arrival.call for arrival in arrived]}"
    else:
        try:
            results = combine([arrival.value for arrival in arrived])
        except Exception as caught:
            error = f"{arrived[0].call} failed: {caught!r}"
    for arrival, result in zip(arrived, results, strict=True):
        arrival.error, arrival.result = error, result
        arrival.done.release()


class _Later:
    """A collective in flight that reads its operand as late as it may: when it is waited for."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait


class Group:
    """The collectives of one rank along one axis (a `Communicator`)."""

    def __init__(self, world: World, ranks: tuple[int, ...], me: int, axis: Any) -> None:
        self.ranks, self.size, self.rank = ranks, len(ranks), ranks.index(me)
        self._world, self._me, self._axis = world, me, axis

    def _meet(
        self, call: Call, value: Any, combine: Callable[..., list[Any]], async_op: bool = False
    ) -> Any:
        if async_op:
            return _Later(lambda: self._meet(call, value, combine))
        self._world.calls[self._me].append((self._axis, *call))
        return self._world.meet(self.ranks, _Arrival(self.rank, call, value), combine)

    def all_reduce(self, x: Array, op: str = "sum", *, async_op: bool = False) -> Any:
        _check_given(x)
        self._check_op(op)

        def combine(values: list[Array]) -> list[Array]:
            whole = reduce_all(values, op)
            _overwrite(values)
            return [whole.copy() for _ in values]

        return self._meet(("all_reduce", op, x.shape, x.dtype), x, combine, async_op)

    def all_gather(self, x: Array, *, async_op: bool = False) -> Any:
        _check_given(x)
        return self._meet(("all_gather", x.shape, x.dtype), x, _join, async_op)

    def all_gather_v(self, x: Array, sizes: Sequence[int], *, async_op: bool = False) -> Any:
        assert self._world.capabilities.uneven_gather, "all_gather_v is not available"
        _check_given(x)
        assert x.shape[0] == sizes[self.rank]
        call = ("all_gather_v", x.shape[1:], x.dtype, tuple(sizes))
        return self._meet(call, x, _join, async_op)

    def reduce_scatter(self, x: Array, op: str = "sum", *, async_op: bool = False) -> Any:
        assert x.shape[0] % self.size == 0
        sizes = [x.shape[0] // self.size] * self.size
        return self._scatter_rows("reduce_scatter", x, sizes, op, async_op)

    def reduce_scatter_v(
        self, x: Array, sizes: Sequence[int], op: str = "sum", *, async_op: bool = False
    ) -> Any:
        assert self._world.capabilities.uneven_gather, "reduce_scatter_v is not available"
        return self._scatter_rows("reduce_scatter_v", x, sizes, op, async_op)

    def _scatter_rows(
        self, kind: str, x: Array, sizes: Sequence[int], op: str, async_op: bool
    ) -> Any:
        _check_given(x)
        self._check_op(op)
        assert x.shape[0] == sum(sizes)
        cuts = np.cumsum(sizes)[:-1]

        def combine(values: list[Array]) -> list[Array]:
            whole = reduce_all(values, op)
            return [piece.copy() for piece in np.split(whole, cuts)]

        call = (kind, op, x.shape, x.dtype, tuple(sizes))
        return self._meet(call, x, combine, async_op)

    def all_to_all_v(
        self,
        x: Array,
        send_sizes: Sequence[int],
        recv_sizes: Sequence[int],
        *,
        even: bool = False,
        async_op: bool = False,
    ) -> Any:
        _check_given(x)
        assert x.ndim == 1 and len(x) == sum(send_sizes)
        if even:
            assert len({*send_sizes, *recv_sizes}) == 1

        def combine(values: list[tuple[Array, list[int], list[int]]]) -> list[Array]:
            pieces = [np.split(sent, np.cumsum(sizes)[:-1]) for sent, sizes, _ in values]
            for i, (_, _, wanted) in enumerate(values):
                assert [len(row[i]) for row in pieces] == wanted, "send and receive sizes disagree"
            return [np.concatenate([row[i] for row in pieces]) for i in range(self.size)]

        value = (x, list(send_sizes), list(recv_sizes))
        return self._meet(("all_to_all_v", x.dtype, even), value, combine, async_op)

    def scatter(self, out: Array, pieces: Sequence[Array] | None, src: int = 0) -> Array:
        _check_given(out)
        assert (pieces is not None) == (self.rank == src)
        for piece in pieces or ():
            assert piece.shape == out.shape and piece.flags.c_contiguous
        out[...] = self._meet(
            ("scatter", src, out.shape, out.dtype), pieces, lambda values: list(values[src])
        )
        return out

    def _check_op(self, op: str) -> None:
        known = (*_REDUCE, "avg") if self._world.capabilities.native_avg else tuple(_REDUCE)
        assert op in known, f"{op} is not available"


def _join(pieces: Sequence[Array]) -> list[Array]:
    return [np.concatenate(pieces) for _ in pieces]


def _check_given(x: Array) -> None:
    assert x.flags.c_contiguous, "a collective takes a contiguous array"


def _overwrite(values: Sequence[Array]) -> None:
    """Do what [Note: consumes] allows; a read-only array was not ours to give up."""
    for value in values:
        value[...] = GARBAGE


class LockstepOps(NumpyOps):
    """NumPy's `ArrayOps`; fresh arrays hold garbage, and a view out of range fails."""

    def narrow(self, x: Array, dim: int, start: int, length: int) -> Array:
        assert 0 <= start <= start + length <= x.shape[dim], "narrow out of range"
        return super().narrow(x, dim, start, length)

    def empty(self, shape: Sequence[int], like: Array) -> Array:
        return np.full(tuple(shape), GARBAGE, like.dtype)

    def copy_into(self, dst: Array, src: Array) -> None:
        assert dst.shape == src.shape, "copy_into takes equal shapes"
        super().copy_into(dst, src)


class LockstepBackend:
    """One rank's view of a `World`: as much of `Backend` as a mesh and the executor ask."""

    name = "lockstep"
    device_type = "cpu"

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self.capabilities = world.capabilities
        self.ops = LockstepOps()

    def rank(self) -> int:
        return self._rank

    def communicator(self, mesh: AbstractMesh, handle: Any, axis: int) -> Group:
        del handle
        return Group(self._world, mesh.group_ranks(axis, rank=self._rank), self._rank, axis)

    def joint_communicator(self, mesh: AbstractMesh, axes: tuple[int, ...]) -> Group:
        return Group(self._world, mesh.submesh_ranks(axes, rank=self._rank), self._rank, axes)

    def union_communicator(self, ranks: tuple[int, ...]) -> Group:
        return Group(self._world, ranks, self._rank, "union")
