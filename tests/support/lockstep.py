# SPDX-License-Identifier: Apache-2.0
"""A hostile NumPy backend: one thread per rank, ranks meet inside each collective, no torch.

It takes every freedom the interface grants: all_reduce overwrites the array it was given, fresh
arrays hold garbage, and what the interface forbids (a collective of a non-contiguous array, or not
the same on every rank) fails the test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_parallel.backends.numpy import NumpyOps
from hyper_parallel.core import AbstractMesh
from hyper_parallel.runtime import Capabilities, DeviceMesh, calls, override_backend
from hyper_parallel.runtime.baton import Baton, current_rank

Array = np.ndarray[Any, Any]
Call = tuple[Any, ...]
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


class World:
    """N ranks, each a thread while `run` runs."""

    def __init__(self, size: int, **capabilities: bool) -> None:
        self.capabilities = Capabilities(checks_calls=True, **capabilities)  # by the baton
        self.calls: list[list[Call]] = [[] for _ in range(size)]
        self.baton = Baton(size)

    def run(self, work: Callable[[int, DeviceMesh], Any], mesh: AbstractMesh) -> list[Any]:
        """Call `work(rank, mesh)` on every rank of the world; the first error is raised here."""

        def one() -> Any:
            rank = current_rank()
            assert rank is not None
            backend = LockstepBackend(self, rank)
            with override_backend(backend):
                return work(rank, DeviceMesh.attached(mesh, backend, None))

        outcomes = self.baton.run(one, stop_early=True)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            raise min(failed, key=lambda outcome: outcome.order).error
        return [outcome.value for outcome in outcomes]


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
        agreed = calls.Call.of(call[0], facts=call[1:])
        return self._world.baton.exchange(self.ranks, agreed, value, combine=combine)

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
