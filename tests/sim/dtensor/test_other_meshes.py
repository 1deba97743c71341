# SPDX-License-Identifier: Apache-2.0
"""DTensor.redistribute to a mesh of other ranks, with its gradient; ranks outside of either."""

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
from hyper_parallel.errors import LayoutError, PlanError
from support.device import DEVICE, DTYPE
from support.dtensors import same, seeded

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS = [
    ([0, 1], [2, 3]),
    ([[0, 1], [2, 3]], [3, 1, 4]),
    ([1, 2], [[0, 1], [2, 3]]),
    ([[3, 0], [1, 2]], [2]),
]


def values(tensor):
    """Give the whole value on the ranks of the mesh, None elsewhere."""
    inside = tensor.device_mesh.get_coordinate() is not None
    return tensor.full_tensor() if inside else None


@pytest.mark.parametrize("src_ranks, dst_ranks", PAIRS, ids=str)
@simulate(6)
def test_redistribute_and_its_gradient(src_ranks, dst_ranks):
    meshes = DeviceMesh(DEVICE, src_ranks), DeviceMesh(DEVICE, dst_ranks)
    whole, weight = seeded(5, 4), seeded(5, 4, seed=1)
    options = [list(itertools.product((R, S0, S1, P), repeat=mesh.ndim)) for mesh in meshes]
    for src, dst in list(itertools.product(*options))[::3]:
        x = distribute_tensor(whole, meshes[0], src).requires_grad_()
        factor = distribute_tensor(weight, meshes[1], [R] * meshes[1].ndim)
        moved = x.redistribute(meshes[1], dst)
        assert moved.layout.mesh is meshes[1] and moved.shape == whole.shape
        assert tuple(moved.to_local().shape) == moved.layout.local_shape(meshes[1].get_rank())
        if meshes[1].get_coordinate() is not None:
            same(moved, whole)
        (factor * moved).sum().backward()
        assert x.grad.placements == x.layout.cotangent.placements
        if meshes[0].get_coordinate() is not None:
            same(x.grad, weight)


@simulate(5)
def test_two_stages_train_as_one_process():
    """Stage 0 on ranks 0 and 1, stage 1 on ranks 2 to 4, the loss back on stage 0."""
    first, second = DeviceMesh(DEVICE, [0, 1]), DeviceMesh(DEVICE, [4, 2, 3])
    weights = seeded(6, 6), seeded(6, 6, seed=1)
    x, target = seeded(3, 6, seed=2), seeded(3, 6, seed=3)

    plain = [w.clone().requires_grad_() for w in weights]
    loss = ((x @ plain[0]).relu() @ plain[1] - target).square().sum()
    loss.backward()

    a = distribute_tensor(weights[0].requires_grad_(), first, [S1])
    b = distribute_tensor(weights[1].requires_grad_(), second, [S0])
    hidden = (distribute_tensor(x, first, [R]) @ a).relu()
    out = hidden.redistribute(second, [S1]) @ b
    ours = (out.redistribute(second, [R]) - distribute_tensor(target, second, [R])).square().sum()
    back = ours.redistribute(first, [R])
    assert back.shape == ()
    ours.backward()
    for mesh, tensor, expected in (
        (first, back, loss.detach()),
        (first, a.grad, plain[0].grad),
        (second, b.grad, plain[1].grad),
    ):
        if mesh.get_coordinate() is not None:
            same(tensor, expected)


@simulate(4)
def test_a_rank_that_only_joins_has_a_handle_and_one_that_only_leaves_enters_backward():
    first, second = DeviceMesh(DEVICE, [0, 1]), DeviceMesh(DEVICE, [2, 3])
    whole = seeded(4, 3)
    if first.get_coordinate() is not None:
        x = distribute_tensor(whole.requires_grad_(), first, [S0])
        moved = x.redistribute(second, [S1])
        moved.backward(torch.zeros_like(moved))
        same(x.grad, torch.full((4, 3), 2.0).to(DTYPE))
    else:
        nothing = torch.empty(0, dtype=whole.dtype, requires_grad=True)
        x = DTensor.from_local(nothing, first, [S0], shape=(4, 3))
        moved = x.redistribute(second, [S1])
        same(moved, whole)
        (moved * 2).sum().backward()
        assert nothing.grad.shape == (0,)


