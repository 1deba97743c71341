# SPDX-License-Identifier: Apache-2.0
"""Every collective of the simulated backend against direct computation."""

import functools

import pytest
import torch

from hyper_parallel.errors import BackendError
from hyper_parallel.runtime import DeviceMesh, current_rank, simulate
from support.device import DEVICE, DTYPE

RANKS = (2, 0, 3, 1)
OPS = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
SHAPES = [(4, 3), (8,), (0, 3), (4, 0)]


def make(rank, shape, dtype):
    """Make one rank's tensor, the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(0, 5, shape, generator=generator, device="cpu").to(DEVICE)
    if dtype.is_floating_point or dtype.is_complex:
        return (x.double() / 3).to(dtype)
    return (x % 2).bool() if dtype == torch.bool else x.to(dtype)


def reduced(xs, op):
    """Reduce in the given order."""
    whole = functools.reduce(OPS[op], xs)
    return whole / len(xs) if op == "avg" else whole


def group():
    return DeviceMesh(DEVICE, RANKS).communicator(0)


def exactly(results, expected):
    """Check values, dtypes and that no two results share memory."""
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
        assert result.is_contiguous()
    filled = [result.untyped_storage().data_ptr() for result in results if result.numel()]
    assert len(set(filled)) == len(filled)


def has(op, dtype):
    """Say whether the op exists for the dtype."""
    if dtype == torch.float64 and dtype != DTYPE:
        return False
    if dtype.is_complex:
        return op in ("sum", "avg") or (op == "product" and DEVICE == "cpu")
    return op != "avg" or dtype.is_floating_point


CASES = [(dtype, op) for dtype in DTYPES for op in OPS if has(op, dtype)]
REFUSED = [
    (dtype, op) for dtype in DTYPES for op in [*OPS, "xor"] if not (op in OPS and has(op, dtype))
]


@pytest.mark.parametrize("shape", [*SHAPES, ()], ids=str)
@pytest.mark.parametrize(("dtype", "op"), CASES, ids=str)
def test_all_reduce(dtype, op, shape):
    def run():
        x = make(current_rank(), shape, dtype)
        result = group().all_reduce(x, op)
        assert x.numel() == 0 or result is x
        return result

    whole = reduced([make(rank, shape, dtype) for rank in RANKS], op)
    exactly(simulate(4).run(run), [whole] * 4)


def test_all_reduce_of_one_object_on_all_ranks_leaves_it():
    x = torch.ones(2)
    exactly(simulate(4).run(lambda: group().all_reduce(x)), [torch.full((2,), 4.0)] * 4)
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_gather(dtype, shape):
    whole = torch.cat([make(rank, shape, dtype) for rank in RANKS])
    exactly(
        simulate(4).run(lambda: group().all_gather(make(current_rank(), shape, dtype))), [whole] * 4
    )


SIZES = [(2, 2, 2, 2), (3, 0, 1, 2), (0, 0, 5, 0), (0, 0, 0, 0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_gather_v(dtype, sizes):
    def piece(rank):
        return make(rank, (sizes[RANKS.index(rank)], 3), dtype)

    whole = torch.cat([piece(rank) for rank in RANKS])
    exactly(
        simulate(4).run(lambda: group().all_gather_v(piece(current_rank()), sizes)), [whole] * 4
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "op"), CASES, ids=str)
def test_reduce_scatter(dtype, op, shape):
    whole = reduced([make(rank, shape, dtype) for rank in RANKS], op)
    pieces = whole.chunk(4) if shape[0] else [whole] * 4
    results = simulate(4).run(
        lambda: group().reduce_scatter(make(current_rank(), shape, dtype), op)
    )
    exactly(results, [pieces[RANKS.index(rank)] for rank in range(4)])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "op"), CASES, ids=str)
def test_reduce_scatter_v(dtype, op, sizes):
    shape = (sum(sizes), 2)
    pieces = reduced([make(rank, shape, dtype) for rank in RANKS], op).split(sizes)
    results = simulate(4).run(
        lambda: group().reduce_scatter_v(make(current_rank(), shape, dtype), sizes, op)
    )
    exactly(results, [pieces[RANKS.index(rank)] for rank in range(4)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("matrix", [[[2] * 4] * 4, [[0, 1, 2, 3], [1, 0, 0, 0], [0] * 4, [4] * 4]])
def test_all_to_all_v(dtype, matrix):
    def sent(index):
        return make(RANKS[index], (sum(matrix[index]),), dtype)

    def run():
        comm = group()
        receive = [row[comm.rank] for row in matrix]
        return comm.all_to_all_v(sent(comm.rank), matrix[comm.rank], receive)

    expected = [
        torch.cat([sent(i).split(matrix[i])[RANKS.index(rank)] for i in range(4)])
        for rank in range(4)
    ]
    exactly(simulate(4).run(run), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("src", [0, 3])
def test_broadcast_and_scatter(dtype, src):
    def run():
        comm = group()
        x = make(current_rank(), (2, 3), dtype)
        assert comm.broadcast(x, src) is x
        pieces = [make(10 + i, (2,), dtype) for i in range(4)]
        out = torch.empty(2, dtype=dtype)
        assert comm.scatter(out, pieces if comm.rank == src else None, src) is out
        return x, out

    results = simulate(4).run(run)
    exactly([x for x, _ in results], [make(RANKS[src], (2, 3), dtype)] * 4)
    exactly([out for _, out in results], [make(10 + RANKS.index(r), (2,), dtype) for r in range(4)])


def test_ints_and_barrier():
    def run():
        comm = group()
        assert comm.barrier() is None
        return comm.all_gather_ints([current_rank(), 2**40])

    assert simulate(4).run(run) == [[(rank, 2**40) for rank in RANKS]] * 4


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_async_gives_a_work_that_is_over(name):
    def run():
        comm = group()
        x = make(current_rank(), (4,), torch.float32)
        work = getattr(comm, name)(x.clone(), async_op=True)
        torch.testing.assert_close(work.wait(), getattr(comm, name)(x), rtol=0, atol=0)
        return work.wait() is work.wait()

    assert simulate(4).run(run) == [True] * 4


def test_results_are_out_of_reach_of_other_ranks():
    def run():
        comm = group()
        x = torch.full((2,), float(current_rank()))
        gathered = comm.all_gather(x)
        x.fill_(-1.0)
        before = gathered.clone()
        gathered.fill_(-1.0)
        comm.barrier()
        return before.tolist()

    expected = [float(rank) for rank in RANKS for _ in range(2)]
    assert simulate(4).run(run) == [expected] * 4


def test_collectives_record_no_gradient():
    def run():
        x = torch.ones(4, requires_grad=True)
        comm = group()
        return [
            comm.all_gather(x).requires_grad,
            comm.reduce_scatter(x).requires_grad,
            comm.all_reduce(x).grad_fn,
        ]

    assert simulate(4).run(run) == [[False, False, None]] * 4


@pytest.mark.parametrize(("dtype", "op"), REFUSED, ids=str)
def test_an_op_that_the_dtype_lacks_is_refused(dtype, op):
    def run():
        comm = group()
        for name in ("all_reduce", "reduce_scatter"):
            with pytest.raises(BackendError, match=f"{name}: "):
                getattr(comm, name)(make(0, (4,), dtype), op)

    assert simulate(4).outcomes(run) == [None] * 4


WRONG = {
    "contiguous": (lambda c: c.all_reduce(torch.ones(4, 2).t()), "must be contiguous"),
    "device": (
        lambda c: c.all_gather(torch.ones(4, device="meta")),
        f"must be on a {DEVICE} device",
    ),
    "dim 0": (lambda c: c.all_gather(torch.ones(())), "must have a dim 0"),
    "divide": (lambda c: c.reduce_scatter(torch.ones(3)), "dim 0 must divide by the group size 4"),
    "sizes": (lambda c: c.all_gather_v(torch.ones(3), [1] * 4), "all_gather_v: there must be one"),
    "few": (lambda c: c.reduce_scatter_v(torch.ones(3), [1, 2]), "for each of the 4 ranks"),
    "send": (lambda c: c.all_to_all_v(torch.ones(3), [1] * 4, [1] * 4), "all_to_all_v: there must"),
    "src": (lambda c: c.broadcast(torch.ones(3), src=4), "broadcast: src must be an index"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_refused_before_it_meets_others(case):
    call, text = WRONG[case]
    outcomes = simulate(4).outcomes(lambda: call(group()))
    assert all(type(one) is BackendError and text in str(one) for one in outcomes), outcomes


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.uint16), ids=str)
def test_a_dtype_that_the_devices_library_cannot_reduce_is_refused_in_its_words(dtype):
    outcomes = simulate(2).outcomes(
        lambda: DeviceMesh(DEVICE, [0, 1]).communicator(0).all_reduce(torch.ones(2).to(dtype))
    )
    for one in outcomes:
        assert type(one) is BackendError
        assert str(one) == (
            f"all_reduce: the {DEVICE} backend must be able to reduce this dtype with this op, but"
            f" got dtype={dtype}, op='sum'. Convert to float32 or int32 first."
        )


def test_what_fails_while_results_are_made_is_told_to_every_rank(monkeypatch):
    def fail(xs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("hyper_parallel.backends._torch.simulated_collectives._gather", fail)
    for one in simulate(2).outcomes(
        lambda: DeviceMesh(DEVICE, [0, 1]).communicator(0).all_gather(torch.ones(2))
    ):
        assert type(one) is BackendError
        assert "all_gather(shape=(2,), dtype=float32) over ranks (0, 1)" in str(one)
        assert "out of memory" in str(one)
