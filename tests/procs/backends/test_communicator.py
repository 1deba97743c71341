# SPDX-License-Identifier: Apache-2.0
"""Every method of TorchCommunicator on real gloo groups, against the same reduction done here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.backends._torch.communicator import TorchCommunicator
from hyper_parallel.errors import BackendError
from hyper_parallel.runtime import DeviceMesh, init_device_mesh
from support.device import DEVICE, DTYPE

DTYPES = (DTYPE, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool)
# Ascending, torch's own order; not ascending; a part of the world (ranks outside take part in
# making the mesh only); rows of a mesh whose ranks are in no order.
MESHES = ([0, 1, 2, 3], [2, 0, 3, 1], [3, 0], [[3, 1], [2, 0]], [[0, 1], [2, 3]])
REDUCE = {
    "sum": lambda stack: stack.any(0) if stack.dtype == torch.bool else stack.sum(0),
    "product": lambda stack: stack.all(0) if stack.dtype == torch.bool else stack.prod(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "avg": lambda stack: stack.mean(0),
}


def data(rank: int, dtype: torch.dtype, rows: int = 4) -> torch.Tensor:
    return ((torch.arange(rows * 3).reshape(rows, 3) * (rank + 2) + rank) % 5).to(dtype)


def expected(ranks: tuple[int, ...], dtype: torch.dtype, op: str, rows: int) -> torch.Tensor:
    stack = torch.stack([data(rank, dtype, rows) for rank in ranks])
    return REDUCE[op](stack).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Compare bits too: a bool that holds a 2 is no True."""
    as_bytes = got.contiguous().view(torch.uint8) if got.dtype == torch.bool else got
    wanted = want.contiguous().view(torch.uint8) if want.dtype == torch.bool else want
    return got.dtype == want.dtype and torch.equal(as_bytes, wanted) and got.is_contiguous()


def communicators(ranks: Any) -> list[Any]:
    mesh = DeviceMesh(DEVICE, ranks)
    if mesh.get_coordinate() is None:
        return []
    return [mesh.communicator(axis) for axis in range(mesh.ndim)]


def reduces(ranks: Any) -> list[str]:
    bad = []
    for comm in communicators(ranks):
        me = comm.ranks[comm.rank]
        for dtype in DTYPES:
            for op in REDUCE:
                if op == "avg" and not dtype.is_floating_point:
                    continue
                rows = 3 * comm.size
                whole = expected(comm.ranks, dtype, op, rows)
                mine = whole[3 * comm.rank : 3 * comm.rank + 3]
                given = data(me, dtype, rows)
                got = {
                    "all_reduce": (comm.all_reduce(given.clone(), op), whole),
                    "async": (comm.all_reduce(given.clone(), op, async_op=True).wait(), whole),
                    "scatter": (comm.reduce_scatter(given.clone(), op), mine),
                    "async scatter": (
                        comm.reduce_scatter(given.clone(), op, async_op=True).wait(),
                        mine,
                    ),
                }
                bad += [f"{k} {op} {dtype}" for k, (x, y) in got.items() if not same(x, y)]
    return bad


@pytest.mark.parametrize("ranks", MESHES, ids=str)
def test_reduce_every_dtype_and_op(procs4: Any, ranks: Any) -> None:
    assert procs4.run(reduces, ranks) == [[]] * 4


def moves(ranks: Any) -> list[str]:
    bad = []
    dtypes = (*DTYPES, torch.uint16, torch.float8_e4m3fn, torch.complex64)
    for comm in communicators(ranks):
        me, n = comm.ranks[comm.rank], comm.size
        for dtype in dtypes:
            whole = torch.cat([data(rank, dtype) for rank in comm.ranks])
            flat = torch.cat([data(rank, dtype).view(-1)[:2] for rank in comm.ranks])
            pieces = [data(10 + i, dtype) for i in range(n)] if comm.rank == n - 1 else None
            out = torch.empty(4, 3, dtype=dtype)
            got = {
                "gather": (comm.all_gather(data(me, dtype)), whole),
                "gather 1d": (comm.all_gather(data(me, dtype).view(-1)[:2]), flat),
                "async": (comm.all_gather(data(me, dtype), async_op=True).wait(), whole),
                "broadcast": (comm.broadcast(data(me, dtype), 1), data(comm.ranks[1], dtype)),
                "scatter": (comm.scatter(out, pieces, n - 1), data(10 + comm.rank, dtype)),
            }
            for name, (x, y) in got.items():
                if not same(x.view(torch.uint8), y.view(torch.uint8)):
                    bad.append(f"{name} {dtype}")
    return bad


