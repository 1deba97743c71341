# SPDX-License-Identifier: Apache-2.0
"""The NumPy backend against the oracle: all ranks at once, in every layout and dtype."""

import functools
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.backends.numpy import distribute, execute, gather, lockstep, redistribute
from hyper_parallel.core import AbstractMesh, Layout, Packed, Partial, Replicate, Shard, plan
from hyper_parallel.core.collective import StepKind
from hyper_parallel.core.placement import REDUCE_OPS
from hyper_parallel.errors import BackendError, LayoutError
from hyper_parallel.runtime import (
    DeviceMesh,
    available_backends,
    backend_for,
    executor,
    init_device_mesh,
)
from support import oracle
from support.moves import Move, check_results, legal_placements, moves_on_meshes, placements_of

ROOT = Path(__file__).resolve().parents[3]
DTYPES = "bool int8 uint8 int32 int64 float16 float32 float64 complex64 complex128".split()
KNOWS_NO = {"b": ("avg",), "i": ("avg",), "u": ("avg",), "c": ("max", "min")}
REDUCTIONS = [
    (op, dtype)
    for op, dtype in itertools.product(REDUCE_OPS, DTYPES)
    if op not in KNOWS_NO.get(np.dtype(dtype).kind, ())
]


def mesh_of(grid):
    return AbstractMesh("numpy", grid.shape, ranks=grid.ravel().tolist())


def nested(grid, held):
    """Arrange arrays by rank as the mesh is, in nested lists."""
    if grid.ndim == 0:
        return held[int(grid)]
    return [nested(row, held) for row in grid]


def by_rank(grid, local_arrays):
    """Read what any rank holds from either form."""
    return {
        int(rank): functools.reduce(lambda part, c: part[c], place, local_arrays)
        for place, rank in np.ndenumerate(grid)
    }


def check_move(grid, move):
    """Run a move and its adjoint from lists, and compare with the oracle."""
    move.prepare(grid, mesh_of(grid), np.random.default_rng(0))
    move.moved = by_rank(grid, execute(move.forward, nested(grid, move.held)))
    move.returned = by_rank(grid, execute(move.backward, nested(grid, move.cotangents)))
    check_results(grid, move)


@given(case=moves_on_meshes(most_ranks=64))
def test_execute_any_pair_on_any_mesh(case):
    check_move(*case)


@pytest.mark.parametrize("ranks", [[0], [2, 0, 1], [3, 1, 0, 2]], ids=str)
def test_execute_every_plain_pair_on_one_axis(ranks):
    for shape in [(8, 4), (5, 3), (1, 9), (0, 3), (3, 0), ()]:
        for src, dst in itertools.product(placements_of(shape), repeat=2):
            check_move(np.array(ranks), Move(shape, (src,), (dst,)))


@given(case=moves_on_meshes(most_ranks=64), seed=st.integers(0, 9))
def test_distribute_then_gather_gives_the_array_back(case, seed):
    grid, move = case
    whole = np.asarray(np.random.default_rng(seed).integers(-9, 10, move.shape) * 1.0)
    given_whole = whole.copy()
    layout = Layout(mesh_of(grid), move.src, move.shape)
    local_arrays = distribute(given_whole, layout)
    given_whole[...] = -1  # what was distributed is the ranks' own
    held = by_rank(grid, local_arrays)
    assert np.array_equal(oracle.reconstruct(grid, move.src, move.shape, held), whole)
    for rank, array in held.items():
        assert array.shape == oracle.local_shape(grid, move.src, move.shape, rank)
        assert array.dtype == whole.dtype and array.flags.c_contiguous
    back = gather(local_arrays, layout)
    assert np.array_equal(back, whole) and back.flags.writeable
    assert not any(np.shares_memory(back, array) for array in held.values())


@given(data=st.data(), case=moves_on_meshes(most_ranks=24))
def test_redistribute_to_another_mesh(data, case):
    grid, move = case
    sizes = data.draw(
        st.sampled_from([grid.shape, grid.shape[::-1], (grid.size,), (1, grid.size), (2,), (3, 2)])
    )
    ranks = grid.ravel().tolist()
    if math.prod(sizes) != grid.size or data.draw(st.booleans()):  # other ranks, some perhaps alike
        ranks = range(data.draw(st.integers(0, 30)), 90)
    there = np.array(data.draw(st.permutations(ranks))[: math.prod(sizes)]).reshape(sizes)
    dst = data.draw(legal_placements(sizes, move.shape))
    held = oracle.contributions(grid, move.src, move.shape, np.random.default_rng(1))
    ends = Layout(mesh_of(grid), move.src, move.shape), Layout(mesh_of(there), dst, move.shape)
    moved = by_rank(there, redistribute(nested(grid, held), *ends))
    for rank, array in moved.items():
        assert array.shape == oracle.local_shape(there, dst, move.shape, rank)
    value = oracle.reconstruct(grid, move.src, move.shape, held)
    assert np.array_equal(oracle.reconstruct(there, dst, move.shape, moved), value)


