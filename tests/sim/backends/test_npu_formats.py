# SPDX-License-Identifier: Apache-2.0
"""Private memory formats of NPUs are made plain before anything is cut."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import DTensor, distribute_tensor, init_device_mesh, simulate
from hyper_parallel.backends.npu.formats import NpuOps
from hyper_parallel.core import Partial, Replicate, Shard
from support.device import on_simulated_npu
from support.dtensors import part, seeded

pytestmark = on_simulated_npu


def tiled(x: torch.Tensor) -> torch.Tensor:
    import torch_npu

    return torch_npu.npu_format_cast(x, torch_npu.Format.FRACTAL_NZ)


def test_a_slice_of_a_private_format_is_wrong_without_help():
    x = seeded(4, 6)
    assert not torch.equal(tiled(x)[:2], x[:2])


def test_every_operation_makes_its_operand_plain():
    ops, x = NpuOps(), seeded(4, 6)
    for op in (
        lambda y: ops.narrow(y, 0, 1, 2),
        lambda y: ops.cat([y, y], 1),
        lambda y: ops.movedim(y, 0, 1),
        lambda y: ops.reshape(y, (24,)),
        ops.contiguous,
        ops.clone,
        lambda y: ops.scale(y, 2.0),
    ):
        assert torch.equal(op(tiled(x)), op(x))
        assert torch.equal(op(tiled(x).requires_grad_()), op(x))
    out = ops.empty((4, 6), x)
    ops.copy_into(out, tiled(x))
    assert torch.equal(out, x)
    assert ops.contiguous(x) is x


@pytest.mark.parametrize("dst", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
@pytest.mark.parametrize("src", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
@simulate(2)
def test_a_weight_in_a_private_format_is_cut_and_moved_right(src, dst):
    mesh, whole = init_device_mesh("npu", (2,)), seeded(5, 4)
    placed = distribute_tensor(tiled(whole), mesh, [Shard(0)])
    assert torch.equal(placed.to_local(), part(whole, mesh, [Shard(0)]))
    held = distribute_tensor(whole, mesh, [src]).to_local()
    moved = DTensor.from_local(tiled(held), mesh, [src], shape=(5, 4)).redistribute(mesh, [dst])
    want = distribute_tensor(whole, mesh, [src]).redistribute(mesh, [dst])
    if src != dst:
        assert torch.equal(moved.to_local(), want.to_local())