@pytest.mark.parametrize("ranks", MESHES, ids=str)
def test_move_every_dtype(procs4: Any, ranks: Any) -> None:
    assert procs4.run(moves, ranks) == [[]] * 4


def exchanges(ranks: Any, dtype: torch.dtype) -> list[str]:
    """Rank index i sends (i + 2 * j) % 3 entries to index j: some parts are empty."""
    bad = []
    for comm in communicators(ranks):
        n, i = comm.size, comm.rank
        send = [(i + 2 * j) % 3 for j in range(n)]
        receive = [(j + 2 * i) % 3 for j in range(n)]
        sent = [torch.full((size,), 10 * i + j).to(dtype) for j, size in enumerate(send)]
        want = [torch.full((size,), 10 * j + i).to(dtype) for j, size in enumerate(receive)]
        got = comm.all_to_all_v(torch.cat(sent), send, receive)
        if not same(got, torch.cat(want)):
            bad.append(f"{comm.ranks}: {got.tolist()} is not {torch.cat(want).tolist()}")
        nothing = comm.all_to_all_v(torch.empty(0), [0] * n, [0] * n)
        bad += [] if nothing.shape == (0,) else ["empty"]
        if comm.all_gather_ints([comm.ranks[i], -i]) != [(r, -j) for j, r in enumerate(comm.ranks)]:
            bad.append("ints")
        comm.barrier()
    return bad


@pytest.mark.parametrize("dtype", (torch.float32, torch.int64, torch.int16), ids=str)
@pytest.mark.parametrize("ranks", MESHES, ids=str)
def test_all_to_all_v_uneven_and_empty(procs4: Any, ranks: Any, dtype: torch.dtype) -> None:
    assert procs4.run(exchanges, ranks, dtype) == [[]] * 4


def on_empty() -> list[tuple[int, ...]]:
    (comm,) = communicators([1, 0])
    nothing = torch.empty(0, 3)
    return [
        tuple(comm.all_reduce(nothing).shape),
        tuple(comm.all_gather(nothing).shape),
        tuple(comm.all_gather(torch.empty(2, 0)).shape),
        tuple(comm.reduce_scatter(torch.empty(4, 0)).shape),
    ]


def test_collectives_on_empty_tensors(procs2: Any) -> None:
    assert procs2.run(on_empty) == [[(0, 3), (0, 3), (4, 0), (2, 0)]] * 2


def on_complex() -> list[Any]:
    comm = init_device_mesh(DEVICE, (2,)).communicator(0)
    x = torch.tensor([1 + 2j, 3j])
    return [
        comm.all_reduce(x.clone()).tolist(),
        comm.reduce_scatter(x.clone(), "avg").tolist(),
        comm.all_reduce(x.clone(), async_op=True).wait().tolist(),
    ]


def test_reduce_complex(procs2: Any) -> None:
    whole = [2 + 4j, 6j]
    assert procs2.run(on_complex) == [[whole, [1 + 2j], whole], [whole, [3j], whole]]


def uneven_forms() -> list[bool]:
    """Run the forms that gloo's executor never calls, as far as gloo can: the lists NCCL takes."""
    mesh = DeviceMesh(DEVICE, [2, 0, 3, 1])
    dtypes = mesh.backend.dtypes
    comm = TorchCommunicator(mesh.get_group(), mesh.ranks, DEVICE, dtypes=dtypes, uneven=True)
    sizes, i = [1, 3, 0, 2], comm.rank
    start = sum(sizes[:i])
    good = []
    for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64):
        given = data(comm.ranks[i], dtype, 6)
        mine = expected(comm.ranks, dtype, "sum", 6)[start : start + sizes[i]]
        good.append(same(comm.reduce_scatter_v(given, sizes), mine))
        whole = torch.cat([data(rank, dtype, 2) for rank in comm.ranks])
        good.append(same(comm.all_gather_v(data(comm.ranks[i], dtype, 2), [2] * 4), whole))
    return good


