# SPDX-License-Identifier: Apache-2.0
"""to_torch and from_torch: the same storage, the same process groups, both ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor,
    LayoutError,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    simulate,
)
from hyper_parallel.dtensor.interop import (
    from_torch,
    is_torch_dtensor,
    own_parameters,
    sharded_axes,
    to_torch,
)
from support.device import DEVICE


def num_groups():
    return len(torch.distributed.distributed_c10d._world.pg_map)


def there_and_back(shape, placements):
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("up", "down"))
    value = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    ours = distribute_tensor(value, mesh, placements)
    before = num_groups()
    theirs = to_torch(ours)
    back = from_torch(theirs)
    theirs.to_local().add_(1)
    axes = ("up", "down")
    return {
        "torch sees the value": torch.equal(theirs.full_tensor(), value + 1),
        "we see the change": torch.equal(ours.full_tensor(), value + 1),
        "kinds": [is_torch_dtensor(t) for t in (ours, theirs, back, value)]
        == [False, True, False, False],
        "storage": ours.to_local().data_ptr()
        == theirs.to_local().data_ptr()
        == back.to_local().data_ptr(),
        "layout": back.layout == ours.layout and theirs.shape == ours.shape,
        "mesh": theirs.device_mesh is mesh.handle and back.device_mesh is mesh,
        "groups": all(theirs.device_mesh.get_group(a) is mesh.get_group(a) for a in axes),
        "no new group": num_groups() == before,
        "axes": sharded_axes(ours) == sharded_axes(theirs),
    }


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((4, 6), [Shard(0), Shard(1)]),
        ((5, 3), [Shard(0), Shard(0)]),
        ((1, 3), [Replicate(), Shard(0)]),
        ((3,), [Replicate(), Replicate()]),
        ((8,), [Shard(0, block=2), Replicate()]),
    ],
    ids=str,
)
def test_round_trip_on_the_same_storage_and_groups(procs4, shape, placements):
    for found in procs4.run(there_and_back, shape, placements):
        wrong = [name for name, holds in found.items() if not holds]
        # A block shard comes back as the plain one that cuts alike.
        allowed = ["layout"] if any(getattr(p, "block", 1) > 1 for p in placements) else []
        assert wrong == allowed


def users_own():
    """A torch DTensor on a torch mesh that the user made; a pending sum; requires_grad."""
    from torch.distributed import tensor as torch_tensor
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh

    mesh = torch_mesh(DEVICE, (2, 2), mesh_dim_names=("left", "right"))
    theirs = torch_tensor.distribute_tensor(
        torch.arange(12.0).reshape(6, 2), mesh["right"], [torch_tensor.Shard(0)]
    ).requires_grad_()
    before = num_groups()
    ours = from_torch(theirs)
    pending = torch_tensor.DTensor.from_local(torch.ones(2), mesh["left"], [torch_tensor.Partial()])
    assert type(ours) is DTensor
    assert ours.requires_grad
    assert ours.is_leaf
    assert ours.placements == (Shard(0),)
    assert ours.device_mesh.get_group() is mesh["right"].get_group()
    assert to_torch(ours).device_mesh == mesh["right"]
    assert from_torch(pending).placements == (Partial(),)
    with pytest.raises(LayoutError, match="must not be a pending reduction"):
        sharded_axes(pending)
    with pytest.raises(LayoutError, match=r"must be torch's DTensor, but got tensor='Tensor'"):
        from_torch(torch.ones(2))
    mixed = "must be a DTensor of hyper_parallel, but got .*Convert torch's with from_torch"
    with pytest.raises(LayoutError, match=mixed):
        torch.add(ours, theirs.detach())
    assert num_groups() == before
    return torch.equal(ours.full_tensor(), theirs.full_tensor())


def test_a_torch_dtensor_on_the_users_own_mesh(procs4):
    assert procs4.run(users_own) == [True] * 4


def under_fsdp():
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("rows", "parts"))
    whole = [torch.arange(12.0).reshape(6, 2), torch.arange(6.0)]
    net = nn.Linear(2, 6)
    net.weight = nn.Parameter(distribute_tensor(whole[0], mesh["parts"], [Shard(0)]))
    net.bias = nn.Parameter(distribute_tensor(whole[1], mesh["parts"], [Replicate()]))
    fully_shard(net, mesh=mesh["rows"])
    bias = from_torch(net.bias)
    assert torch.equal(bias.full_tensor(), whole[1])
    assert bias.placements == (Shard(0), Replicate())
    assert sharded_axes(net.weight)[1] == (0, 1)
    assert sharded_axes(net.bias)[1] == (0,)
    assert sharded_axes(net.weight)[0] is sharded_axes(net.bias)[0]
    with pytest.raises(LayoutError, match="_StridedShard"):
        from_torch(net.weight)
    net.unshard()
    theirs = net.weight
    with own_parameters(net):
        assert type(net.weight) is DTensor
        assert net.weight.device_mesh is mesh["parts"]
        assert torch.equal(net.weight.full_tensor(), whole[0])
        net.weight.square().sum().backward()
    assert net.weight is theirs
    return torch.equal(net.weight.grad.full_tensor(), 2 * whole[0])


def test_parameters_under_fsdp(procs4):
    assert procs4.run(under_fsdp) == [True] * 4


def test_what_torch_cannot_express_is_refused():
    @simulate(2)
    def run():
        mesh = init_device_mesh(DEVICE, (2,))
        with pytest.raises(LayoutError, match="to_torch: the mesh must be made of torch process"):
            to_torch(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
        return "refused"

    assert run() == ["refused"] * 2


def uneven_blocks():
    mesh = init_device_mesh(DEVICE, (4,), mesh_dim_names=("tp",))
    with pytest.raises(LayoutError, match=r"to_torch: torch must know the placement.*block=2"):
        to_torch(distribute_tensor(torch.ones(10), mesh, [Shard(0, block=2)]))
    return "refused"


def test_blocks_that_torch_would_cut_are_refused(procs4):
    assert procs4.run(uneven_blocks) == ["refused"] * 4


def given_torchs():
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
    theirs = to_torch(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    texts = []
    for call in (distribute_tensor, DTensor.from_local):
        try:
            call(theirs, mesh, [Shard(0)])
        except LayoutError as error:
            texts.append(str(error))
    return texts


def test_torchs_dtensor_is_refused_where_a_plain_tensor_belongs(procs2):
    for texts in procs2.run(given_torchs):
        assert [text.split(":")[0] for text in texts] == ["distribute_tensor", "DTensor.from_local"]
        assert all("to_local()" in text for text in texts)
