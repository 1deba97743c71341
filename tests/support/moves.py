# SPDX-License-Identifier: Apache-2.0
"""Move arrays between layouts on the lock-step world, and check each move against the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from hyper_parallel.core import (
    AbstractMesh,
    Layout,
    Packed,
    Partial,
    Placement,
    Plan,
    Replicate,
    Shard,
    StridedShard,
    plan,
    same_cut,
)
from hyper_parallel.core.collective import COMMUNICATING
from hyper_parallel.core.placement import REDUCE_OPS
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh, execute
from support import oracle
from support.lockstep import World

Array = np.ndarray[Any, Any]


@dataclass
class Move:
    """One redistribution, forward and backward, with every rank's arrays."""

    shape: tuple[int, ...]
    src: tuple[Placement, ...]
    dst: tuple[Placement, ...]

    def prepare(self, grid: Array, mesh: AbstractMesh, rng: np.random.Generator) -> None:
        """Plan both ways and make the inputs: read-only, so that no rank can change them."""
        src, dst = (Layout(mesh, placements, self.shape) for placements in (self.src, self.dst))
        self.forward: Plan = plan(src, dst)
        self.backward: Plan = plan(dst.cotangent, src.cotangent)
        self.held = oracle.contributions(grid, self.src, self.shape, rng)
        self.gradient = np.asarray(rng.integers(-9, 10, self.shape) * 1.0)
        self.cotangents = oracle.pieces(grid, dst.cotangent.placements, self.gradient)
        self.moved: dict[int, Array] = {}
        self.returned: dict[int, Array] = {}
        self.calls: dict[int, list[Any]] = {}
        for array in (*self.held.values(), *self.cotangents.values()):
            array.flags.writeable = False

    def run(self, rank: int, mesh: DeviceMesh, world: World) -> None:
        """Do one rank's part."""
        first = len(world.calls[rank])
        outside = np.zeros((0,))
        self.moved[rank] = execute(self.forward, self.held.get(rank, outside), mesh)
        self.returned[rank] = execute(self.backward, self.cotangents.get(rank, outside), mesh)
        self.calls[rank] = world.calls[rank][first:]


def placements_of(shape: Sequence[int], ops: Sequence[str] = REDUCE_OPS) -> list[Placement]:
    """List the plain placements of a tensor, and shards in blocks."""
    shards = [Shard(dim) for dim in range(len(shape))]
    blocks = [Shard(dim, block=2) for dim, size in enumerate(shape) if size % 2 == 0]
    return [Replicate(), *shards, *blocks, *map(Partial, ops)]


