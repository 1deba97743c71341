# SPDX-License-Identifier: Apache-2.0
"""Plans and the executor against the oracle: every pair of layouts, on one, two and three axes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hyper_parallel.core import (
    AbstractMesh,
    Layout,
    Packed,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    plan,
)
from hyper_parallel.core.placement import REDUCE_OPS
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh, execute
from hyper_parallel.runtime.executor import program
from hyper_parallel.runtime.rows import scatter_from
from support import oracle
from support.lockstep import GARBAGE, World
from support.moves import Move, check_moves, moves_on_meshes, placements_of, strided_of

CAPABILITIES = [{"uneven_gather": have, "native_avg": have} for have in (False, True)]
# Even, uneven and empty shards on up to 4 ranks; no elements at all; no dims at all.
SHAPES = [(8, 4), (5, 3), (2, 6), (1, 9), (6,), (0, 3), (3, 0), (2, 3, 5), ()]


def legal_pairs(grid, shape, choices):
    """Every pair of layouts that can be built from these placements."""
    mesh = AbstractMesh("cpu", grid.shape)
    layouts = []
    for placements in itertools.product(choices, repeat=grid.ndim):
        try:
            layouts.append(Layout(mesh, placements, shape).placements)
        except LayoutError:
            continue
    return list(itertools.product(layouts, repeat=2))


@pytest.mark.parametrize("capabilities", CAPABILITIES, ids=str)
@pytest.mark.parametrize("ranks", [[0], [1, 0], [2, 0, 1], [3, 1, 0, 2]], ids=str)
def test_execute_every_pair_on_one_axis(ranks, capabilities):
    grid = np.array(ranks)
    moves = [
        Move(shape, src, dst)
        for shape in SHAPES
        for src, dst in legal_pairs(grid, shape, [*placements_of(shape), *strided_of(shape)])
    ]
    check_moves(grid, moves, **capabilities)


@pytest.mark.parametrize("capabilities", CAPABILITIES, ids=str)
@pytest.mark.parametrize("grid", [[2, 0, 1], [[3, 1], [0, 2]]], ids=str)
def test_launch_gives_what_execute_gives_though_the_local_array_changes(grid, capabilities):
    grid = np.array(grid)
    mesh = AbstractMesh("cpu", grid.shape, ranks=grid.ravel().tolist())
    ops = REDUCE_OPS if grid.ndim == 1 else ("sum", "avg")
    shapes = [(6, 3), (4, 1), (0, 3)] if grid.ndim == 1 else [(5, 4)]
    moves = [
        Move(shape, *pair)
        for shape in shapes
        for pair in legal_pairs(grid, shape, placements_of(shape, ops))[:: 5 * grid.ndim - 4]
    ]
    world = World(int(grid.max()) + 2, **capabilities)
    for move in moves:
        move.prepare(grid, mesh, np.random.default_rng(0))

    def work(rank, attached):
        in_flight = 0
        for move in moves:
            held = move.held.get(rank, np.zeros((0,)))
            expected = execute(move.forward, held, attached)
            given = held.copy()
            ends = (
                Layout(attached, at.placements, at.shape)
                for at in (move.forward.src, move.forward.dst)
            )
            flying = program(*ends).launch(given, attached.backend.ops.clone)
            given[...] = GARBAGE
            if flying is not None:
                in_flight += 1
                assert np.array_equal(flying.wait(), expected), move
        return in_flight

    counts = world.run(work, mesh)
    communicate = [m for m in moves if any(step.communicates for step in m.forward)]
    expected = sum(0 not in move.shape for move in communicate)
    assert [counts[rank] for rank in grid.ravel()] == [expected] * grid.size
    assert expected > 20


@pytest.mark.parametrize(
    "grid, shape, ops",
    [
        ([[5, 0, 3], [1, 4, 2]], (7, 2), ("sum",)),
        ([[5, 0, 3], [1, 4, 2]], (4,), ("sum", "avg", "max")),
        ([[2, 1], [0, 3]], (5, 3), ("max", "avg")),
        ([[2], [0]], (4,), ("sum", "max")),
        ([[1, 0, 3]], (5,), ("product", "min")),
    ],
    ids=str,
)
def test_execute_every_pair_on_two_axes(grid, shape, ops):
    grid = np.array(grid)
    pairs = legal_pairs(grid, shape, placements_of(shape, ops))
    moves = [Move(shape, src, dst) for src, dst in pairs]
    check_moves(grid, moves, uneven_gather=len(shape) == 1)


@pytest.mark.parametrize(
    "grid, shape", [([[5, 0], [1, 4], [3, 2]], (7, 2)), ([[2, 1], [0, 3]], (8, 4))], ids=str
)
def test_execute_strided_pairs_on_two_axes(grid, shape):
    grid = np.array(grid)
    choices = [Replicate(), Shard(0), Shard(1), Partial(), *strided_of(shape)[:5]]
    pairs = legal_pairs(grid, shape, choices)
    check_moves(grid, [Move(shape, src, dst) for src, dst in pairs[::7]])


def test_execute_agrees_on_equal_parts_where_some_ranks_parts_lie_scattered():
    packed = Packed(1, (1, 3))
    moves = [Move((8, 4), (packed, Replicate()), (Shard(0), Shard(1)))]
    moves.append(Move((8, 4), (Replicate(), packed), (StridedShard(1, 3), Shard(0))))
    check_moves(np.array([[2, 1], [0, 3]]), moves)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "grid, shape", [([[5, 0], [1, 4], [3, 2]], (7, 2)), ([[2, 1], [0, 3]], (8, 4))], ids=str
)
def test_execute_every_strided_pair_on_two_axes(grid, shape):
    grid = np.array(grid)
    choices = [Replicate(), Shard(0), Shard(1), Partial(), *strided_of(shape)]
    pairs = legal_pairs(grid, shape, choices)
    check_moves(grid, [Move(shape, src, dst) for src, dst in pairs])


@pytest.mark.parametrize("shape", [(5, 3), (8, 8)], ids=str)
def test_execute_pairs_on_three_axes(shape):
    grid = np.array([[[6, 1], [4, 0]], [[3, 7], [2, 5]]])
    choices = [Replicate(), Shard(0), Shard(1), Partial()]
    pairs = legal_pairs(grid, shape, choices)
    check_moves(grid, [Move(shape, src, dst) for src, dst in pairs[::11]])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", [(5, 3), (8, 8)], ids=str)
def test_execute_every_pair_on_three_axes(shape):
    grid = np.array([[[6, 1], [4, 0]], [[3, 7], [2, 5]]])
    choices = [Replicate(), Shard(0), Shard(1), Partial(), StridedShard(0, 2)]
    pairs = legal_pairs(grid, shape, choices)
    check_moves(grid, [Move(shape, src, dst) for src, dst in pairs])


@given(case=moves_on_meshes(), uneven=st.booleans(), avg=st.booleans())
def test_execute_any_pair_on_any_mesh(case, uneven, avg):
    grid, move = case
    check_moves(grid, [move], uneven_gather=uneven, native_avg=avg)


def layouts_on(grid, shape):
    choices = [Replicate(), *map(Shard, range(len(shape))), Partial(), StridedShard(0, 2)]
    return list(itertools.product(choices, repeat=grid.ndim))


def check_between(grid, other, pairs, shape):
    """Move between two meshes, in a world with a rank to spare, and check against the oracle."""
    grids = [np.array(grid), np.array(other)]
    meshes = [AbstractMesh("cpu", g.shape, ranks=g.ravel().tolist()) for g in grids]
    rng = np.random.default_rng(0)
    held = [oracle.contributions(grids[0], src, shape, rng) for src, _ in pairs]
    nothing = np.zeros((0,))
    world = World(max(int(g.max()) for g in grids) + 2)

    def work(rank, attached):
        there = DeviceMesh.attached(meshes[1], attached.backend, range(meshes[1].ndim))
        results = []
        for (src, dst), own in zip(pairs, held, strict=True):
            ends = Layout(attached, src, shape), Layout(there, dst, shape)
            results.append(execute(plan(*ends), own.get(rank, nothing), there))
        return results

    by_rank = world.run(work, meshes[0])
    for number, (src, dst) in enumerate(pairs):
        moved = {rank: results[number] for rank, results in enumerate(by_rank)}
        for rank, array in moved.items():
            inside = rank in grids[1]
            wanted = oracle.local_shape(grids[1], dst, shape, rank) if inside else (0,)
            assert array.shape == wanted and array.dtype == float
            own = held[number].get(rank, nothing)
            assert array is own or not np.shares_memory(array, own)
        value = oracle.reconstruct(grids[0], src, shape, held[number])
        assert np.array_equal(oracle.reconstruct(grids[1], dst, shape, moved), value), (src, dst)
    union = {*grids[0].flat, *grids[1].flat}
    assert all(not calls for rank, calls in enumerate(world.calls) if rank not in union)


MESH_PAIRS = [
    ([[0, 1], [2, 3]], [3, 1, 0, 2]),
    ([0, 1, 2, 3], [[2, 0], [3, 1]]),
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
    ([[5, 0, 3], [1, 4, 2]], [[0, 1], [2, 3], [4, 5]]),
    ([0, 1], [2, 3]),
    ([3, 1], [[0, 2, 4], [5, 3, 1]]),
    ([[0, 1], [2, 3]], [1, 2, 4]),
    ([[4, 1], [2, 0]], [3]),
    ([0, 1, 2, 3], [2, 0]),
    ([[[6, 0], [1, 3]]], [[3, 5], [6, 2]]),
]


def pairs_between(grid, other, shape):
    """Every pair of a layout on one mesh and one on another."""
    ends = [layouts_on(np.array(g), shape) for g in (grid, other)]
    return list(itertools.product(*ends))


@pytest.mark.parametrize("shape", [(8, 4), (5, 3)], ids=str)
@pytest.mark.parametrize("grid, other", MESH_PAIRS, ids=str)
def test_execute_between_meshes(grid, other, shape):
    pairs = pairs_between(grid, other, shape)
    check_between(grid, other, pairs[:: max(len(pairs) // 60, 1)], shape)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", [(8, 4), (5, 3)], ids=str)
@pytest.mark.parametrize("grid, other", MESH_PAIRS, ids=str)
def test_execute_every_pair_between_meshes(grid, other, shape):
    check_between(grid, other, pairs_between(grid, other, shape), shape)


@pytest.mark.parametrize("grid, other", MESH_PAIRS, ids=str)
def test_execute_a_tensor_without_dims_or_elements_between_meshes(grid, other):
    for shape in ((), (0, 3)):
        ends = [
            list(itertools.product([Replicate(), Partial()], repeat=np.ndim(g)))
            for g in (grid, other)
        ]
        check_between(grid, other, list(itertools.product(*ends)), shape)


@st.composite
def moves_between(draw):
    """Draw two meshes of up to 6 ranks in any order, a shape, and a legal layout on each."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    choices = st.sampled_from([*placements_of(shape), *strided_of(shape)])
    grids, ends = [], []
    for _ in range(2):
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        assume(math.prod(sizes) <= 6)
        ranks = draw(st.permutations(range(8)))[: math.prod(sizes)]
        placements = tuple(draw(choices) for _ in sizes)
        try:
            Layout(AbstractMesh("cpu", sizes), placements, shape)
        except LayoutError:
            assume(False)
        grids.append(np.array(ranks).reshape(sizes))
        ends.append(placements)
    return *grids, tuple(ends), shape