def test_uneven_forms_in_group_order(procs4: Any) -> None:
    assert procs4.run(uneven_forms) == [[True] * 8] * 4


def refused(case: str) -> str:
    comm = init_device_mesh(DEVICE, (2,)).communicator(0)
    x, elsewhere = torch.ones(4, 4), "meta" if DEVICE == "cpu" else "cpu"
    calls = {
        "stride": lambda: comm.all_reduce(x.t()[:, :2]),
        "gather stride": lambda: comm.all_gather(x.t()[:, :2]),
        "device": lambda: comm.reduce_scatter(x.to(elsewhere)),
        "op": lambda: comm.all_reduce(x, "median"),
        "avg": lambda: comm.all_reduce(x.to(torch.int64), "avg"),
        "fp8": lambda: comm.all_reduce(x.to(torch.float8_e4m3fn)),
        "complex": lambda: comm.all_reduce(x.to(torch.complex64), "max"),
        "rows": lambda: comm.reduce_scatter(x[:3]),
        "scalar": lambda: comm.all_gather(torch.tensor(1.0)),
        "scalar parts": lambda: comm.all_to_all_v(torch.tensor(1.0), [0, 0], [0, 0]),
        "parts": lambda: comm.all_to_all_v(x.view(-1), [8, 9], [8 + comm.rank] * 2),
        "gather_v": lambda: comm.all_gather_v(x, [4, 4]),
        "scatter_v": lambda: comm.reduce_scatter_v(x, [3, 1]),
        "pieces": lambda: comm.scatter(x, None if comm.rank == 0 else [x, x]),
    }
    try:
        calls[case]()
    except BackendError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            "stride",
            "all_reduce: the tensor must be contiguous, but got shape=(4, 2), stride=(1, 4).",
        ),
        ("gather stride", "all_gather: the tensor must be contiguous"),
        (
            "device",
            f"reduce_scatter: the tensor must be on a {DEVICE} device, but got device=",
        ),
        (
            "op",
            "all_reduce: op must be one of ('sum', 'avg', 'max', 'min', 'product'), but got op=",
        ),
        ("avg", "but got dtype=torch.int64, op='avg'. Reduce with sum."),
        ("fp8", "but got dtype=torch.float8_e4m3fn, op='sum'. Convert to float32 or int32 first."),
        ("complex", "but got dtype=torch.complex64, op='max'. Reduce with sum."),
        ("rows", "reduce_scatter: dim 0 must divide by the group size 2, but got shape=(3, 4)."),
        ("scalar", "all_gather: the tensor must have a dim 0, but got shape=()."),
        ("scalar parts", "all_to_all_v: the tensor must have a dim 0, but got shape=()."),
        (
            "parts",
            "all_to_all_v: there must be one size for each of the 2 ranks, adding up to x, but got"
            " sizes=(8, 9), rank=",
        ),
        ("gather_v", "all_gather_v: the backend must have the capability uneven_gather"),
        ("scatter_v", "reduce_scatter_v: the backend must have the capability uneven_gather"),
        ("pieces", "scatter: the rank at group index 0, and only it, must pass the pieces"),
    ],
)
def test_refused_on_every_rank_before_the_collective(procs2: Any, case: str, text: str) -> None:
    for got in procs2.run(refused, case):
        assert text in got


def deserted(name: str) -> str:
    comm = init_device_mesh(DEVICE, (2,)).communicator(0)
    if comm.rank == 1:
        dist.destroy_process_group()
        return "gone"
    x = torch.ones(4)
    calls = {
        "all_reduce": lambda: comm.all_reduce(x),
        "all_gather": lambda: comm.all_gather(x, async_op=True).wait(),
        "broadcast": lambda: comm.broadcast(x, 1),
    }
    try:
        calls[name]()
    except BackendError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("name", ("all_reduce", "all_gather", "broadcast"))
def test_failure_inside_names_the_collective_and_the_group(procs2: Any, name: str) -> None:
    assert procs2.run(deserted, name)[0].startswith(
        f"{name}: every rank of the group must take part, with the same shape and dtype, but got"
        " group=(0, 1), rank=0, missing=(1,), call='"
    )
