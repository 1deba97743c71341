# SPDX-License-Identifier: Apache-2.0
"""Plans on real gloo groups, joint groups of several axes among them, against the oracle."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from hyper_parallel.core import (
    AbstractMesh,
    Layout,
    Packed,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh, execute
from support.device import DEVICE, DTYPE
from support.moves import Move, check_results

GRIDS = ([0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 1], [0, 2]], [[[2], [0]], [[1], [3]]])
SHAPES = ((8, 4), (7, 3), (5,), (4, 3, 2))
PAIRS = 40


def moves_of(grid: Any, shape: tuple[int, ...], seed: int) -> list[Move]:
    """Draw pairs of legal layouts of one shape, the same in every process."""
    mesh = AbstractMesh(DEVICE, grid.shape, ranks=grid.ravel().tolist())
    options: list[Placement] = [Replicate(), Partial(), Partial()]
    for dim, size in enumerate(shape):
        options += [Shard(dim), Shard(dim), StridedShard(dim, 2), Packed(dim, (size - 1, 1))]
    layouts: list[tuple[Placement, ...]] = []
    for placements in itertools.product(options, repeat=grid.ndim):
        try:
            layouts.append(Layout(mesh, placements, shape).placements)
        except LayoutError:  # packed sizes that do not fit what an outer axis left
            continue
    draw = random.Random(seed)
    pairs = [(draw.choice(layouts), draw.choice(layouts)) for _ in range(PAIRS)]
    return [Move(shape, src, dst) for src, dst in pairs]


def prepared(ranks: Any, seed: int) -> tuple[Any, list[Move]]:
    grid, rng = np.array(ranks), np.random.default_rng(seed)
    mesh = AbstractMesh(DEVICE, grid.shape, ranks=grid.ravel().tolist())
    moves = [move for shape in SHAPES for move in moves_of(grid, shape, seed)]
    for move in moves:
        move.prepare(grid, mesh, rng)
    return grid, moves


def run_moves(ranks: Any, seed: int) -> list[tuple[Any, Any]]:
    """Run the moves on this rank's part, forward and backward."""
    mesh = DeviceMesh(DEVICE, ranks)
    _, moves = prepared(ranks, seed)
    rank = mesh.get_rank()
    results = []
    for move in moves:
        pairs = ((move.forward, move.held), (move.backward, move.cotangents))
        given = [(plan, torch.from_numpy(held[rank].copy())) for plan, held in pairs]
        # The values are whole numbers, exact in either dtype.
        outs = [execute(plan, x.to(DEVICE, DTYPE), mesh) for plan, x in given]
        results.append(tuple(out.cpu().double().numpy() for out in outs))
    return results


@pytest.mark.parametrize("ranks", GRIDS, ids=str)
def test_random_pairs_and_their_gradients(procs4: Any, ranks: Any) -> None:
    by_rank = procs4.run(run_moves, ranks, 7)
    grid, moves = prepared(ranks, 7)
    for number, move in enumerate(moves):
        for rank in grid.ravel().tolist():
            forward, backward = by_rank[rank][number]
            # What an empty plan gives back is the array itself; it came here as a copy.
            move.moved[rank] = forward if len(move.forward) else move.held[rank]
            move.returned[rank] = backward if len(move.backward) else move.cotangents[rank]
        try:
            check_results(grid, move)
        except AssertionError as error:
            raise AssertionError(f"{move}\n{move.forward}\nback:\n{move.backward}") from error
