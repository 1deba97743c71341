# SPDX-License-Identifier: Apache-2.0
"""Checks of a Communicator: every collective, dtype and op; even, uneven, empty; groups; errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hyper_parallel.conformance.here import EMULATED, PASS, Check, Here, always, with_others
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.runtime import ArrayOps, Backend, Communicator, DeviceMesh
from hyper_parallel.runtime.checked import CheckedCommunicator
from hyper_parallel.runtime.rows import gather, scatter

__all__ = ["collective_checks"]

OPS = ("sum", "avg", "max", "min", "product")
DTYPES = tuple(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64"
    " float8_e4m3fn uint16".split()
)
SHAPES = ((4, 3), (5,), (0, 3), (2, 0))


def collective_checks() -> Iterator[Check]:
    """List the checks."""
    for dtype in DTYPES:
        for op in OPS:
            how = partial(Here.reduction, op=op, dtype=dtype)
            for name in ("all_reduce", "reduce_scatter"):
                yield Check(name, f"{op} {dtype}", partial(_reduced, name, op, dtype), how)
        for name, run in _MOVES.items():
            yield Check(name, dtype, partial(run, dtype), partial(Here.moving, dtype=dtype))
    for name, run in _UNEVEN.items():
        for dtype in ("float32", "int64", "bfloat16"):
            for case, sizes in _SIZES.items():
                call = partial(run, dtype, sizes)
                reduces = run is _scatter_uneven
                yield Check(name, f"{case} {dtype}", call, partial(_how_uneven, reduces, dtype))
    for protocol in (Backend, ArrayOps, Communicator):
        name = protocol.__name__
        needs_rank = protocol is Communicator
        yield Check("interface", name, partial(_has, protocol), needs_rank=needs_rank)
    yield Check("exchange", "host integers", _ints)
    yield Check("exchange", "barrier", lambda here: here.comm.barrier())
    for axis in ("row", "column", ("row", "column")):
        yield Check("sub-groups", str(axis), partial(_group, axis))
    for case, call in _WRONG.items():
        expects = with_others if case in _NEEDS_OTHERS else always
        yield Check("refusals", case, partial(_refused, call), expects)
    yield Check("refusals", "calls that differ, in checked mode", _unlike, with_others)


def _how_uneven(reduces: bool, dtype: str, here: Here) -> str:
    how = here.reduction("sum", dtype) if reduces else here.moving(dtype)
    return EMULATED if how == PASS and not here.capabilities.uneven_gather else how


def _reduced(name: str, op: str, dtype: str, here: Here) -> None:
    n, i = here.comm.size, here.comm.rank
    for shape in ((2 * n, 3), (0, 3), (2 * n, 0)):
        pieces = [here.data(rank, shape, dtype) for rank in here.comm.ranks]
        want = here.reduced(pieces, op)
        want = np.split(want, n)[i] if name == "reduce_scatter" else want
        rtol = 0.02 if op == "avg" else 0  # all else is exact in every dtype
        got = here.reduce(name, here.arrays.make(pieces[i], dtype), op, dtype)
        here.same(got, want, dtype, "sync", rtol=rtol)
        if op != "avg" or here.capabilities.native_avg:
            x = here.arrays.make(pieces[i], dtype)
            got = getattr(here.comm, name)(x, op, async_op=True).wait()
            here.same(got, want, dtype, "async", rtol=rtol)


def _all_gather(dtype: str, here: Here) -> None:
    for shape in SHAPES:
        want = np.concatenate([here.data(rank, shape, dtype) for rank in here.comm.ranks])
        x = here.arrays.make(here.data(here.comm.ranks[here.comm.rank], shape, dtype), dtype)
        here.same(here.comm.all_gather(x), want, dtype, f"sync {shape}")
        here.same(here.comm.all_gather(x, async_op=True).wait(), want, dtype, f"async {shape}")


def _all_to_all(dtype: str, here: Here) -> None:
    """Index i sends (i + 2 j) % 3 entries to index j, so some parts are empty; then nothing."""
    n, i = here.comm.size, here.comm.rank
    for factor in (1, 0):
        counts = [[factor * ((a + 2 * b) % 3) for b in range(n)] for a in range(n)]
        parts = [[here.data(n * a + b, (counts[a][b],), dtype) for b in range(n)] for a in range(n)]
        sent = np.concatenate(parts[i])
        receive, want = [row[i] for row in counts], np.concatenate([row[i] for row in parts])
        got = here.comm.all_to_all_v(here.arrays.make(sent, dtype), counts[i], receive)
        here.same(got, want, dtype, f"sync {counts}")
        x = here.arrays.make(sent, dtype)
        got = here.comm.all_to_all_v(x, counts[i], receive, async_op=True).wait()
        here.same(got, want, dtype, f"async {counts}")
    x = here.arrays.make(
        np.concatenate([here.data(n * i + b, (2,), dtype) for b in range(n)]), dtype
    )
    want = np.concatenate([here.data(n * a + i, (2,), dtype) for a in range(n)])
    here.same(here.comm.all_to_all_v(x, [2] * n, [2] * n, even=True), want, dtype, "even")


def _broadcast(dtype: str, here: Here) -> None:
    for src in {0, here.comm.size - 1}:
        for shape in SHAPES:
            x = here.arrays.make(here.data(here.comm.rank, shape, dtype), dtype)
            here.same(here.comm.broadcast(x, src), here.data(src, shape, dtype), dtype, f"{src}")


def _scatter(dtype: str, here: Here) -> None:
    n, i = here.comm.size, here.comm.rank
    for src in {0, n - 1}:
        pieces = [here.data(j, (2, 3), dtype) for j in range(n)]
        given = [here.arrays.make(piece, dtype) for piece in pieces] if i == src else None
        out = here.arrays.make(here.data(n, (2, 3), dtype), dtype)
        here.same(here.comm.scatter(out, given, src), pieces[i], dtype, f"from {src}")


_MOVES: dict[str, Callable[[str, Here], None]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "scatter": _scatter,
}

_SIZES: dict[str, Callable[[int], list[int]]] = {
    "uneven": lambda n: [1 + i % 3 for i in range(n)],
    "with an empty piece": lambda n: [2 * (i % 2) for i in range(n)],
}


def _gather_uneven(dtype: str, sizes_of: Callable[[int], list[int]], here: Here) -> None:
    sizes = sizes_of(here.comm.size)
    pieces = [here.data(i, (size, 2), dtype) for i, size in enumerate(sizes)]
    x = here.arrays.make(pieces[here.comm.rank], dtype)
    got = gather(here.mesh, 0, 0, sizes).whole()(x)
    here.same(got, np.concatenate(pieces), dtype, f"{sizes}")
    if here.capabilities.uneven_gather:
        got = here.comm.all_gather_v(x, sizes, async_op=True).wait()
        here.same(got, np.concatenate(pieces), dtype, f"async {sizes}")


def _scatter_uneven(dtype: str, sizes_of: Callable[[int], list[int]], here: Here) -> None:
    sizes, i = sizes_of(here.comm.size), here.comm.rank
    pieces = [here.data(j, (sum(sizes), 2), dtype) for j in range(len(sizes))]
    want = here.reduced(pieces, "sum")[sum(sizes[:i]) : sum(sizes[: i + 1])]
    x = here.arrays.make(pieces[i], dtype)
    here.same(scatter(here.mesh, 0, 0, sizes, "sum").whole()(x), want, dtype, f"{sizes}")
    if here.capabilities.uneven_gather:
        x = here.arrays.make(pieces[i], dtype)
        got = here.comm.reduce_scatter_v(x, sizes, async_op=True).wait()
        here.same(got, want, dtype, f"async {sizes}")


_UNEVEN = {"uneven all_gather": _gather_uneven, "uneven reduce_scatter": _scatter_uneven}


def _has(protocol: type[Any], here: Here) -> None:
    """Every method of a protocol is there and takes the protocol's parameters by name."""
    owner: Any = {Backend: here.backend, ArrayOps: here.backend.ops}.get(protocol)
    owner = here.comm if owner is None else owner
    for name, method in vars(protocol).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        wanted = inspect.signature(method).parameters.values()
        positional = [p.name for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
        by_name = [p.name for p in wanted if p.kind is p.KEYWORD_ONLY]
        own = inspect.signature(getattr(owner, name))
        try:
            own.bind(*positional, **dict.fromkeys(by_name))
        except TypeError as error:
            raise AssertionError(f"{protocol.__name__}.{name}{own}: {error}") from None


def _ints(here: Here) -> None:
    got = here.comm.all_gather_ints([here.comm.rank, -7, 2**40])
    assert got == [(i, -7, 2**40) for i in range(here.comm.size)], got


def _group(axis: str | tuple[str, str], here: Here) -> None:
    """Each collective once, on a part of the world whose ranks are in no order."""
    names = (axis,) if isinstance(axis, str) else axis
    axes = tuple(here.grid.axis_index(name) for name in names)
    comm = here.grid.communicator(axes[0] if len(axes) == 1 else axes)
    me = here.mesh.get_rank()
    assert comm.ranks == here.grid.submesh_ranks(axes, rank=me), comm.ranks
    assert (comm.ranks[comm.rank], comm.size) == (me, len(comm.ranks))
    dtype, n, i = "float32", comm.size, comm.rank
    pieces = [here.data(rank, (2 * n, 2), dtype) for rank in comm.ranks]
    total = here.reduced(pieces, "sum")

    def mine() -> Any:
        return here.arrays.make(pieces[i], dtype)

    here.same(comm.all_reduce(mine()), total, dtype, "all_reduce")
    here.same(comm.reduce_scatter(mine()), total[2 * i : 2 * i + 2], dtype, "reduce_scatter")
    here.same(comm.all_gather(mine()), np.concatenate(pieces), dtype, "all_gather")
    here.same(comm.broadcast(mine(), n - 1), pieces[n - 1], dtype, "broadcast")
    flat = np.repeat(np.arange(n), 2) + 10 * i
    sent = comm.all_to_all_v(here.arrays.make(flat.astype(float), dtype), [2] * n, [2] * n)
    here.same(sent, np.repeat(10.0 * np.arange(n), 2) + i, dtype, "all_to_all_v")
    assert comm.all_gather_ints([me]) == [(rank,) for rank in comm.ranks]


def _matrix(here: Here, rows: int, columns: int = 2) -> Any:
    return here.arrays.make(np.ones((rows, columns)), "float32")


_WRONG: dict[str, Callable[[Here], Any]] = {
    "an op that does not exist": lambda here: here.comm.all_reduce(_matrix(here, 1), "xor"),
    "no dim 0": lambda here: here.comm.all_gather(here.arrays.make(np.ones(()), "float32")),
    "rows that do not divide": lambda here: here.comm.reduce_scatter(
        _matrix(here, here.world_size + 1)
    ),
    "not contiguous": lambda here: here.comm.all_reduce(
        here.arrays.transposed(_matrix(here, 2, 3))
    ),
    "a mesh bigger than the world": lambda here: DeviceMesh(
        here.device_type, list(range(here.world_size + 1))
    ),
}
_NEEDS_OTHERS = ("rows that do not divide",)
# where: what must hold, [but got name=value]. What to do.
_FORM = re.compile(r"\w[\w.]*: .+\. .+\.$", re.DOTALL)


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except HyperParallelError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def _refused(call: Callable[[Here], Any], here: Here) -> None:
    """A wrong call is refused before anything is sent; afterwards the group works."""
    text = _raised(lambda: call(here))
    assert _FORM.match(text), f"the error is not in the library's form: {text}"
    _ints(here)


def _unlike(here: Here) -> None:
    """The first difference is raised on every rank."""
    comm = here.comm if here.capabilities.checks_calls else CheckedCommunicator(here.comm)
    text = _raised(lambda: comm.all_reduce(_matrix(here, 1 + (here.comm.rank == 1))))
    assert "agree on the shape" in text, text
    _ints(here)