@simulate(3)
def test_a_rank_outside_holds_nothing_whatever_it_passes():
    mesh = DeviceMesh(DEVICE, [1, 0])
    local = torch.ones(2, 3, requires_grad=True)
    x = DTensor.from_local(local, mesh, [P])
    x.sum().redistribute(mesh, [R]).backward()
    outside = mesh.get_coordinate() is None
    assert tuple(x.to_local().shape) == ((0,) if outside else (2, 3))
    assert torch.equal(local.grad, torch.zeros(2, 3) if outside else torch.ones(2, 3))


@simulate(3)
def test_the_same_gradients_flow_outside_the_mesh_as_inside():
    """What needs no gradient inside must not enter a move backward outside, and the reverse."""
    first, second = DeviceMesh(DEVICE, [0]), DeviceMesh(DEVICE, [1, 2])
    x = distribute_tensor(seeded(4, 2).requires_grad_(), first, [R])
    moved = x.redistribute(second, [S0])
    w = distribute_tensor(seeded(2, 4, seed=1).requires_grad_(), second, [R])
    (w @ moved + torch.zeros_like(moved).narrow(0, 0, 2).sum() + (moved > 0).sum()).sum().backward()
    if first.get_coordinate() is not None:
        plain = seeded(4, 2).requires_grad_()
        (seeded(2, 4, seed=1) @ plain).sum().backward()
        same(x.grad, plain.grad)


@simulate(4)
def test_a_rank_outside_the_mesh_is_refused_a_value():
    first, second = DeviceMesh(DEVICE, [0, 1]), DeviceMesh(DEVICE, [2, 3])
    moved = distribute_tensor(seeded(4), first, [S0]).redistribute(second, [S0])
    if second.get_coordinate() is not None:
        return
    text = r"only a rank of the mesh may ask for a value, but got .*rank \d not in mesh: guard it"
    with pytest.raises(LayoutError, match=r"DTensor.full_tensor: " + text):
        moved.full_tensor()
    with pytest.raises(LayoutError, match=r"DTensor op 'item': " + text):
        moved.sum().item()
    with pytest.raises(LayoutError, match=r"rank that is not in the mesh must pass the global sha"):
        DTensor.from_local(torch.empty(0), second, [S0])


@simulate(4)
def test_a_slice_is_refused_on_every_rank():
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(seeded(4), mesh, [S0, S0])
    text = r"DTensor.redistribute: a mesh of other ranks must be the same mesh on every rank, not a"
    with pytest.raises(PlanError, match=text):
        x.redistribute(mesh["tp"], [S0])
    row = distribute_tensor(seeded(4), mesh["tp"], [S0])
    for other in (mesh, mesh["dp"]):
        with pytest.raises(PlanError, match=text):
            row.redistribute(other, [R] * other.ndim)
    same(x.redistribute(mesh["dp", "tp"].flatten(), [S0]), seeded(4))


@simulate(4)
def test_a_move_to_another_mesh_may_stay_in_flight():
    first, second = DeviceMesh(DEVICE, [0, 1]), DeviceMesh(DEVICE, [1, 2])
    whole = seeded(5, 4)
    x = distribute_tensor(whole, first, [S0]).requires_grad_()
    moved = x.redistribute(second, [S1], async_op=True, backward_dtype=torch.float32)
    assert moved.shape == whole.shape
    (moved * 3).sum().backward()
    if second.get_coordinate() is not None:
        same(moved, whole)
    else:
        assert moved.to_local().shape == (0,)
    if first.get_coordinate() is not None:
        same(x.grad, torch.full_like(whole, 3))
