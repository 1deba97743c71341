# SPDX-License-Identifier: Apache-2.0
"""Nested uneven pieces on real gloo groups, a joint group known before."""

from __future__ import annotations

from typing import Any

import pytest

from support.device import DEVICE


def nested(ranks: list[list[int]]) -> list[Any]:
    """Gather 5 rows that two axes cut, over both and over the first one."""
    import torch

    from hyper_parallel import DeviceMesh, Partial, Replicate, Shard, distribute_tensor

    replicate, rows, pending = Replicate(), Shard(0), Partial()
    mesh = DeviceMesh(DEVICE, ranks, mesh_dim_names=("dp", "tp"))
    mesh.flatten("all")
    whole = torch.arange(15.0).reshape(5, 3)
    cut = distribute_tensor(whole, mesh, [rows, rows])
    reduced = distribute_tensor(whole, mesh, [pending, pending]).redistribute(mesh, [rows, rows])
    moved = [cut.redistribute(mesh, [replicate, p]) for p in (replicate, rows)]
    return [t.to_local()[:, 0].tolist() for t in (*moved, reduced)]


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[3, 1], [0, 2]]], ids=str)
def test_nested_gather_loses_no_row(procs4: Any, ranks: list[list[int]]) -> None:
    found = procs4.run(nested, ranks)
    places = {(0, 0): [0, 3], (0, 1): [6], (1, 0): [9], (1, 1): [12]}
    for (dp, tp), own in places.items():
        halves = [9, 12] if tp else [0, 3, 6]
        assert found[ranks[dp][tp]] == [[0, 3, 6, 9, 12], halves, own]
