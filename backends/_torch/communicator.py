# SPDX-License-Identifier: Apache-2.0
"""TorchCommunicator: the collectives of one process group, in the order of mesh coordinates.

[Note: checks] Before a collective starts, each method looks at dtype, contiguity and device, with
one dictionary look-up and two attribute reads. They stay in `all_reduce` too: they cost about
0.3 us of its 15 us or more, and a wrong tensor on one rank would leave the others waiting.

[Note: sorted groups] torch sorts the ranks of a group. Where the mesh lists them in another order,
blocks are put in order by one copy; where it lists them sorted there is no such cost.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from hyper_parallel.backends._torch.dtypes import DtypeSupport
from hyper_parallel.backends._torch.faults import Faults
from hyper_parallel.backends._torch.refusals import (
    no_uneven,
    refused,
    wrong_pieces,
    wrong_rows,
    wrong_tensor,
)
from hyper_parallel.backends._torch.work import TorchWork, then
from hyper_parallel.errors import BackendError, HyperParallelError
from hyper_parallel.runtime.refusals import cannot_reduce

__all__ = ["TorchCommunicator"]

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])
_all_reduce = dist.all_reduce
# 2.13 renamed both and deprecates the old names; the arguments stayed.
_is_new = hasattr(dist, "all_gather_single")
_all_gather = dist.all_gather_single if _is_new else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if _is_new else dist.reduce_scatter_tensor


def _named(method: F) -> F:
    """Turn what torch raises inside a collective into an error that names it and its group."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def run(self: TorchCommunicator, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except HyperParallelError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            given = signature.bind(self, *args, **kwargs).arguments
            raise self.explain(method.__name__, given, error) from error

    return cast(F, run)