def test_redistribute_to_a_mesh_where_every_rank_keeps_its_part():
    grid = np.arange(4).reshape(2, 2)
    src = Layout(mesh_of(grid), (Shard(0), Shard(1)), (4, 6))
    dst = Layout(mesh_of(grid.T), (Shard(1), Shard(0)), (4, 6))
    local_arrays = distribute(np.arange(24).reshape(4, 6), src)
    moved = redistribute(local_arrays, src, dst)
    assert not plan(src, dst).steps
    assert np.array_equal(moved, local_arrays.transpose(1, 0, 2, 3))


@pytest.mark.parametrize(
    "src, dst", list(itertools.product(placements_of((4,)), repeat=2)), ids=str
)
def test_redistribute_of_a_stack_gives_new_memory(src, dst):
    mesh = AbstractMesh("numpy", (2,))
    ends = [Layout(mesh, (p,), (4,)) for p in (src, dst)]
    stack = np.ones((2, *ends[0].largest_shape))
    moved = redistribute(stack, *ends)
    assert moved is stack if not plan(*ends).steps else not np.shares_memory(moved, stack)


def test_redistribute_between_equal_meshes_of_other_kinds_keeps_what_is_pending():
    abstract, attached = AbstractMesh("numpy", (3,)), init_device_mesh("numpy", (3,))
    terms = [np.array([1.0, 2.0]) * 10**rank for rank in range(3)]
    ends = [Layout(mesh, (Partial(),), (2,)) for mesh in (abstract, attached)]
    assert redistribute(terms, *ends) is terms


@pytest.mark.parametrize("op, dtype", REDUCTIONS)
def test_redistribute_reduces_every_dtype_in_group_order(op, dtype):
    mesh = AbstractMesh("numpy", (3,), ranks=(2, 0, 1))
    terms = np.random.default_rng(0).integers(-9, 10, (3, 5)).astype(dtype)
    pending = Layout(mesh, (Partial(op),), (5,))
    ufunc = {"max": np.maximum, "min": np.minimum, "product": np.multiply}.get(op, np.add)
    expected = ufunc(ufunc(terms[0], terms[1]), terms[2])
    if op == "avg":
        expected = (expected / 3).astype(dtype)
    for dst in (Replicate(), Shard(0)):
        moved = redistribute(terms, pending, Layout(mesh, (dst,), (5,)))
        for rank, own in enumerate(oracle.pieces(np.arange(3), (dst,), expected).values()):
            assert moved[rank].dtype == np.dtype(dtype)
            assert np.array_equal(moved[rank], own)


@pytest.mark.parametrize("op, dtype", REDUCTIONS)
@pytest.mark.parametrize("cut", [Shard(0), Packed(0, (3, 2))], ids=repr)
def test_redistribute_shard_to_partial_and_back_keeps_every_dtype(cut, op, dtype):
    mesh = AbstractMesh("numpy", (4,))
    whole = np.array([0, 1, 0, 1, 1]).astype(dtype)
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        whole = np.array([limits.min, limits.max, 0, 1, 3], dtype)
    shards, pending = (Layout(mesh, (p,), (5,)) for p in (cut, Partial(op)))
    terms = redistribute(distribute(whole, shards), shards, pending)
    back = redistribute(terms, pending, shards)
    for rank, own in oracle.pieces(np.arange(4), (cut,), whole).items():
        assert terms[rank].dtype == back[rank].dtype == np.dtype(dtype)
        assert np.array_equal(back[rank], own)


def test_redistribute_leaves_other_groups_and_the_input_alone():
    mesh = AbstractMesh("numpy", (2, 2), mesh_dim_names=("dp", "tp"))
    replicas = np.arange(8.0).reshape(2, 2, 2)  # the two of dp differ, as after a bug
    before = replicas.copy()
    src, dst = (Layout(mesh, (Replicate(), p), (4,)) for p in (Shard(0), Replicate()))
    moved = redistribute(replicas, src, dst)
    assert moved[0][1].tolist() == [0, 1, 2, 3] and moved[1][0].tolist() == [4, 5, 6, 7]
    assert np.array_equal(replicas, before) and not np.shares_memory(moved, replicas)