def strided_of(shape: Sequence[int]) -> list[Placement]:
    """Strided and packed shards; those of a dim in order, so that a slice of them has all kinds."""
    found: list[Placement] = []
    for dim, size in enumerate(shape):
        found += [StridedShard(dim, 2), Packed(dim, (size // 3, size - size // 3))]
        found += [StridedShard(dim, 3), Packed(dim, (size - size % 2, size % 2), blocks=(2, 1))]
    return found


@st.composite
def legal_placements(draw: Any, sizes: Sequence[int], shape: Sequence[int]) -> Any:
    """Draw one placement per mesh axis, of any kind, that a layout may have."""
    ops = draw(st.sampled_from([("sum", "avg"), *((op,) for op in REDUCE_OPS)]))
    choices = [*placements_of(shape, ops), *strided_of(shape)]
    placements = tuple(draw(st.tuples(*(st.sampled_from(choices) for _ in sizes))))
    try:
        Layout(AbstractMesh("cpu", sizes), placements, tuple(shape))
    except LayoutError:
        assume(False)
    return placements


@st.composite
def moves_on_meshes(draw: Any, most_ranks: int = 8) -> Any:
    """Draw a mesh in any order, with ranks outside it, a shape, and two legal layouts."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = math.prod(sizes)
    assume(count <= most_ranks)
    ranks = draw(st.permutations(range(count + 2)))[:count]
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    src, dst = (draw(legal_placements(sizes, shape)) for _ in range(2))
    return np.array(ranks).reshape(sizes), Move(shape, src, dst)


def check_moves(grid: Array, moves: Sequence[Move], **capabilities: bool) -> None:
    """Run moves on the mesh `grid`, inside a world with one rank to spare, and check each."""
    mesh = AbstractMesh("cpu", grid.shape, ranks=grid.ravel().tolist())
    rng = np.random.default_rng(0)
    for move in moves:
        move.prepare(grid, mesh, rng)
    world = World(int(grid.max()) + 2, **capabilities)

    def work(rank: int, attached: DeviceMesh) -> None:
        for move in moves:
            move.run(rank, attached, world)

    world.run(work, mesh)
    for move in moves:
        try:
            _check_calls(grid, move)
            check_results(grid, move)
        except AssertionError as error:
            raise AssertionError(f"{move}\n{move.forward}\nback:\n{move.backward}") from error


def check_results(grid: Array, move: Move) -> None:
    """Check the steps of a move that ran, and every rank's arrays, forward and backward."""
    _check_steps(move.forward)
    _check_steps(move.backward)
    _check_arrays(grid, move.dst, move.forward, move.held, move.moved)
    back = move.backward
    _check_arrays(grid, back.dst.placements, back, move.cotangents, move.returned)

    value = oracle.reconstruct(grid, move.src, move.shape, move.held)
    moved = oracle.reconstruct(grid, move.dst, move.shape, move.moved)
    assert np.array_equal(moved, value)
    returned = oracle.reconstruct(grid, back.dst.placements, move.shape, move.returned)
    assert np.array_equal(returned, move.gradient)
    assert (moved * move.gradient).sum() == (value * returned).sum()
    if len(move.src) == 1:
        _check_image(grid, move, value)


def _check_steps(steps: Plan) -> None:
    """A plan starts at src, ends at dst, each step begins where the last one ended."""
    here = steps.src
    for step in steps:
        assert step.axes and all(steps.src.mesh.shape[axis] > 1 for axis in step.axes)
        assert list(step.axes) == sorted(set(step.axes))
        assert same_cut(here, step.src) and not same_cut(step.src, step.dst)
        here = step.dst
    assert same_cut(here, steps.dst)


def _check_calls(grid: Array, move: Move) -> None:
    """Every rank of the mesh communicates alike, and only as the plan says.

    Groups with even and with uneven shards may differ in the form (all_gather, all_gather_v).
    """
    names = [
        [(axis, kind.removesuffix("_v")) for axis, kind, *_ in move.calls[rank]]
        for rank in grid.ravel().tolist()
    ]
    assert all(calls == names[0] for calls in names)
    assert all(not calls for rank, calls in move.calls.items() if rank not in grid)
    planned = [step for step in (*move.forward, *move.backward) if step.kind in COMMUNICATING]
    assert len(names[0]) == (0 if 0 in move.shape else len(planned))


def _check_arrays(
    grid: Array,
    placements: Sequence[Placement],
    steps: Plan,
    before: dict[int, Array],
    after: dict[int, Array],
) -> None:
    """Results have the right shape and dtype, are contiguous, and share no memory with inputs."""
    for rank, array in before.items():
        result = after[rank]
        assert result.shape == oracle.local_shape(grid, placements, steps.src.shape, rank)
        assert result.dtype == array.dtype
        if len(steps) == 0:
            assert result is array
        else:
            assert result.flags.c_contiguous
            assert not np.shares_memory(result, array)
    for rank in set(after) - set(before):
        assert after[rank].shape == (0,)


def _check_image(grid: Array, move: Move, value: Array) -> None:
    """On one axis the array of every rank is fixed, for pending reductions too."""
    (src,), (dst,), size = move.src, move.dst, grid.size
    if not isinstance(dst, Partial):
        return  # the value fixes it
    for index, rank in enumerate(grid.tolist()):
        own = oracle.indices(grid, move.src, move.shape, rank)
        if src == dst or size == 1:
            expected = move.held[rank]
        elif (src, dst) == (Partial("sum"), Partial("avg")):
            expected = move.held[rank] * size
        elif (src, dst) == (Partial("avg"), Partial("sum")):
            expected = move.held[rank] / size
        else:
            expected = oracle.image(src, dst, value, own, index, size)
        assert np.array_equal(move.moved[rank], expected)
