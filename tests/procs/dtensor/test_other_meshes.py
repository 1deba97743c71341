# SPDX-License-Identifier: Apache-2.0
"""Moves between meshes of other ranks on real gloo groups, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from support.device import DEVICE

# Disjoint over the whole world; overlapping, disjoint and nested with ranks that are in neither.
PAIRS = [
    ([0, 1], [3, 2]),
    ([2, 1], [[0, 1]]),
    ([3], [1, 0]),
    ([[2, 0], [1, 3]], [0, 3]),
]


def move_everything(src_ranks: Any, dst_ranks: Any) -> None:
    """Move over a new pair of meshes, and let the gradient come back."""
    import torch
    import torch.distributed as dist

    from hyper_parallel import DeviceMesh, Partial, Replicate, Shard, distribute_tensor
    from support.dtensors import same, seeded

    meshes = DeviceMesh(DEVICE, src_ranks), DeviceMesh(DEVICE, dst_ranks)
    inside = [mesh.get_coordinate() is not None for mesh in meshes]
    if dist.get_rank() == 1:  # ranks need not have made as many groups before
        dist.new_group([1], use_local_synchronization=True)
    if not any(inside):
        return
    whole, weight = seeded(5, 3), seeded(5, 3, seed=1)
    options = [Replicate(), Shard(0), Shard(1), Partial()]
    ends = [list(itertools.product(options, repeat=mesh.ndim)) for mesh in meshes]
    for src, dst in list(itertools.product(*ends))[::2]:
        x = distribute_tensor(whole, meshes[0], src).requires_grad_()
        moved = x.redistribute(meshes[1], dst)
        loss = (moved * distribute_tensor(weight, meshes[1], [Replicate()] * meshes[1].ndim)).sum()
        back = loss.redistribute(meshes[0], [Replicate()] * meshes[0].ndim)
        loss.backward()
        if inside[1]:
            same(moved, whole)
        if inside[0]:
            same(x.grad, weight)
            torch.testing.assert_close(back.full_tensor(), (whole * weight).sum())


@pytest.mark.parametrize("src_ranks, dst_ranks", PAIRS, ids=str)
def test_moves_between_meshes_of_other_ranks(procs4: Any, src_ranks: Any, dst_ranks: Any) -> None:
    procs4.run(move_everything, src_ranks, dst_ranks)