def test_replicas_share_memory_and_are_read_only():
    layout = Layout(AbstractMesh("numpy", (1000, 2)), (Replicate(), Shard(0)), (1 << 20,))
    local_arrays = distribute(np.zeros(1 << 20, np.int8), layout)
    assert local_arrays.shape == (1000, 2, 1 << 19)
    assert np.shares_memory(local_arrays[0, 1], local_arrays[999, 1])
    with pytest.raises(ValueError, match="read-only"):
        local_arrays[0, 0] += 1
    assert np.array_equal(gather(local_arrays, layout), np.zeros(1 << 20, np.int8))


@pytest.mark.parametrize(
    "dst, expected", [(Replicate(), [5] * 5), (Shard(0), [5]), (Partial("avg"), [5] * 5)]
)
def test_redistribute_takes_views_in_any_memory_order(dst, expected):
    mesh = AbstractMesh("numpy", (5, 2))
    ends = [Layout(mesh, (p, Replicate()), (5,)) for p in (Partial(), dst)]
    shared = np.broadcast_to(np.ones(5), (5, 2, 5))  # the contributions are one array
    turned = np.asfortranarray(np.ones((5, 2, 5)))
    for terms in (shared, turned):
        moved = redistribute(terms, *ends)
        assert all(own.tolist() == expected for row in moved for own in row)
        assert all(own.flags.c_contiguous for row in moved for own in row)


def test_every_kind_of_step_is_known():
    assert set(lockstep._STEPS) == set(executor._STEPS) == set(get_args(StepKind))


def test_a_rank_outside_the_mesh_has_no_entry():
    mesh = AbstractMesh("numpy", (2,), ranks=(3, 1))
    layout = Layout(mesh, (Shard(0),), (3,))
    local_arrays = distribute(np.arange(3), layout)
    assert [own.tolist() for own in local_arrays] == [[0, 1], [2]]
    assert dict(zip(mesh.ranks, map(len, local_arrays), strict=True)) == {3: 2, 1: 1}
    assert layout.local_shape(0) == (0,)


R, S, P = Replicate(), Shard, Partial


@pytest.mark.parametrize(
    "sizes, src, dst, shape",
    [
        ((32, 32), (S(0), S(1)), (S(1), S(0)), (64, 96)),
        ((32, 32), (P(), S(0)), (S(1), R), (64, 32)),
        ((8, 8, 16), (S(0), R, S(1)), (R, S(0), S(0)), (128, 64)),
        ((8, 8, 16), (P("max"), S(0), S(0)), (S(0), S(1), S(1)), (128, 128)),
        ((8, 8, 16), (R, S(1), P("avg")), (P("avg"), S(0), R), (16, 24)),
        ((1024,), (S(0),), (S(1),), (1024, 1024)),
        ((1024,), (S(0),), (S(1),), (1000, 1030)),
        ((32, 32), (S(0), Packed(1, (40, 20, 20))), (S(1), S(0)), (50, 80)),
    ],
    ids=str,
)
def test_a_thousand_ranks(sizes, src, dst, shape):
    grid = np.random.default_rng(0).permutation(1024).reshape(sizes)
    mesh = mesh_of(grid)
    ends = Layout(mesh, src, shape), Layout(mesh, dst, shape)
    whole = np.arange(float(math.prod(shape))).reshape(shape)
    moved = redistribute(distribute(whole, ends[0]), *ends)
    held = by_rank(grid, moved)
    if ends[1].has_partial:
        assert np.array_equal(oracle.reconstruct(grid, dst, shape, held), whole)
    else:
        for rank, own in held.items():
            assert np.array_equal(own, oracle.take(whole, oracle.indices(grid, dst, shape, rank)))
    assert np.array_equal(gather(moved, ends[1]), whole)


@pytest.mark.parametrize(
    "op, dtype", sorted(set(itertools.product(REDUCE_OPS, DTYPES)) - set(REDUCTIONS))
)
def test_gather_refuses_what_a_dtype_cannot_reduce(op, dtype):
    pending = Layout(AbstractMesh("numpy", (2,)), (Partial(op),), (3,))
    with pytest.raises((LayoutError, BackendError), match=f"but got dtype=dtype.'{dtype}'"):
        gather(np.zeros((2, 3), dtype), pending)


