# SPDX-License-Identifier: Apache-2.0
"""DTensor.redistribute over strided and packed shards and to another mesh, with its gradient."""

import itertools

import pytest
import torch

from hyper_parallel import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from hyper_parallel.core import Packed, StridedShard
from support.device import DEVICE

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PLACEMENTS = [(S0, S0), (StridedShard(0, 2), S0), (R, Packed(0, (6, 2))), (P, S1), (S1, P)]


def check_pair(src_mesh, dst_mesh, src, dst):
    """Move a tensor there and back; the gradient of a weighted sum is the weight."""
    whole = torch.arange(32.0).reshape(8, 4)
    weight = torch.arange(32.0).reshape(8, 4).flip(0)
    x = distribute_tensor(whole, src_mesh, src).requires_grad_()
    moved = x.redistribute(dst_mesh, dst)
    assert moved.to_local().shape == moved._layout.local_shape(src_mesh.get_rank())
    assert torch.equal(moved.full_tensor(), whole)
    (moved.full_tensor() * weight).sum().backward()
    assert isinstance(x.grad, DTensor)
    assert torch.equal(x.grad.full_tensor(), weight)


@simulate(4)
def test_redistribute_strided_and_packed_on_two_axes():
    mesh = init_device_mesh(DEVICE, (2, 2))
    for src, dst in itertools.product(PLACEMENTS, repeat=2):
        check_pair(mesh, mesh, src, dst)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [3, 1, 0, 2]], ids=str)
@simulate(4)
def test_redistribute_to_another_mesh(ranks):
    mesh, line = init_device_mesh(DEVICE, (2, 2)), DeviceMesh(DEVICE, ranks)
    for src, dst in itertools.product(PLACEMENTS, [(S0,), (S1,), (R,), (P,)]):
        check_pair(mesh, line, src, dst)
        check_pair(line, mesh, dst, src)
