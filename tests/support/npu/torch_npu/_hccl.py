# SPDX-License-Identifier: Apache-2.0
"""Backend "hccl": the collectives of npu tensors, over gloo, refusing what HCCL refuses (A2, A3).

[Note: late results] A result is written by `Work.wait`, so what reads it before is wrong, as on a
device. Operands travel as bytes and are reduced here, in the order of ranks.

[Note: lazy communicators] A group's communicator is made by its first collective, which waits for
all members: groups that two ranks first use in different orders wait for each other. `made` lists
the ranks of every communicator, because each costs 400 MB of device memory on an NPU.
"""

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_npu._device import to_host
from torch_npu._formats import Format, get_npu_format

__all__ = ["gathered", "made", "met", "reduced", "register"]

Tensor = torch.Tensor
made: list[tuple[int, ...]] = []

_INTS = (torch.int8, torch.int16, torch.int32, torch.int64)
_REDUCES = {*_INTS, torch.float16, torch.bfloat16, torch.float32}
_BY_INT32 = {torch.bool, torch.uint8}  # in all_reduce and reduce only
_MOVES = {
    *_REDUCES, *_BY_INT32, torch.float64, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip
_NO_PRODUCT = {torch.int16, torch.bfloat16}
_OPS = {0: torch.add, 1: torch.add, 2: torch.mul, 3: torch.minimum, 4: torch.maximum}
_AVG, _PRODUCT = 1, 2
_OTHER_OPS = {5: "BAND", 6: "BOR", 7: "BXOR", 8: "PREMUL_SUM"}

_groups: dict[str, tuple[tuple[int, ...], Any, list[bool]]] = {}
_in_flight: set[Any] = set()


class _Work(dist.Work):
    """A collective in flight; see [Note: late results]."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._finish = work, finish
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        _in_flight.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self in _in_flight:
            self._work.wait()
            self._finish()
            _in_flight.discard(self)
            self._future.set_result(None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self not in _in_flight

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        return self._future


def _refuse(text: str) -> None:
    raise RuntimeError(text)


def _check(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that the group cannot move."""
    for x in tensors:
        if x.device.type != "npu" or x.layout != torch.strided:
            _refuse("Tensors must be NPU and dense")
        if not x.is_contiguous():
            _refuse("Tensors must be contiguous")
        if x.dtype not in _MOVES:
            _refuse("Unsupported data type for HCCL process group")
        if x.storage_offset() and get_npu_format(x) != Format.ND:
            _refuse("For a tensor of internal format, it's storage_offset must be 0")


def _check_op(name: str, x: Tensor, op: int, also: Sequence[torch.dtype] = ()) -> None:
    """Refuse a reduction that HCCL lacks."""
    if op not in _OPS:
        _refuse(f"Cannot use ReduceOp.{_OTHER_OPS[op]} with HCCL")
    if x.dtype not in _REDUCES and x.dtype not in also:
        _refuse(f"HCCL {name}: Unsupported data type {x.dtype}")
    if op == _PRODUCT and x.dtype in _NO_PRODUCT:
        _refuse(f"HCCL function error: {name}, error code is 5 (reduce op PROD with {x.dtype})")


def _joined(group: Any) -> Any:
    """Give the gloo group behind a process group, after its members met once."""
    return met(dist.ProcessGroup.unbox(group).group_name)


def met(name: str) -> Any:
    """Give the gloo group of a name, after its members met once."""
    ranks, gloo, is_met = _groups[name]
    if not is_met:
        is_met.append(True)
        made.append(ranks)
        gloo.barrier().wait()
    return gloo


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def gathered(gloo: Any, x: Tensor) -> tuple[Any, list[Tensor]]:
    """Start an exchange of equal-sized tensors; give the work and what it will fill."""
    sent = _as_bytes(to_host(x)).clone()
    parts = [torch.empty_like(sent) for _ in range(gloo.size())]
    work = gloo.allgather([parts], [sent])
    return work, [part.view(x.dtype).reshape(x.shape) for part in parts]


def reduced(parts: Sequence[Tensor], op: int) -> Tensor:
    """Reduce in the order of ranks; bool and uint8 through int32."""
    dtype = parts[0].dtype
    wide = [part.int() if dtype in _BY_INT32 else part for part in parts]
    whole = wide[0].clone()
    for part in wide[1:]:
        whole = _OPS[op](whole, part)
    if op == _AVG:
        rounding = None if whole.is_floating_point() else "trunc"
        whole = torch.div(whole, len(parts), rounding_mode=rounding)
    return whole.to(dtype)


def _write(x: Tensor, value: Tensor) -> None:
    to_host(x).copy_(value.reshape(x.shape))


def _allreduce(tensors: list[Tensor], group: Any, op: Any, sparse: Any, *_: Any) -> Any:
    (x,) = tensors
    _check(tensors)
    _check_op("allreduce", x, op.op(), tuple(_BY_INT32))
    work, parts = gathered(_joined(group), x)
    return tensors, _Work(work, lambda: _write(x, reduced(parts, op.op()))).boxed()


def _reduce(tensors: list[Tensor], group: Any, op: Any, root: int, *_: Any) -> Any:
    (x,) = tensors
    _check(tensors)
    _check_op("reduce", x, op.op(), tuple(_BY_INT32))
    gloo = _joined(group)
    work, parts = gathered(gloo, x)
    result = _Work(work, lambda: gloo.rank() == root and _write(x, reduced(parts, op.op())))
    return result.boxed()


def _broadcast(tensors: list[Tensor], group: Any, root: int, *_: Any) -> Any:
    (x,) = tensors
    _check(tensors)
    work, parts = gathered(_joined(group), x)
    return tensors, _Work(work, lambda: _write(x, parts[root])).boxed()


def _allgather_base(out: Tensor, x: Tensor, group: Any, *_: Any) -> Any:
    _check([out, x])
    gloo = _joined(group)
    if out.dtype != x.dtype:
        _refuse("output tensor must have the same type as input tensor")
    if out.numel() != x.numel() * gloo.size():
        _refuse("output tensor size must be equal to world_size times input tensor size")
    work, parts = gathered(gloo, x)
    finish = lambda: _write(out, torch.cat([part.reshape(-1) for part in parts]))  # noqa: E731
    return out, _Work(work, finish).boxed()


def _allgather(outs: list[list[Tensor]], tensors: list[Tensor], group: Any, *_: Any) -> Any:
    (pieces,), (x,) = outs, tensors
    _check([*pieces, x])
    gloo = _joined(group)
    largest = max(piece.numel() for piece in pieces)
    padded = x.new_zeros(largest)
    padded[: x.numel()] = x.reshape(-1)
    work, parts = gathered(gloo, padded)

    def finish() -> None:
        for piece, part in zip(pieces, parts, strict=True):
            _write(piece, part[: piece.numel()])

    return outs, _Work(work, finish).boxed()


def _reduce_scatter_base(out: Tensor, x: Tensor, group: Any, op: Any, *_: Any) -> Any:
    _check([out, x])
    _check_op("_reduce_scatter_base", x, op.op())
    gloo = _joined(group)
    if out.dtype != x.dtype:
        _refuse("input tensor must be the same type as the output tensor.")
    if out.numel() * gloo.size() != x.numel():
        _refuse("input tensor must be the same size as output size times world size")
    work, parts = gathered(gloo, x)

    def finish() -> None:
        own = reduced(parts, op.op()).reshape(-1).chunk(gloo.size())[gloo.rank()]
        _write(out, own)

    return out, _Work(work, finish if x.numel() else lambda: None).boxed()


def _reduce_scatter(
    outs: list[Tensor], inputs: list[list[Tensor]], group: Any, op: Any, *_: Any
) -> Any:
    (out,), (pieces,) = outs, inputs
    _check([out, *pieces])
    _check_op("reduce_scatter", out, op.op())
    gloo = _joined(group)
    sizes = [piece.numel() for piece in pieces]
    if len(set(sizes)) > 1 and op.op() == _PRODUCT:
        _refuse("HCCL function error: HcclReduceScatterV, error code is 5 (reduce op PROD)")
    work, parts = gathered(gloo, torch.cat([piece.reshape(-1) for piece in pieces]))

    def finish() -> None:
        _write(out, reduced(parts, op.op()).split(sizes)[gloo.rank()])

    return outs, _Work(work, finish).boxed()


def _alltoall_base(
    out: Tensor, x: Tensor, group: Any, outs: list[int], ins: list[int], *_: Any
) -> Any:
    if not (out.dim() and x.dim()):
        _refuse("Scalar tensors (0-dim tensors) are not supported in alltoall")
    _check([out, x])
    gloo = _joined(group)
    if out.numel() and out.data_ptr() == x.data_ptr():
        _refuse("HCCL function error: sendBuf and recvBuf must be different")
    size = gloo.size()
    if not ins and (x.shape[0] % size or out.shape[0] % size):
        _refuse("Tensor's dim 0 does not divide equally across group size")
    sent, received = _as_bytes(to_host(x)).clone(), torch.empty_like(_as_bytes(to_host(out)))
    work = gloo.alltoall_base(received, sent, _in_bytes(out, outs, size), _in_bytes(x, ins, size))
    return _Work(work, lambda: _write(out, received.view(out.dtype))).boxed()


def _in_bytes(x: Tensor, rows: list[int], size: int) -> list[int]:
    row = x[:1].nbytes if x.shape[0] else 0
    return [count * row for count in rows or [x.shape[0] // size] * size]


def _scatter(outs: list[Tensor], pieces: list[list[Tensor]], group: Any, root: int, *_: Any) -> Any:
    (out,) = outs
    gloo = _joined(group)
    given = pieces[0] if pieces else []
    _check([out, *given])
    row = torch.stack(given) if given else out.new_zeros((gloo.size(), *out.shape))
    work, parts = gathered(gloo, row)
    return outs, _Work(work, lambda: _write(out, parts[root][gloo.rank()])).boxed()


def _barrier(x: Tensor, group: Any, *_: Any) -> Any:
    return _Work(_joined(group).barrier(), lambda: None).boxed()


def _send(tensors: list[Tensor], group: Any, peer: int, tag: int) -> Any:
    _check(tensors)
    work = _joined(group).send([_as_bytes(to_host(tensors[0])).clone()], peer, 0)
    return _Work(work, lambda: None).boxed()


def _recv(tensors: list[Tensor], group: Any, peer: int, tag: int) -> Any:
    (x,) = tensors
    _check(tensors)
    received = torch.empty_like(_as_bytes(to_host(x)))
    work = _joined(group).recv([received], peer, 0)
    return _Work(work, lambda: _write(x, received.view(x.dtype))).boxed()


class _Several:
    """The works of one coalesced call: HCCL runs one collective after another."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = [dist.Work.unbox(work) for work in works]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _allreduce_coalesced(tensors: list[Tensor], group: Any, op: Any, *_: Any) -> Any:
    works = [_allreduce([x], group, op, None)[1] for x in tensors]
    return _Work(_Several(works), lambda: None).boxed()


def _allgather_coalesced(outs: list[Tensor], tensors: list[Tensor], group: Any, *_: Any) -> Any:
    works = [_allgather_base(out, x, group)[1] for out, x in zip(outs, tensors, strict=True)]
    return _Work(_Several(works), lambda: None).boxed()


def _reduce_scatter_coalesced(
    outs: list[Tensor], tensors: list[Tensor], group: Any, op: Any, *_: Any
) -> Any:
    pairs = zip(outs, tensors, strict=True)
    works = [_reduce_scatter_base(out, x, group, op)[1] for out, x in pairs]
    return _Work(_Several(works), lambda: None).boxed()


def _no(name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: _refuse(f"ProcessGroupHCCL does not support {name}")


_KERNELS: dict[str, Callable[..., Any]] = {
    "allreduce_": _allreduce,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "_allgather_base_": _allgather_base,
    "allgather_": _allgather,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_": _reduce_scatter,
    "allreduce_coalesced_": _allreduce_coalesced,
    "allgather_into_tensor_coalesced_": _allgather_coalesced,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    "alltoall_base_": _alltoall_base,
    "scatter_": _scatter,
    "barrier": _barrier,
    "send": _send,
    "recv_": _recv,
    "gather_": _no("gather"),
    "recv_any_source_": _no("recv"),
}


class _ProcessGroup(dist.ProcessGroupGloo):
    """The backend of a group, which a kernel of another library finds by name."""

    group_id = ""

    def get_hccl_comm_name(self, global_rank: int, init_comm: bool = True) -> str:
        if init_comm:
            met(self.group_id)
        return self.group_id if _groups[self.group_id][2] else ""


def _create(options: Any, backend_options: Any) -> Any:
    gloo = _ProcessGroup(options.store, options.group_rank, options.group_size, options.timeout)
    gloo.group_id = options.group_id
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    _groups[options.group_id] = ranks, gloo, []
    return gloo


def register() -> None:
    """Make "hccl" a backend that serves device npu."""
    dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["npu"])
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, "PrivateUse1", allow_override=True)
    _libraries.append(library)


_libraries: list[torch.library.Library] = []