def test_a_numpy_mesh_is_a_mesh_without_a_rank_of_its_own():
    mesh = init_device_mesh("numpy", (2, 3), mesh_dim_names=("dp", "tp"))
    assert isinstance(mesh, DeviceMesh) and mesh.device_type == "numpy"
    assert mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]] and mesh.coordinate(5) == (1, 2)
    assert mesh.flatten().shape == (6,) and mesh == init_device_mesh(
        "numpy", (2, 3), mesh_dim_names=("dp", "tp")
    )
    layout = Layout(mesh, (R, S(0)), (6,))
    assert gather(distribute(np.arange(6), layout), layout).tolist() == [0, 1, 2, 3, 4, 5]
    assert "numpy" in available_backends() and backend_for("numpy").unavailable() is None
    text = r"must be one rank of the mesh for this call, but got ranks='all'. Move all"
    for ask in (
        mesh.get_rank,
        mesh.get_coordinate,
        mesh.get_local_rank,
        mesh.get_all_groups,
        lambda: mesh["tp"],
        lambda: mesh.communicator(0),
        lambda: DeviceMesh.from_group(object(), "numpy"),
    ):
        with pytest.raises(BackendError, match=text):
            ask()


ROWS = Layout(AbstractMesh("numpy", (2,)), (S(0),), (4,))
SHORT = Layout(AbstractMesh("numpy", (2,)), (S(0),), (3,))
SUMS = Layout(AbstractMesh("numpy", (2,)), (P(),), (4,))
MEANS = Layout(AbstractMesh("numpy", (2,)), (P("avg"),), (4,))
MOST = Layout(AbstractMesh("numpy", (2,)), (P("max"),), (4,))


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda: distribute(np.zeros(5), ROWS),
            LayoutError,
            r"distribute: the array must have the layout's shape \(4,\), but got shape=\(5,\)\. ",
        ),
        (
            lambda: redistribute(np.zeros((2, 3)), ROWS, ROWS),
            LayoutError,
            r"redistribute: the stack of all ranks' arrays must have shape \(2, 2\) .*=\(2, 3\)\.",
        ),
        (
            lambda: gather(np.zeros((2, 2)), SHORT),
            LayoutError,
            r"gather: uneven shards must be lists, nested as the mesh \(2,\), but got",
        ),
        (
            lambda: gather([np.zeros(2), np.zeros(2)], SHORT),
            LayoutError,
            r"gather: the array of rank 1 must have shape \(1,\) and dtype float64 .*=\(2,\), ",
        ),
        (
            lambda: gather([np.zeros(2), np.zeros(2, int)], ROWS),
            LayoutError,
            r"the array of rank 1 must have shape \(2,\) and dtype float64 .*int64",
        ),
        (
            lambda: gather([np.zeros(2)], ROWS),
            LayoutError,
            r"gather: local_arrays must have 2 entries at each place of this mesh axis, .*=1\. ",
        ),
        (
            lambda: execute(plan(SUMS, MEANS), np.zeros((2, 4), int)),
            LayoutError,
            r"execute: Partial\('avg'\) needs a floating point tensor, but got dtype=dtype\('int",
        ),
        (
            lambda: distribute(np.zeros(4, bool), MEANS),
            LayoutError,
            r"distribute: Partial\('avg'\) needs a floating point tensor",
        ),
        (
            lambda: gather(np.zeros((2, 4), complex), MOST),
            BackendError,
            r"all_reduce: the numpy backend must be able to reduce this dtype .*'max'",
        ),
        (
            lambda: redistribute(np.zeros((2, 2), complex), ROWS, MOST),
            BackendError,
            r"identity: op must be sum, avg or product, or, for ordered numbers, max or min",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_runs_where_torch_is_not_installed():
    code = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torch_npu"):
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())

import numpy as np
from hyper_parallel import Layout, Partial, Replicate, Shard, init_device_mesh
from hyper_parallel.backends.numpy import lockstep, distribute, gather, redistribute

mesh = init_device_mesh("numpy", (2, 2), mesh_dim_names=("dp", "tp"))
x = np.arange(15.0).reshape(5, 3)
a, b = (Layout(mesh, p, x.shape) for p in ((Shard(0), Partial()), (Replicate(), Shard(1))))
moved = redistribute(distribute(x, a), a, b)
assert np.array_equal(moved[1][0], x[:, :2]), moved
assert np.array_equal(gather(moved, b), x)
assert "torch" not in sys.modules
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
