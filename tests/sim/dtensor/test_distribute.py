# SPDX-License-Identifier: Apache-2.0
"""distribute_tensor and distribute_module: whose data counts, leaves, refusals, hooks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh, current_rank
from support.device import DEVICE, DTYPE
from support.dtensors import laid, line, part, same, seeded


@pytest.mark.parametrize("shape", [(4, 6), (5, 3), (1, 2), (0, 3)])
@pytest.mark.parametrize("src", [0, 1, None])
def test_distribute_cuts_the_source_ranks_data(shape, src):
    @simulate(4)
    def run():
        mesh = DeviceMesh(DEVICE, [[3, 1], [0, 2]])
        own = seeded(*shape, seed=current_rank() if src is not None else 7)
        source = 7 if src is None else int(mesh.ranks[3 * src])
        for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
            placed = distribute_tensor(own, mesh, placements, src_data_rank=src)
            whole = seeded(*shape, seed=source)
            torch.testing.assert_close(placed.to_local(), part(whole, mesh, placements))
            same(placed, whole)

    run()


@simulate(2)
def test_distribute_to_a_pending_sum():
    for op in ("sum", "avg", "max", "min", "product"):
        same(laid(seeded(5, 3), line(2), Partial(op)), seeded(5, 3))


@simulate(2)
def test_distribute_copies_and_keeps_what_the_tensor_was():
    mesh = line(2)
    whole = seeded(4, 2)
    placed = distribute_tensor(whole, mesh)
    placed.zero_()
    assert whole.abs().sum() > 0
    assert distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).is_leaf
    leaf = distribute_tensor(whole.clone().requires_grad_(), mesh, [Shard(0)])
    assert leaf.requires_grad
    assert leaf.is_leaf
    frozen = distribute_tensor(nn.Parameter(whole, requires_grad=False), mesh, [Shard(0)])
    assert isinstance(frozen, nn.Parameter)
    assert not frozen.requires_grad
    assert distribute_tensor(leaf, mesh, [Shard(0)]) is leaf


@simulate(2)
def test_distribute_refusals():
    mesh = line(2)
    with pytest.raises(LayoutError, match="tensor must be plain, or a DTensor in this very layout"):
        distribute_tensor(laid(seeded(4), mesh, Shard(0)), mesh, [Replicate()])
    with pytest.raises(LayoutError, match=r"distribute_tensor: Partial\('avg'\) needs a floating"):
        distribute_tensor(torch.ones(3, dtype=torch.int64), mesh, [Partial("avg")])
    with pytest.raises(LayoutError):
        distribute_tensor(seeded(4), mesh, [Shard(1)])


@simulate(2)
def test_distribute_module_replicates_the_rest_and_runs_hooks():
    mesh = init_device_mesh(DEVICE, (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).to(DTYPE)
    weight = model[0].weight.detach().clone()

    def partition(name, module, mesh):
        if name == "0":
            module.weight = distribute_tensor(module.weight, mesh, [Shard(0)])

    def inputs(module, given, mesh):
        return tuple(DTensor.from_local(x, mesh) for x in given)

    def outputs(module, result, mesh):
        return result.full_tensor()

    linear = distribute_module(model[0], mesh, None, inputs, outputs)
    assert linear is model[0]
    assert linear.weight.placements == (Replicate(),)
    x = seeded(3, 4)
    torch.testing.assert_close(linear(x), x @ weight.t() + linear.bias.detach().full_tensor())
    other = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    distribute_module(other, mesh, partition)
    assert other[0].weight.placements == (Shard(0),)
    assert isinstance(other[0].weight, nn.Parameter)
    assert other[0].bias.placements == (Replicate(),)
    assert isinstance(other[1].running_mean, DTensor)
    assert [n for n, _ in other.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_tensor_with_a_history_takes_the_source_ranks_data_and_gives_back_whole_gradients():
    def run():
        mesh = init_device_mesh(DEVICE, (2,))
        leaf = torch.full((3, 2), float(mesh.get_local_rank() + 1), requires_grad=True)
        whole = distribute_tensor(leaf * 2, mesh, [Shard(0)])
        (
            whole * distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
        ).sum().backward()
        return whole.full_tensor().detach(), leaf.grad

    for value, grad in simulate(2).run(run):
        assert torch.equal(value, torch.full((3, 2), 2.0))
        assert torch.equal(grad, 2 * torch.arange(6.0).reshape(3, 2))
