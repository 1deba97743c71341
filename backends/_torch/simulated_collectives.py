# SPDX-License-Identifier: Apache-2.0
"""SimulatedCommunicator: every collective as one exchange and a computation on all payloads.

[Note: fresh results] All members' results are made in one go, while every member waits, and none
shares memory with any member's tensor: a rank may then change in place what is its own.

As on every real backend, all_reduce and broadcast also write into the tensor they are given.
Reductions go in group order, in the tensors' dtype: bitwise equal on all ranks and in all runs.
Booleans add as torch adds them: sum and max are "or", product and min are "and".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.backends._torch.dtypes import COMPLEX, FLOATS, INTS, name_of
from hyper_parallel.backends._torch.refusals import (
    wrong_pieces,
    wrong_rows,
    wrong_sizes,
    wrong_tensor,
)
from hyper_parallel.errors import BackendError, describe
from hyper_parallel.runtime.baton import Baton
from hyper_parallel.runtime.calls import Call, check_parts
from hyper_parallel.runtime.refusals import cannot_reduce

__all__ = ["REDUCES", "SimulatedCommunicator", "SimulatedGroup", "SimulatedWork"]

Tensor = torch.Tensor
Combine = Callable[[list[Any]], list[Any]]

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


_DTYPES = (*FLOATS, *INTS, torch.int16, *COMPLEX, torch.bool)


def _exists(op: str, dtype: torch.dtype) -> bool:
    averages = op != "avg" or dtype.is_floating_point or dtype.is_complex
    return averages and not (dtype.is_complex and op in ("max", "min"))


# What torch adds, on every device: (op, dtype by name).
REDUCES = frozenset((op, name_of(t)) for op in _REDUCTIONS for t in _DTYPES if _exists(op, t))


@dataclass(frozen=True, slots=True)
class SimulatedWork:
    """A collective that is over; the exchange happened when it was called."""

    result: Tensor

    def wait(self) -> Tensor:
        """Give the result."""
        return self.result


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """An ordered group of simulated ranks, as one of them sees it.

    Args:
        ranks: the global ranks, by mesh coordinate.
        serial: which making of a mesh made the group.
        my_rank: the global rank that asked.
    """

    ranks: tuple[int, ...]
    serial: int
    my_rank: int

    def rank(self) -> int:
        """Give the own position in the group; -1 outside it."""
        return self.ranks.index(self.my_rank) if self.my_rank in self.ranks else -1

    def size(self) -> int:
        """Give the number of ranks."""
        return len(self.ranks)


class SimulatedCommunicator:
    """Collectives over one ordered group, as one of its ranks calls them.

    Args:
        baton: the scheduler.
        group: the group, as this rank sees it.
        device_type: where tensors must be.
        reduces: (op, dtype by name) that are not refused.
    """

    def __init__(
        self,
        baton: Baton,
        group: SimulatedGroup,
        *,
        device_type: str,
        reduces: frozenset[tuple[str, str]] = REDUCES,
    ) -> None:
        self.ranks = group.ranks
        self.rank = group.rank()
        self.size = group.size()
        self._baton = baton
        self._serial = group.serial
        self._device_type = device_type
        self._reduces = reduces

    def all_reduce(self, x: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce `x` in place over the group."""
        self._check_op("all_reduce", x, op)

        def combine(xs: list[Tensor]) -> list[Tensor]:
            whole = _reduce(xs, op)
            if len({x.data_ptr() for x in xs}) < len(xs):
                # One object handed to several ranks, which no processes share.
                return [whole.clone() for _ in xs]
            return [x.copy_(whole) for x in xs]

        result = self._meet("all_reduce", x, combine, op=op, shape=tuple(x.shape))
        return SimulatedWork(result) if async_op else result

    def all_gather(self, x: Tensor, *, async_op: bool = False) -> Any:
        """Concatenate equal pieces along dim 0."""
        _check_rows("all_gather", x)
        result = self._meet("all_gather", x, _gather, shape=tuple(x.shape))
        return SimulatedWork(result) if async_op else result

    def all_gather_v(self, x: Tensor, sizes: Sequence[int], *, async_op: bool = False) -> Any:
        """Concatenate pieces of `sizes` rows along dim 0."""
        _check_rows("all_gather_v", x)
        self._check_sizes("all_gather_v", sizes, x.shape[0], sizes[self.rank : self.rank + 1])
        facts = {"sizes": tuple(sizes), "rest": tuple(x.shape[1:])}
        result = self._meet("all_gather_v", x, _gather, **facts)
        return SimulatedWork(result) if async_op else result

    def reduce_scatter(self, x: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce, then keep the own one of n equal pieces of dim 0."""
        _check_rows("reduce_scatter", x)
        if x.shape[0] % self.size:
            raise wrong_rows("reduce_scatter", x, self.size)
        sizes = [x.shape[0] // self.size] * self.size
        result = self._reduce_scatter("reduce_scatter", x, sizes, op)
        return SimulatedWork(result) if async_op else result

    def reduce_scatter_v(
        self, x: Tensor, sizes: Sequence[int], op: str = "sum", *, async_op: bool = False
    ) -> Any:
        """Reduce, then keep the own `sizes[rank]` rows."""
        _check_rows("reduce_scatter_v", x)
        self._check_sizes("reduce_scatter_v", sizes, x.shape[0], sizes)
        result = self._reduce_scatter("reduce_scatter_v", x, sizes, op)
        return SimulatedWork(result) if async_op else result

    def all_to_all_v(
        self,
        x: Tensor,
        send_sizes: Sequence[int],
        recv_sizes: Sequence[int],
        *,
        even: bool = False,
        async_op: bool = False,
    ) -> Any:
        """Send consecutive parts of the 1-d `x`, receive parts in group order, concatenated."""
        del even
        _check_rows("all_to_all_v", x)
        self._check_sizes("all_to_all_v", send_sizes, x.numel(), send_sizes)
        self._check_sizes("all_to_all_v", recv_sizes, None, recv_sizes)

        def combine(brought: list[Any]) -> list[Tensor]:
            check_parts(self.ranks, [one[1] for one in brought], [one[2] for one in brought])
            parts = [part.split(list(send)) for part, send, _ in brought]
            return [torch.cat([row[i] for row in parts]) for i in range(len(parts))]

        payload = (x, tuple(send_sizes), tuple(recv_sizes))
        result = self._meet("all_to_all_v", x, combine, payload=payload)
        return SimulatedWork(result) if async_op else result

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Write the `x` of group index `src` into everyone's `x`."""
        self._check_src("broadcast", src)

        def combine(xs: list[Tensor]) -> list[Tensor]:
            return [x if i == src else x.copy_(xs[src]) for i, x in enumerate(xs)]

        return self._meet("broadcast", x, combine, src=src, shape=tuple(x.shape))

    def scatter(self, out: Tensor, pieces: Sequence[Tensor] | None, src: int = 0) -> Tensor:
        """Fill `out` with the own one of `src`'s equal-sized pieces; others pass None."""
        self._check_src("scatter", src)

        def combine(brought: list[Any]) -> list[Tensor]:
            outs = [own for own, _ in brought]
            _check_pieces([given for _, given in brought], src, outs[0])
            given = torch.stack(list(brought[src][1]))
            return [own.copy_(piece) for own, piece in zip(outs, given, strict=True)]

        payload = (out, pieces)
        return self._meet("scatter", out, combine, payload=payload, src=src, shape=tuple(out.shape))

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Exchange a few host integers."""
        own = tuple(int(value) for value in values)
        call = Call.of("all_gather_ints", count=len(own))
        return self._baton.exchange(self.ranks, call, own, tag=self._serial)

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        self._baton.exchange(self.ranks, Call("barrier"), tag=self._serial)

    def _reduce_scatter(self, name: str, x: Tensor, sizes: Sequence[int], op: str) -> Tensor:
        self._check_op(name, x, op)

        def combine(xs: list[Tensor]) -> list[Tensor]:
            return [piece.clone() for piece in _reduce(xs, op).split(list(sizes))]

        return self._meet(name, x, combine, op=op, sizes=tuple(sizes), shape=tuple(x.shape))

    def _meet(
        self, name: str, x: Tensor, combine: Combine, *, payload: Any = None, **facts: Hashable
    ) -> Tensor:
        """Exchange a contiguous tensor, or a payload with it, and combine without gradients."""
        refused = wrong_tensor(name, x, self._device_type)
        if refused is not None:
            raise refused

        def without_grad(brought: list[Any]) -> list[Any]:
            with torch.no_grad():
                return combine(brought)

        call = Call.of(name, **facts, dtype=str(x.dtype).removeprefix("torch."))
        brought = x if payload is None else payload
        return self._baton.exchange(
            self.ranks, call, brought, tag=self._serial, combine=without_grad
        )

    def _check_op(self, name: str, x: Tensor, op: str) -> None:
        """Refuse an op that does not exist or that the dtype does not have."""
        if (op, name_of(x.dtype)) not in self._reduces:
            raise cannot_reduce(name, x.dtype, op, self._device_type, is_complex=x.is_complex())

    def _check_sizes(
        self, name: str, sizes: Sequence[int], total: int | None, summed: Sequence[int]
    ) -> None:
        whole = total is None or sum(summed) == total
        if len(sizes) != self.size or min(sizes) < 0 or not whole:
            raise wrong_sizes(name, sizes, self.size, rank=self.rank, rows=total)

    def _check_src(self, name: str, src: int) -> None:
        if not 0 <= src < self.size:
            _refuse(name, f"src must be an index into the group {self.ranks}", "Pass one", src=src)


def _reduce(xs: list[Tensor], op: str) -> Tensor:
    whole = xs[0].clone()
    for x in xs[1:]:
        _REDUCTIONS[op](whole, x, out=whole)  # pyright: ignore[reportCallIssue]
    return whole.div_(len(xs)) if op == "avg" else whole


def _gather(xs: list[Tensor]) -> list[Tensor]:
    whole = torch.cat(xs)
    return [whole, *(whole.clone() for _ in xs[1:])]


def _check_rows(name: str, x: Tensor) -> None:
    if x.ndim == 0:
        raise wrong_rows(name, x, 0)


def _check_pieces(given: list[Sequence[Tensor] | None], src: int, out: Tensor) -> None:
    """Refuse pieces that `src` lacks, that another rank has, or that do not fit."""
    for i, one in enumerate(given):
        if (one is not None) != (i == src):
            raise wrong_pieces(one, src, i)
    pieces = given[src] or ()
    fits = all(piece.shape == out.shape and piece.dtype == out.dtype for piece in pieces)
    if len(pieces) != len(given) or not fits:
        _refuse(
            "scatter",
            f"src must pass {len(given)} pieces of out's shape and dtype",
            "Pad the pieces to one shape",
            src=src,
            pieces=[tuple(piece.shape) for piece in pieces],
            out=tuple(out.shape),
        )


def _refuse(name: str, must: str, do: str, **got: object) -> None:
    raise BackendError(describe(name, must, do, **got))
