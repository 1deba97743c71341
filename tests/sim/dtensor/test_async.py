# SPDX-License-Identifier: Apache-2.0
"""DTensor.redistribute(async_op=True), forward_dtype and backward_dtype.

Simulated collectives are over when they are called, so here their works are made late: until `wait`
the result holds garbage.
"""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, init_device_mesh, simulate
from hyper_parallel.backends._torch import simulated_collectives
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import current_rank
from support.device import DEVICE, DTYPE
from support.dtensors import laid, line, same, seeded

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PLACEMENTS = [R, S0, S1, P, Partial("avg"), Partial("max")]
waits: dict[int, int] = {}
counts: list[int] = []


class LateWork:
    """A work whose result is garbage until it is waited for."""

    def __init__(self, result):
        self.result, self.value = result, result.clone()
        result.fill_(77)

    def wait(self):
        waits[current_rank()] = waits.get(current_rank(), 0) + 1
        return self.result.copy_(self.value)


@pytest.fixture(autouse=True)
def late(monkeypatch):
    waits.clear()
    monkeypatch.setattr(simulated_collectives, "SimulatedWork", LateWork)


def waited():
    return waits.get(current_rank(), 0)


@pytest.mark.parametrize("shape", [(4, 6), (5, 3)])
def test_async_equals_sync_in_value_and_gradient(shape):
    @simulate(3)
    def run():
        mesh = line(3)
        for src, dst in itertools.product(PLACEMENTS, PLACEMENTS):
            results = []
            for async_op in (False, True):
                x = laid(seeded(*shape), mesh, src, requires_grad=True)
                before, between = waited(), x * 2 if not src.is_partial("max") else x.clone()
                moved = between.redistribute(mesh, [dst], async_op=async_op)
                assert waited() == before
                assert (moved.shape, moved.placements) == (torch.Size(shape), (dst,))
                cotangent = laid(seeded(*shape, seed=1), mesh, *moved.layout.cotangent.placements)
                moved.backward(cotangent)
                results.append((moved.detach().to_local(), x.grad.to_local()))
                assert x.grad.layout == x.layout.cotangent
            for sync, late in zip(*results, strict=True):
                assert torch.equal(sync, late)
        assert waited() > 20

    run()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Watched(torch.autograd.Function):
    """Note how often was waited before and after the gradient is first read."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        assert grad.shape == (4, 2)
        counts.append(waited())
        result = grad * 1
        counts.append(waited())
        return result


@pytest.mark.parametrize("async_op", [False, True])
def test_async_leaves_a_gradient_in_flight_until_it_is_read(async_op):
    counts.clear()

    @simulate(2)
    def run():
        mesh = line(2)
        x = laid(seeded(4, 2), mesh, R, requires_grad=True)
        Watched.apply(x * 3).redistribute(mesh, [S0], async_op=async_op).sum().backward()
        same(x.grad, torch.full((4, 2), 3.0).to(DTYPE))

    run()
    assert counts == ([0, 1] * 2 if async_op else [0, 0] * 2)


@simulate(2)
def test_async_waits_for_a_gradient_that_reaches_a_leaf_or_a_hook():
    mesh = line(2)
    x = laid(seeded(4, 2), mesh, R, requires_grad=True)
    x.redistribute(mesh, [S0], async_op=True).sum().backward()
    same(x.grad, torch.ones(4, 2).to(DTYPE))
    seen = []
    y = x * 3
    y.register_hook(lambda grad: seen.append(grad.full_tensor()))
    y.redistribute(mesh, [S0], async_op=True).sum().backward()
    assert torch.equal(seen[0], torch.ones(4, 2).to(DTYPE))
    same(x.grad, torch.full((4, 2), 4.0).to(DTYPE))


READINGS = {
    "to_local": lambda x: x.to_local(),
    "full_tensor": lambda x: x.full_tensor(),
    "op": lambda x: (x + 0).to_local(),
    "reduction": lambda x: x.sum().to_local().expand(4),
    "detach": lambda x: x.detach().to_local(),
    "data": lambda x: x.data.to_local(),
    "clone": lambda x: x.clone().to_local(),
    "deepcopy": lambda x: copy.deepcopy(x).to_local(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)).to_local(),
    "parameter": lambda x: torch.nn.Parameter(x).detach().to_local(),
    "function": lambda x: Doubled.apply(x).to_local() / 2,
    "in place": lambda x: x.add_(0).to_local(),
    "copy": lambda x: torch.zeros_like(x).copy_(x).to_local(),
    "redistribute": lambda x: x.redistribute(x.device_mesh, [S0]).full_tensor(),
    "twice": lambda x: x.redistribute(x.device_mesh, [S0], async_op=True).full_tensor(),
    "set data": lambda x: set_data(x).to_local(),
    "storage": lambda x: torch.empty(0, dtype=DTYPE).set_(x.untyped_storage()),
    "is_contiguous": lambda x: x.to_local() if x.is_contiguous() else None,
}


def set_data(x):
    other = torch.zeros_like(x.detach() * 0)
    other.data = x
    return other


@pytest.mark.parametrize("name", READINGS)
def test_async_result_cannot_be_read_too_early(name):
    @simulate(2)
    def run():
        mesh = line(2)
        rows = DTensor.from_local(torch.ones(4).to(DTYPE) * (current_rank() + 1), mesh, [P])
        total = rows.redistribute(mesh, [R], async_op=True)
        assert total.shape == (4,)
        assert waited() == 0
        read = READINGS[name](total)
        value = 12.0 if name == "reduction" else 3.0
        assert torch.equal(read, torch.full((4,), value).to(DTYPE))
        assert waited() == 1
        assert total.data_ptr() == total.to_local().data_ptr()
        assert waited() == 1

    run()


@simulate(2)
def test_async_result_shows_its_value_and_is_the_storage_it_says():
    mesh = line(2)
    shown = laid(torch.ones(2), mesh, S0).redistribute(mesh, [R], async_op=True)
    assert "tensor([1., 1.]" in repr(shown)
    total = laid(torch.ones(2), mesh, P).redistribute(mesh, [R], async_op=True)
    assert total.data_ptr() == total.to_local().data_ptr()
    version = total._version
    total.mul_(2)
    assert total._version == version + 1
    with pytest.raises(AttributeError, match="'DTensor' object has no attribute 'nothing'"):
        _ = total.nothing


@simulate(4)
def test_async_move_of_several_steps_on_two_axes():
    mesh = init_device_mesh(DEVICE, (2, 2))
    x = laid(seeded(5, 6), mesh, P, S0, requires_grad=True)
    moved = (x * 1).redistribute(mesh, [S1, P], async_op=True)
    same(moved, seeded(5, 6))
    moved.redistribute(mesh, [R, R], async_op=True).sum().backward()
    same(x.grad, torch.ones(5, 6).to(DTYPE))


@simulate(2)
def test_async_without_communication_is_ready():
    mesh = line(2)
    x = laid(torch.arange(4.0), mesh, R)
    assert (
        x.redistribute(mesh, [S0], async_op=True).to_local().tolist()
        == [
            [0.0, 1.0],
            [2.0, 3.0],
        ][current_rank()]
    )
    assert x.redistribute(mesh, [R], async_op=True) is x
    assert waited() == 0


@pytest.mark.parametrize("async_op", [False, True])
def test_forward_dtype_is_that_of_the_result_and_of_what_is_sent(async_op):
    @simulate(2)
    def run():
        mesh = line(2)
        x = laid(seeded(4, 3, dtype=torch.float32), mesh, S0, requires_grad=True)
        half = {"forward_dtype": torch.bfloat16, "async_op": async_op}
        moved = x.redistribute(mesh, [R], **half)
        assert moved.dtype == torch.bfloat16
        assert torch.equal(moved.detach().to_local(), seeded(4, 3).float().bfloat16())
        moved.backward(laid(torch.full((4, 3), 1.0078125), mesh, R).bfloat16())
        assert x.grad.dtype == torch.float32
        assert torch.equal(x.grad.to_local(), torch.full((2, 3), 1.0078125))
        stays = x.redistribute(mesh, [S0], forward_dtype=DTYPE)
        assert (stays.dtype, stays.placements) == (DTYPE, (S0,))
        assert x.redistribute(mesh, [S0], forward_dtype=torch.float32) is x

    run()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("is_leaf", [False, True])
def test_backward_dtype_is_that_of_what_is_sent_back(async_op, is_leaf):
    @simulate(2)
    def run():
        mesh = line(2)
        x = laid(seeded(4, 3, dtype=torch.float32), mesh, R, requires_grad=True)
        between = x if is_leaf else x * 1
        moved = between.redistribute(mesh, [S0], backward_dtype=torch.bfloat16, async_op=async_op)
        assert moved.dtype == torch.float32
        gradient = seeded(4, 3, seed=1, dtype=torch.float32)
        moved.backward(laid(gradient, mesh, S0))
        assert x.grad.dtype == torch.float32
        assert torch.equal(x.grad.to_local(), gradient.bfloat16().float())

    run()


@simulate(2)
def test_casts_that_cannot_be_are_refused():
    mesh = line(2)
    x = laid(torch.ones(4), mesh, Partial("avg"))
    with pytest.raises(LayoutError, match=r"redistribute: Partial\('avg'\) needs a floating point"):
        x.redistribute(mesh, [R], forward_dtype=torch.int32)
    with pytest.raises(LayoutError, match=r"backward_dtype must be a torch.dtype, but got"):
        x.redistribute(mesh, [R], backward_dtype="bfloat16")
    with pytest.raises(LayoutError, match="a gradient is of floating point or complex numbers"):
        x.redistribute(mesh, [R], backward_dtype=torch.int32)
