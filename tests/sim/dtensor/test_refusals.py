# SPDX-License-Identifier: Apache-2.0
"""What would go wrong silently is refused or made right: lost writes, lost gradients, types."""

from __future__ import annotations

import contextlib
import io
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    DTensor,
    LayoutError,
    Partial,
    PlanError,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from support.device import DEVICE
from support.dtensors import line

LIB = torch.library.Library("hp_writes", "FRAGMENT")
LIB.define("scale_(Tensor(a!) x, float factor) -> ()")
LIB.define("scale_quietly(Tensor(a!) x, float factor) -> ()")
LIB.impl("scale_quietly", lambda x, factor: x.mul_(factor) and None, "CompositeExplicitAutograd")


def four(mesh):
    return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])


@simulate(2)
def test_a_plain_scalar_that_needs_a_gradient_gets_all_of_it():
    mesh = line(2)
    scale, shift = (nn.Parameter(torch.tensor(value)) for value in (2.0, 3.0))
    (four(mesh) * scale + shift).square().sum().backward()
    whole, other = (torch.tensor(value, requires_grad=True) for value in (2.0, 3.0))
    (torch.arange(4.0) * whole + other).square().sum().backward()
    torch.testing.assert_close(scale.grad, whole.grad)
    torch.testing.assert_close(shift.grad, other.grad)


@pytest.mark.filterwarnings("ignore:DTensor op")
@simulate(2)
def test_a_custom_op_that_writes_into_a_shard_is_refused():
    with pytest.raises(LayoutError, match="must not write into a DTensor that is not replicated"):
        torch.ops.hp_writes.scale_quietly(four(line(2)), 3.0)


@simulate(2)
def test_an_overload_of_an_in_place_op_is_in_place():
    x = four(line(2))
    torch.ops.aten.mul_.Scalar(x, 3.0)
    assert x.full_tensor().tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
@simulate(2)
def test_running_statistics_are_updated_wherever_they_lie(norm):
    mesh, shape = line(2), (6, 4) if norm == "batch_norm" else (6, 4, 2)
    whole = torch.arange(24.0 * (len(shape) - 1)).view(shape) ** 0.5
    option = {"training" if norm == "batch_norm" else "use_input_stats": True}
    run = partial(getattr(F, norm), **option)
    for at, lies in itertools.product(
        (Shard(0), Shard(1), Replicate()), (Shard(0), Replicate(), Partial())
    ):
        means, variances = torch.arange(4.0), torch.arange(4.0)
        x = distribute_tensor(whole, mesh, [at])
        mean, variance = (distribute_tensor(means, mesh, [lies]) for _ in range(2))
        for _ in range(2):
            expected = run(whole, means, variances)
            torch.testing.assert_close(run(x, mean, variance).full_tensor(), expected)
        torch.testing.assert_close(mean.full_tensor(), means)
        torch.testing.assert_close(variance.full_tensor(), variances)
        assert mean.placements == (lies,)


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x.narrow(1, 0, 2), lambda x: x[:, :2]])
@pytest.mark.filterwarnings("ignore:DTensor op")
def test_a_contiguous_copy_of_a_view_is_a_copy(view):
    def run():
        x = distribute_tensor(torch.arange(8.0).reshape(2, 4), line(2), [Shard(0)])
        with contextlib.suppress(LayoutError):  # refused: nothing is lost either
            view(x).contiguous().mul_(2)
        return x.full_tensor()

    for value in simulate(2).run(run):
        assert torch.equal(value, torch.arange(8.0).reshape(2, 4))


@simulate(2)
def test_torch_load_reads_a_dtensor_by_default():
    x = four(line(2))
    file = io.BytesIO()
    torch.save({"w": x}, file)
    file.seek(0)
    loaded = torch.load(file)["w"]
    assert loaded.placements == x.placements
    assert torch.equal(loaded.to_local(), x.to_local())


WRONG = {
    "distribute_tensor of a list": lambda mesh: distribute_tensor([1.0], mesh),
    "from_local of None": lambda mesh: DTensor.from_local(None, mesh),
    "from_local with a shape that is none": lambda mesh: DTensor.from_local(
        torch.ones(2), mesh, shape=8
    ),
    "a source that is not there": lambda mesh: distribute_tensor(
        torch.ones(4), mesh, [Shard(0)], src_data_rank=5
    ),
    "a mesh shape that is a number": lambda mesh: init_device_mesh(DEVICE, 2),
    "a slice by position": lambda mesh: mesh[0],
    "a model that is none": lambda mesh: parallelize_module("net", mesh, {}),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_arguments_of_a_wrong_kind_are_refused_in_our_words(call):
    def run():
        mesh = line(2)
        with pytest.raises((LayoutError, PlanError), match=r"but got .*=.*\. [A-Z]"):
            call(mesh)

    simulate(2).run(run)
