# SPDX-License-Identifier: Apache-2.0
"""watch: what is told of each call, that classes are left as they were, that no method is kept."""

import ast
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.runtime import Communicator, watch
from hyper_parallel.runtime.watch import _BYTES, introduce

ROOT = Path(__file__).resolve().parents[3]


class Mesh:
    """As much of a mesh as is asked here."""

    def __init__(self, *communicators):
        self.programs = {1: "a program"}
        self.communicators = communicators

    def axes_of(self, communicator):
        return ("tp",) if communicator in self.communicators else ()


class Base:
    """A communicator that answers nothing, with slots, as a backend's may have."""

    __slots__ = ("rank", "ranks", "size")

    def __init__(self):
        self.ranks, self.rank, self.size = (4, 6), 1, 2

    def all_reduce(self, x, op="sum", *, async_op=False):
        return x

    def all_gather(self, x, *, async_op=False):
        return self.all_reduce(x)

    def all_gather_v(self, x, sizes):
        return x

    def reduce_scatter(self, x, op="sum", *, async_op=False):
        return x

    def reduce_scatter_v(self, x, sizes, op="sum"):
        return x

    def all_to_all_v(self, x, send_sizes, recv_sizes):
        return x

    def broadcast(self, x, src=0):
        return x

    def scatter(self, out, pieces, src=0):
        return out

    def all_gather_ints(self, values):
        return [values]

    def barrier(self):
        raise OSError("nobody came")


class Derived(Base):
    """One that takes most from another, and calls it."""

    __slots__ = ()

    def broadcast(self, x, src=0):
        return super().broadcast(x, src)


X = np.zeros((6, 2), np.float32)
CALLS = {
    "all_reduce": ((X, "max"), {"async_op": True}, 48, 48),
    "all_gather": ((X,), {}, 48, 96),
    "all_gather_v": ((X,), {"sizes": [1, 6]}, 48, 56),
    "reduce_scatter": ((X,), {}, 48, 24),
    "reduce_scatter_v": ((X, [2, 4]), {}, 48, 32),
    "all_to_all_v": ((X[:, 0], [1, 5], [7, 2]), {}, 24, 36),
    "broadcast": ((X, 1), {}, 48, 48),
    "scatter": ((X, [X, X], 1), {}, 96, 48),
    "all_gather_ints": (([1, 2],), {}, 16, 32),
}


@pytest.mark.parametrize("kind", [Base, Derived])
def test_every_call_is_told_once_with_its_bytes(kind):
    comm, told = kind(), []
    mesh = Mesh(comm)
    introduce(comm, mesh)
    with watch(told.append):
        for name, (args, how, _, _) in CALLS.items():
            getattr(comm, name)(*args, **how)
    assert [(one.op, one.bytes_in, one.bytes_out) for one in told] == [
        (name, bytes_in, bytes_out) for name, (_, _, bytes_in, bytes_out) in CALLS.items()
    ]
    assert {one.axes for one in told} == {("tp",)} and {one.ranks for one in told} == {(4, 6)}
    assert {*CALLS, "barrier"} == set(_BYTES)


def test_what_a_rank_does_not_send_is_no_byte_of_its_own():
    comm, told = Base(), []
    introduce(comm, Mesh())
    with watch(told.append):
        comm.broadcast(X)
        comm.scatter(X, None)
    assert [(one.bytes_in, one.bytes_out, one.axes) for one in told] == [(0, 48, ())] * 2


def test_every_collective_of_the_interface_is_told():
    methods = {name for name, value in vars(Communicator).items() if callable(value)}
    assert set(_BYTES) == {name for name in methods if not name.startswith("_")}


def test_a_call_that_fails_is_not_told_and_the_next_one_is():
    comm, told = Base(), []
    introduce(comm, Mesh())
    with watch(told.append):
        with pytest.raises(OSError, match="nobody came"):
            comm.barrier()
        comm.all_reduce(X)
    assert [one.op for one in told] == ["all_reduce"]


def test_classes_and_programs_are_left_as_if_nobody_had_watched():
    comm = Derived()
    mesh = Mesh(comm)
    introduce(comm, mesh)
    before = [dict(vars(kind)) for kind in (Base, Derived)]
    with pytest.raises(OSError, match="in the block"), watch(lambda call: None):
        assert not mesh.programs and vars(Derived) != before[1]
        mesh.programs[1] = "one of the block"
        with watch(lambda call: None):
            assert not mesh.programs
        assert vars(Derived) != before[1]
        raise OSError("in the block")
    assert not mesh.programs
    assert [dict(vars(kind)) for kind in (Base, Derived)] == before


def test_a_class_that_comes_into_use_in_the_block_is_watched():
    class Late(Base):
        __slots__ = ()

    told = []
    with watch(told.append):
        comm = Late()
        introduce(comm, Mesh())
        comm.all_reduce(X)
    comm.all_reduce(X)
    assert len(told) == 1


def test_a_class_that_lacks_collectives_is_watched_in_what_it_has():
    class Few:
        ranks, rank, size = (0,), 0, 1

        def all_reduce(self, x):
            return x

    comm, before, told = Few(), dict(vars(Few)), []
    introduce(comm, Mesh())
    with watch(told.append):
        comm.all_reduce(X)
    assert len(told) == 1 and dict(vars(Few)) == before


def test_nested_watchers_are_told_alike():
    comm, outer, inner = Base(), [], []
    introduce(comm, Mesh())
    with watch(outer.append):
        comm.all_reduce(X)
        with watch(inner.append):
            comm.all_gather(X)
    assert [one.op for one in outer] == ["all_reduce", "all_gather"] and inner == outer[1:]


def kept_methods(text):
    """List the lines that take a collective from a communicator without calling it there."""
    tree = ast.parse(text)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in _BYTES and id(node) not in called
    ]


def test_nobody_above_the_runtime_keeps_a_bound_method():
    found = []
    for path in sorted((ROOT / "hyper_parallel").rglob("*.py")):
        room = path.relative_to(ROOT / "hyper_parallel").parts[0]
        if room not in ("runtime", "tools"):  # the executor's are worked out anew
            found += [f"{path.name}:{line}" for line in kept_methods(path.read_text())]
    assert not found, "see [Note: watched calls]"


def test_a_kept_method_is_found():
    assert kept_methods("f = comm.all_reduce\ncomm.all_reduce(x)\n") == [1]
