# SPDX-License-Identifier: Apache-2.0
"""SimulatedCommunicator: every collective as one exchange and a computation on all payloads.

[Note: fresh results] All members' results are made in one go, while every member waits, and none
shares memory with any member's tensor: a rank may then change in place what is its own.

As on every real backend, all_reduce and broadcast also write into the tensor they are given.
Reductions go in group order, in the tensors' dtype: bitwise equal on all ranks and in all runs.
Booleans add as torch adds them: sum and max are "or", product and min are "and".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.backends._torch.dtypes import COMPLEX, FLOATS, INTS, name_of
from hyper_parallel.backends._torch.refusals import refused, wrong_pieces
from hyper_parallel.errors import BackendError
from hyper_parallel.runtime.baton import Baton
from hyper_parallel.runtime.calls import Call, check_parts
from hyper_parallel.runtime.refusals import cannot_reduce

__all__ = ["REDUCES", "SimulatedCommunicator", "SimulatedGroup", "SimulatedWork"]

Tensor = torch.Tensor
Given = Mapping[str, Any]
Combine = Callable[[list[Given]], list[Any]]

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
        return self._meet("all_reduce", {"x": x, "op": op}, _all_reduce, async_op)

    def all_gather(self, x: Tensor, *, async_op: bool = False) -> Any:
        """Concatenate equal pieces along dim 0."""
        return self._meet("all_gather", {"x": x}, _gather, async_op)

    def all_gather_v(self, x: Tensor, sizes: Sequence[int], *, async_op: bool = False) -> Any:
        """Concatenate pieces of `sizes` rows along dim 0."""
        return self._meet("all_gather_v", {"x": x, "sizes": sizes}, _gather, async_op)

    def reduce_scatter(self, x: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce, then keep the own one of n equal pieces of dim 0."""
        return self._meet("reduce_scatter", {"x": x, "op": op}, _reduce_scatter, async_op)

    def reduce_scatter_v(
        self, x: Tensor, sizes: Sequence[int], op: str = "sum", *, async_op: bool = False
    ) -> Any:
        """Reduce, then keep the own `sizes[rank]` rows."""
        given = {"x": x, "sizes": sizes, "op": op}
        return self._meet("reduce_scatter_v", given, _reduce_scatter, async_op)

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
        given = {"x": x, "send_sizes": send_sizes, "recv_sizes": recv_sizes}
        return self._meet("all_to_all_v", given, self._all_to_all, async_op)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Write the `x` of group index `src` into everyone's `x`."""
        return self._meet("broadcast", {"x": x, "src": src}, _broadcast)

    def scatter(self, out: Tensor, pieces: Sequence[Tensor] | None, src: int = 0) -> Tensor:
        """Fill `out` with the own one of `src`'s equal-sized pieces; others pass None."""
        return self._meet("scatter", {"out": out, "pieces": pieces, "src": src}, _scatter)

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Exchange a few host integers."""
        own = tuple(int(value) for value in values)
        call = Call.to("all_gather_ints", {"values": own})
        return self._baton.exchange(self.ranks, call, own, tag=self._serial)

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        self._baton.exchange(self.ranks, Call("barrier"), tag=self._serial)

    def _meet(self, name: str, given: Given, combine: Combine, async_op: bool = False) -> Any:
        """Refuse a wrong call; else exchange what is given, and combine it without gradients."""
        wrong = refused(name, given, self, self._device_type)
        if wrong is not None:
            raise wrong
        if "op" in given and (given["op"], name_of(given["x"].dtype)) not in self._reduces:
            raise cannot_reduce(name, given["x"].dtype, given["op"], self._device_type)

        def without_grad(brought: list[Given]) -> list[Any]:
            with torch.no_grad():
                return combine(brought)

        result = self._baton.exchange(
            self.ranks, Call.to(name, given), given, tag=self._serial, combine=without_grad
        )
        return SimulatedWork(result) if async_op else result

    def _all_to_all(self, brought: list[Given]) -> list[Tensor]:
        send, receive = ([one[way] for one in brought] for way in ("send_sizes", "recv_sizes"))
        check_parts(self.ranks, send, receive)
        parts = [one["x"].split(list(one["send_sizes"])) for one in brought]
        return [torch.cat([row[i] for row in parts]) for i in range(len(parts))]


def _all_reduce(brought: list[Given]) -> list[Tensor]:
    xs: list[Tensor] = [one["x"] for one in brought]
    whole = _reduced(brought)
    if len({x.data_ptr() for x in xs}) < len(xs):
        # One object handed to several ranks, which no processes share.
        return [whole.clone() for _ in xs]
    return [x.copy_(whole) for x in xs]


def _reduce_scatter(brought: list[Given]) -> list[Tensor]:
    whole = _reduced(brought)
    sizes = brought[0].get("sizes", [whole.shape[0] // len(brought)] * len(brought))
    return [piece.clone() for piece in whole.split(list(sizes))]


def _reduced(brought: list[Given]) -> Tensor:
    op, whole = brought[0]["op"], brought[0]["x"].clone()
    for one in brought[1:]:
        _REDUCTIONS[op](whole, one["x"], out=whole)  # pyright: ignore[reportCallIssue]
    return whole.div_(len(brought)) if op == "avg" else whole


def _gather(brought: list[Given]) -> list[Tensor]:
    whole = torch.cat([one["x"] for one in brought])
    return [whole, *(whole.clone() for _ in brought[1:])]


def _broadcast(brought: list[Given]) -> list[Tensor]:
    src = brought[0]["src"]
    whole = brought[src]["x"]
    return [one["x"] if i == src else one["x"].copy_(whole) for i, one in enumerate(brought)]


def _scatter(brought: list[Given]) -> list[Tensor]:
    """Give each its piece; refuse pieces that `src` lacks, another has, or that do not fit."""
    src, out = brought[0]["src"], brought[0]["out"]
    for i, one in enumerate(brought):
        if (one["pieces"] is not None) != (i == src):
            raise wrong_pieces(one["pieces"], src, i)
    pieces = brought[src]["pieces"]
    fits = all(piece.shape == out.shape and piece.dtype == out.dtype for piece in pieces)
    if len(pieces) != len(brought) or not fits:
        raise BackendError(
            "scatter",
            f"src must pass {len(brought)} pieces of out's shape and dtype",
            "Pad the pieces to one shape",
            src=src,
            pieces=[tuple(piece.shape) for piece in pieces],
            out=tuple(out.shape),
        )
    given = torch.stack(list(pieces))
    return [one["out"].copy_(piece) for one, piece in zip(brought, given, strict=True)]
