# SPDX-License-Identifier: Apache-2.0
"""What a DTensor says of itself, how it is made from local tensors, and what that refuses."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, init_device_mesh, simulate
from hyper_parallel.dtensor.read import one_axis_mesh, read_mesh
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import current_rank
from support.device import DEVICE, DTYPE
from support.dtensors import laid, line, part, same, seeded


@simulate(4)
def test_what_is_asked_is_global():
    mesh = line(4)
    x = laid(seeded(5, 3), mesh, Shard(0))
    assert x.shape == torch.Size([5, 3]) == x.size()
    assert (x.size(0), x.size(-1), x.ndim, x.dim(), len(x)) == (5, 3, 2, 2, 5)
    assert (x.numel(), x.nelement(), x.nbytes) == (15, 15, 15 * DTYPE.itemsize)
    assert (x.stride(), x.stride(0), x.stride(-1)) == ((3, 1), 3, 1)
    assert (x.dtype, x.device.type) == (DTYPE, DEVICE)
    assert x.device_mesh is mesh
    assert x.placements == (Shard(0),)
    assert x.to_local().shape == ((2, 3), (2, 3), (1, 3), (0, 3))[current_rank()]
    assert not x.is_cuda
    assert laid(seeded(2, 3, 4), mesh, Replicate()).stride() == (12, 4, 1)
    with pytest.raises(TypeError, match="len\\(\\) of a 0-d tensor"):
        len(x.sum())


@simulate(2)
def test_repr_names_shape_placements_and_local_part():
    x = laid(torch.zeros(4, 2), line(2), Shard(0))
    assert repr(x).startswith("DTensor([4, 2], S(0)@tp, local=tensor([[0., 0.]")
    assert "S(0)" in str(x)


@simulate(2)
def test_from_local_and_to_local_share_storage():
    mesh = line(2)
    local = torch.zeros(2, 3)
    x = DTensor.from_local(local, mesh, [Shard(0)])
    x.add_(1)
    assert torch.equal(local, torch.ones(2, 3))
    x.to_local().add_(1)
    assert torch.equal(local, torch.full((2, 3), 2.0))
    assert x.shape == (4, 3)


@simulate(2)
def test_from_local_without_placements_and_inside_a_mesh_block():
    with line(2):
        x = DTensor.from_local(torch.ones(3))
    assert x.placements == (Replicate(),)


@simulate(4)
def test_from_local_of_uneven_parts_needs_the_shape():
    mesh = line(4)
    whole = seeded(5, 3)
    mine = part(whole, mesh, [Shard(0)])
    same(DTensor.from_local(mine, mesh, [Shard(0)], shape=(5, 3), run_check=True), whole)
    x = DTensor.from_local(seeded(0, 3), mesh, [Shard(0)])
    assert x.shape == (0, 3)


@simulate(2)
def test_from_local_refusals():
    mesh = line(2)
    with pytest.raises(
        LayoutError, match=r"DTensor.from_local: local_tensor must be a plain tenso"
    ):
        DTensor.from_local(laid(torch.ones(4), mesh, Shard(0)), mesh, [Shard(0)])
    with pytest.raises(
        LayoutError, match=r"the local shape on rank \d must be .*but got local_sha"
    ):
        DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=(4,))
    with pytest.raises(LayoutError, match=r"Partial\('avg'\) needs a floating point tensor"):
        DTensor.from_local(torch.ones(3, dtype=torch.int64), mesh, [Partial("avg")])
    with pytest.raises(LayoutError, match="placements must be a sequence with one entry per mesh"):
        DTensor.from_local(torch.ones(3), mesh, [Shard(0), Shard(0)])
    with pytest.raises(LayoutError, match="a placement must be a Replicate, Shard or Partial"):
        DTensor.from_local(torch.ones(3), mesh, ["tp"])
    with pytest.raises(LayoutError, match="device_mesh must be a DeviceMesh, but got device_mesh="):
        read_mesh("tp", "here")
    with pytest.raises(LayoutError, match="Pass the mesh from init_device_mesh, or work inside"):
        DTensor.from_local(torch.ones(3))
    with pytest.raises(LayoutError, match=r"device_mesh must have one axis.*Slice it: pass mesh"):
        one_axis_mesh(init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("dp", "tp")), "here")
    with pytest.raises(LayoutError):
        DTensor.from_local(torch.tensor(1.0), mesh, [Shard(0)])


@simulate(2)
def test_clone_and_detach_are_tensors_of_their_own():
    x = laid(seeded(4, 2), line(2), Shard(0))
    copied, alias = x.clone(), x.detach()
    x.zero_()
    same(copied, seeded(4, 2))
    same(alias, torch.zeros(4, 2).to(DTYPE))
    assert x.requires_grad_().detach().requires_grad is False


@simulate(2)
def test_meta_tensors_have_layouts():
    mesh = line(2)
    x = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [Shard(0)])
    assert (x + 1).shape == (4, 3)
    assert x.is_meta
    filled = torch.empty_like(x, device=DEVICE)
    assert filled.device.type == DEVICE
    assert filled.to_local().shape == (2, 3)
