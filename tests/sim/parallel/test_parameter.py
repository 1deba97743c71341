# SPDX-License-Identifier: Apache-2.0
"""The parameters of a fused parallel Linear are ordinary autograd leaves, promise by promise."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    RowwiseParallel,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from support.device import DEVICE, DTYPE, TOLERANCE

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def pair():
    """Give a dense net, its parallel copy, and an input."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(DTYPE)
    ours = copy.deepcopy(dense)
    parallelize_module(ours, init_device_mesh(DEVICE, (2,)), PLAN)
    return dense, ours, torch.randn(3, 6, dtype=DTYPE)


def loss_of(net, x):
    return net(x).square().sum()


def same(ours, dense):
    assert isinstance(ours, DTensor)
    torch.testing.assert_close(
        ours.full_tensor(), dense, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE]
    )


def same_grads(ours, dense):
    for p, q in zip(ours.parameters(), dense.parameters(), strict=True):
        same(p.grad, q.grad)


@simulate(2)
def test_backward_to_some_inputs_only():
    dense, ours, x = pair()
    loss_of(dense, x).backward(inputs=[dense[0].weight])
    loss_of(ours, x).backward(inputs=[ours[0].weight])
    same(ours[0].weight.grad, dense[0].weight.grad)
    assert ours[0].bias.grad is ours[2].weight.grad is None


@simulate(2)
def test_autograd_grad_gives_dtensors_and_accumulates_nothing():
    dense, ours, x = pair()
    wanted = torch.autograd.grad(loss_of(dense, x), list(dense.parameters()))
    found = torch.autograd.grad(loss_of(ours, x), list(ours.parameters()))
    for p, q in zip(found, wanted, strict=True):
        same(p, q)
    assert all(p.grad is None for p in ours.parameters())


@simulate(2)
def test_a_hook_sees_and_replaces_the_gradient():
    dense, ours, x = pair()
    seen = []
    for net in (dense, ours):
        net[0].weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
        loss_of(net, x).backward()
    same(seen[1], seen[0])
    same(ours[0].weight.grad, dense[0].weight.grad)


@simulate(2)
def test_a_post_accumulate_hook_runs_once_with_the_parameter():
    _, ours, x = pair()
    calls = []
    ours[2].weight.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    loss_of(ours, x).backward()
    assert len(calls) == 1
    assert calls[0] is ours[2].weight
    assert calls[0].grad is not None


@simulate(2)
def test_a_frozen_parameter_gets_no_gradient():
    dense, ours, x = pair()
    for net in (dense, ours):
        net[0].weight.requires_grad_(False)
        loss_of(net, x).backward()
    assert ours[0].weight.grad is None
    same(ours[0].bias.grad, dense[0].bias.grad)


@simulate(2)
def test_a_net_moved_to_another_dtype_trains():
    dense, ours, x = pair()
    for net in (dense, ours):
        net.to(torch.float32)
        loss_of(net, x.float()).backward()
    for p, q in zip(ours.parameters(), dense.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-5)


@simulate(2)
def test_new_data_is_used_and_trained():
    dense, ours, x = pair()
    for net in (dense, ours):
        weight = net[0].weight
        weight.data = weight.data * 3
        loss_of(net, x).backward()
    same_grads(ours, dense)


@simulate(2)
def test_a_deep_copy_trains_alone():
    dense, ours, x = pair()
    twin = copy.deepcopy(ours)
    loss_of(dense, x).backward()
    loss_of(twin, x).backward()
    same_grads(twin, dense)
    assert all(p.grad is None for p in ours.parameters())
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    same(ours[0].weight.detach(), dense[0].weight.detach())


@simulate(2)
def test_a_loaded_state_is_used_and_trained():
    _, ours, x = pair()
    other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(DTYPE)
    ours.load_state_dict(other.state_dict())  # whole tensors: every rank takes its part
    loss_of(other, x).backward()
    loss_of(ours, x).backward()
    same_grads(ours, other)
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    torch.testing.assert_close(loss_of(ours, x), loss_of(other, x))


class Penalty(torch.autograd.Function):
    """A user's own Function of a parameter: half its squared norm."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return (weight * weight).sum() / 2

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return weight * grad


@pytest.mark.parametrize("name", ["0.weight", "2.weight", "2.bias"])
def test_a_users_function_adds_its_gradient_to_that_of_the_layer(name):
    def run():
        dense, ours, x = pair()
        for net in (dense, ours):
            penalty = Penalty.apply(net.get_parameter(name))
            if isinstance(penalty, DTensor):
                penalty = penalty.full_tensor()
            (loss_of(net, x) + penalty).backward()
        same_grads(ours, dense)

    simulate(2).run(run)


@simulate(2)
def test_three_backwards_accumulate():
    dense, ours, x = pair()
    for net in (dense, ours):
        for scale in (1, 2, 3):
            loss_of(net, x * scale).backward()
    same_grads(ours, dense)