@given(moves_between())
def test_execute_between_any_meshes(case):
    grid, other, pair, shape = case
    check_between(grid, other, [pair], shape)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
@pytest.mark.parametrize("op", ["sum", "max", "min", "product"])
def test_execute_shard_to_partial_and_back_keeps_any_dtype(dtype, op):
    mesh = AbstractMesh("cpu", (3,))
    cut, pending = (Layout(mesh, (p,), (5,)) for p in (Shard(0), Partial(op)))
    limits = np.iinfo(dtype) if "int" in dtype else np.finfo(dtype)
    whole = np.array([limits.min, -1, 0, 3, limits.max], dtype)
    held = oracle.pieces(np.arange(3), (Shard(0),), whole)

    def work(rank, attached):
        contribution = execute(plan(cut, pending), held[rank], attached)
        return contribution, execute(plan(pending, cut), contribution, attached)

    for rank, (contribution, back) in enumerate(World(3).run(work, mesh)):
        assert contribution.dtype == back.dtype == np.dtype(dtype)
        assert np.array_equal(back, held[rank])


def test_execute_takes_a_strided_array():
    mesh = AbstractMesh("cpu", (3,))
    whole = np.arange(35.0).reshape(5, 7)
    choices = placements_of((5, 7), ops=("sum",))
    layouts = [Layout(mesh, (p,), (5, 7)) for p in choices]

    def work(rank, attached):
        for src, dst in itertools.product(layouts, repeat=2):
            given_array = oracle.pieces(np.arange(3), src.placements, whole)[rank]
            results = [
                execute(plan(src, dst), given_array.copy(order=order), attached) for order in "CF"
            ]
            assert np.array_equal(*results), (src, dst)
            assert src == dst or results[1].flags.c_contiguous

    World(3).run(work, mesh)