class TorchCommunicator:
    """Collectives over one torch process group; see [Note: checks], [Note: sorted groups].

    Args:
        group: the process group; this process is in it.
        ranks: its global ranks by mesh coordinate.
        device_type: where tensors must be.
        dtypes: what the group's library moves and reduces.
        uneven: whether it gathers pieces of different sizes.
    """

    __slots__ = (
        "_device_type", "_faults", "_from_group", "_ints_device", "_moves", "_native", "_on_cpu",
        "_permuted", "_to_group", "_uneven", "_wide", "group", "rank", "ranks", "size",
    )  # fmt: skip

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        device_type: str,
        *,
        dtypes: DtypeSupport,
        uneven: bool,
    ) -> None:
        in_group = dist.get_process_group_ranks(group)
        self.group = group
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self._to_group = tuple(in_group.index(rank) for rank in self.ranks)
        self._from_group = tuple(self.ranks.index(rank) for rank in in_group)
        self._permuted = list(self.ranks) != in_group
        self._device_type = device_type
        self._on_cpu = device_type == "cpu"
        self._native = dtypes.native
        self._wide = dtypes.wide
        self._moves = dtypes.moves
        self._uneven = uneven
        # A group that also serves CPU tensors exchanges host integers without the device.
        on_host = "cpu:" in dist.get_backend_config(group)
        self._ints_device = "cpu" if on_host else device_type
        self._faults = Faults(group, self.ranks, dist.get_rank())

    def all_reduce(self, x: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce `x` in place over the group."""
        native = self._native.get((op, x.dtype))
        if native is None or not x.is_contiguous() or x.is_cpu is not self._on_cpu:
            return self._reduce_wider("all_reduce", x, op, async_op=async_op)
        given = {"op": op, "x": x}
        try:
            work = _all_reduce(x, native, self.group, async_op or self._on_cpu)
            if async_op:
                return TorchWork(self._faults, "all_reduce", given, work, x)
            return self._end(work, x)
        except RuntimeError as error:
            raise self.explain("all_reduce", given, error) from error

    def reduce_scatter(self, x: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce, then keep the own one of n equal pieces of dim 0."""
        native = self._native.get((op, x.dtype))
        if native is None or not x.is_contiguous() or x.is_cpu is not self._on_cpu:
            return self._reduce_wider("reduce_scatter", x, op, async_op=async_op)
        given = {"op": op, "x": x}
        shape = list(x.shape)
        if not shape or shape[0] % self.size:
            raise wrong_rows("reduce_scatter", x, self.size)
        rows = shape[0] = shape[0] // self.size
        out = x.new_empty(shape)
        if self._permuted:
            x = _blocks(x, rows, self._from_group)
        try:
            work = _reduce_scatter(out, x, native, self.group, async_op or self._on_cpu)
            if async_op:
                return TorchWork(self._faults, "reduce_scatter", given, work, out)
            return self._end(work, out)
        except RuntimeError as error:
            raise self.explain("reduce_scatter", given, error) from error

    def all_gather(self, x: Tensor, *, async_op: bool = False) -> Any:
        """Concatenate equal pieces along dim 0 into one tensor."""
        if x.dtype not in self._moves or not x.is_contiguous() or x.is_cpu is not self._on_cpu:
            gathered = self.all_gather(self._wire(x, "all_gather"), async_op=async_op)
            return then(gathered, lambda out: _unwire(out, x.dtype))
        shape = list(x.shape)
        if not shape:
            raise wrong_rows("all_gather", x, self.size)
        rows = shape[0]
        shape[0] = rows * self.size
        out = x.new_empty(shape)
        given = {"x": x}
        try:
            work = _all_gather(out, x, self.group, async_op or self._on_cpu)
            if async_op:
                result = TorchWork(self._faults, "all_gather", given, work, out)
            else:
                result = self._end(work, out)
        except RuntimeError as error:
            raise self.explain("all_gather", given, error) from error
        if self._permuted:
            return then(result, lambda out: _blocks(out, rows, self._to_group))
        return result

    @_named
    def all_gather_v(self, x: Tensor, sizes: Sequence[int], *, async_op: bool = False) -> Any:
        """Concatenate pieces of `sizes` rows along dim 0. Needs the capability `uneven_gather`."""
        if not self._uneven:
            raise no_uneven("all_gather_v", self._device_type)
        wire = self._wire(x, "all_gather_v")
        out = wire.new_empty((sum(sizes), *wire.shape[1:]))
        pieces = out.split(list(sizes))
        parts, given = [pieces[i] for i in self._from_group], {"x": x, "sizes": sizes}
        work = dist.all_gather(parts, wire, group=self.group, async_op=async_op or self._on_cpu)
        result = self._result("all_gather_v", given, work, out, async_op)
        return then(result, lambda out: _unwire(out, x.dtype))

    @_named
    def reduce_scatter_v(
        self, x: Tensor, sizes: Sequence[int], op: str = "sum", *, async_op: bool = False
    ) -> Any:
        """Reduce, then keep the own `sizes[rank]` rows. Needs the capability `uneven_gather`."""
        if not self._uneven:
            raise no_uneven("reduce_scatter_v", self._device_type)
        native = self._native.get((op, x.dtype))
        if native is None or not x.is_contiguous() or x.is_cpu is not self._on_cpu:
            return self._reduce_wider("reduce_scatter_v", x, op, sizes=sizes, async_op=async_op)
        out = x.new_empty((sizes[self.rank], *x.shape[1:]))
        pieces = x.split(list(sizes))
        parts, given = [pieces[i] for i in self._from_group], {"x": x, "sizes": sizes, "op": op}
        work = dist.reduce_scatter(out, parts, native, self.group, async_op or self._on_cpu)
        return self._result("reduce_scatter_v", given, work, out, async_op)

    @_named
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
        wire = self._wire(x, "all_to_all_v")
        # torch turns a list of sizes over some ten times as long as it takes to start the rest.
        even = even and not self._permuted
        send, receive = ([], []) if even else (list(send_sizes), list(recv_sizes))
        if self._permuted:
            parts = wire.split(send)
            wire = torch.cat([parts[i] for i in self._from_group])
            send = [send[i] for i in self._from_group]
            receive = [receive[i] for i in self._from_group]
        out = wire.new_empty((sum(recv_sizes), *wire.shape[1:]))
        given = {"x": x, "send_sizes": send_sizes, "recv_sizes": recv_sizes}
        at_once = async_op or self._on_cpu
        work = dist.all_to_all_single(out, wire, receive, send, self.group, at_once)

        def finish(out: Tensor) -> Tensor:
            if self._permuted:
                parts = out.split(receive)
                out = torch.cat([parts[g] for g in self._to_group])
            return _unwire(out, x.dtype)

        return then(self._result("all_to_all_v", given, work, out, async_op), finish)

    @_named
    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Write the `x` of group index `src` into everyone's `x`."""
        wire = self._wire(x, "broadcast")
        root = self._to_group[src]
        self._end(dist.broadcast(wire, None, self.group, self._on_cpu, group_src=root), wire)
        return x

    @_named
    def scatter(self, out: Tensor, pieces: Sequence[Tensor] | None, src: int = 0) -> Tensor:
        """Fill `out` with the own one of `src`'s equal-sized pieces; others pass None."""
        wire = self._wire(out, "scatter")
        if (pieces is not None) != (self.rank == src):
            raise wrong_pieces(pieces, src, self.rank)
        sent = None
        if pieces is not None:
            sent = [self._wire(pieces[i], "scatter") for i in self._from_group]
        root = self._to_group[src]
        work = dist.scatter(wire, sent, None, self.group, self._on_cpu, group_src=root)
        self._end(work, wire)
        return out

    @_named
    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Exchange a few host integers, over the group's CPU library where it has one."""
        count = len(values)
        mine = torch.tensor(list(values), dtype=torch.int64, device=self._ints_device)
        every = torch.empty(count * self.size, dtype=torch.int64, device=self._ints_device)
        work = _all_gather(every, mine, self.group, every.is_cpu)
        self._end(work, every)
        flat = every.tolist()
        return [tuple(flat[g * count : (g + 1) * count]) for g in self._to_group]

    @_named
    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        if self._on_cpu:
            self._faults.wait(dist.barrier(self.group, async_op=True))
        else:
            device = torch.get_device_module(self._device_type).current_device()
            dist.barrier(self.group, device_ids=[device])

    def _reduce_wider(self, name: str, x: Tensor, op: str, **how: Any) -> Any:
        """Refuse `x`, or reduce what stands in for it and turn the result back."""
        refused = wrong_tensor(name, x, self._device_type)
        if refused is not None:
            raise refused
        reduce = getattr(self, name)
        if x.is_complex() and op in ("sum", "avg"):
            return then(reduce(torch.view_as_real(x), op=op, **how), torch.view_as_complex)
        widened = self._wide.get((op, x.dtype))
        if widened is None:
            raise cannot_reduce(name, x.dtype, op, self._device_type)
        wide_op, dtype = widened
        return then(reduce(x.to(dtype), op=wide_op, **how), lambda out: out.to(x.dtype))

    def _wire(self, x: Tensor, where: str) -> Tensor:
        """Refuse `x`, or view it as what the library moves; rows of dim 0 stay rows."""
        if not x.is_contiguous() or x.is_cpu is not self._on_cpu:
            refused = wrong_tensor(where, x, self._device_type)
            if refused is not None:
                raise refused
        return x if x.dtype in self._moves else x.unsqueeze(-1).view(torch.uint8)

    def _result(
        self, name: str, given: dict[str, Any], work: Any, out: Tensor, async_op: bool
    ) -> Any:
        """Give what waits for `out`, or `out` itself."""
        if async_op:
            return TorchWork(self._faults, name, given, work, out)
        return self._end(work, out)

    def explain(self, name: str, given: Mapping[str, Any], error: Exception) -> BackendError:
        """Give the error of a wrong call, or of one that started and did not complete."""
        wrong = refused(name, given, self, self._device_type)
        return wrong or self._faults.failed(name, given, error)

    def _end(self, work: Any, out: Tensor) -> Tensor:
        """Wait on the host for what it can wait for; see [Note: roll call]."""
        if out.is_cpu:
            self._faults.wait(work)
        return out


def _blocks(x: Tensor, rows: int, order: Sequence[int]) -> Tensor:
    """Copy blocks of `rows` rows of dim 0 into another order."""
    return torch.cat([x.narrow(0, i * rows, rows) for i in order])


def _unwire(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.view(dtype).squeeze(-1)