def test_execute_outside_the_mesh_does_nothing():
    mesh = AbstractMesh("cpu", (2,), ranks=(3, 1))
    src, dst = (Layout(mesh, (p,), (4,)) for p in (Partial(), Replicate()))
    world = World(4)
    nothing = np.zeros((0,))
    inputs = {1: np.ones(4), 3: np.ones(4)}
    results = world.run(lambda rank, m: execute(plan(src, dst), inputs.get(rank, nothing), m), mesh)
    assert results[0] is nothing and results[2] is nothing
    assert results[1].tolist() == results[3].tolist() == [2.0] * 4
    assert [len(calls) for calls in world.calls] == [0, 1, 0, 1]


@pytest.mark.parametrize("shape", [(8, 6), (5, 6), (2, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(1, block=3)], ids=repr)
@pytest.mark.parametrize("src", [0, 2])
def test_scatter_from_cuts_one_ranks_array(shape, placement, src):
    grid = np.array([2, 0, 3, 1])
    mesh = AbstractMesh("cpu", (4,), ranks=grid.tolist())
    whole = np.arange(math.prod(shape)).reshape(shape)
    whole.flags.writeable = False
    expected = oracle.pieces(grid, (placement,), whole)

    def work(rank, attached):
        source = whole if rank == grid[src] else None
        return scatter_from(attached, 0, source, whole, placement, src)

    for rank, piece in enumerate(World(4).run(work, mesh)):
        assert piece.shape == expected[rank].shape
        assert np.array_equal(piece, expected[rank])
        assert piece.flags.c_contiguous
        assert not np.shares_memory(piece, whole)
