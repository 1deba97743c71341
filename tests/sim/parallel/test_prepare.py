# SPDX-License-Identifier: Apache-2.0
"""PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput: torch's arguments, moves."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor,
    LayoutError,
    Partial,
    PlanError,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    Shard,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from support.dense import assert_same, cut_cotangent, spread
from support.device import DEVICE, DTYPE

PLACES = [Replicate(), Shard(0), Shard(1), Shard(-1), Partial()]


def mesh_of(size):
    return init_device_mesh(DEVICE, (size,))


class Seen(nn.Module):
    """Keep the arguments, and give what it is told to."""

    def __init__(self, result=None):
        super().__init__()
        self.result = result

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        if self.result is None:
            return args[0] if args else None
        return self.result(*args, **kwargs)


def part(x, place, mesh):
    return spread(x, place, mesh.get_local_rank(), mesh.size())


def value_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("desired", PLACES, ids=repr)
@pytest.mark.parametrize("declared", PLACES, ids=repr)
@pytest.mark.parametrize("side", ["input", "output"])
@simulate(3)
def test_values_and_gradients_pass_every_pair_of_layouts(side, declared, desired, local):
    mesh = mesh_of(3)
    rank = mesh.get_local_rank()
    torch.manual_seed(0)
    x, grad = (torch.randn(4, 5, 2, dtype=DTYPE) for _ in range(2))
    if side == "input":
        style = PrepareModuleInput(
            input_layouts=declared, desired_input_layouts=desired, use_local_output=local
        )
    else:
        style = PrepareModuleOutput(
            output_layouts=declared, desired_output_layouts=desired, use_local_output=local
        )
    module = style.apply(nn.Identity(), mesh)
    leaf = part(x, declared, mesh).requires_grad_()
    y = module(leaf)
    if local:
        assert type(y) is torch.Tensor
        whole = DTensor.from_local(y.detach(), mesh, [desired], shape=x.shape).full_tensor()
    else:
        assert (
            y.layout.placements
            == DTensor.from_local(part(x, desired, mesh), mesh, [desired], shape=x.shape).placements
        )
        whole = y.detach().full_tensor()
        y = y.to_local()
    assert_same(whole, x)
    y.backward(cut_cotangent(grad, desired, rank, 3))
    assert_same(leaf.grad, cut_cotangent(grad, declared, rank, 3))


@simulate(2)
def test_none_entries_and_what_is_no_tensor_pass_as_they_are():
    mesh = mesh_of(2)
    style = PrepareModuleInput(
        input_layouts=(Shard(0), None, None, Shard(0)),
        desired_input_layouts=(Replicate(), None, Replicate(), None),
    )
    module = style.apply(Seen(), mesh)
    mask, x = torch.ones(2), torch.ones(2, 3)
    module(x, mask, "text", x)
    first, second, third, fourth = module.args
    assert first.placements == (Replicate(),)
    assert first.shape == (4, 3)
    assert second is mask
    assert third == "text"
    assert fourth.placements == (Shard(0),)


@simulate(2)
def test_a_dtensor_is_moved_from_where_it_says_it_is():
    mesh = mesh_of(2)
    style = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Shard(0), use_local_output=True
    )
    module = style.apply(Seen(), mesh)
    x = torch.arange(8.0).reshape(4, 2)
    given = DTensor.from_local(part(x, Shard(1), mesh), mesh, [Shard(1)], shape=x.shape)
    assert_same(module(given), part(x, Shard(0), mesh))


@simulate(2)
def test_keyword_inputs_are_moved_by_name():
    mesh = mesh_of(2)
    style = PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(0), "mask": Replicate()},
        desired_input_kwarg_layouts={"x": Replicate(), "mask": Shard(0)},
        use_local_output=True,
    )
    module = style.apply(Seen(), mesh)
    x, other = torch.ones(2, 3), torch.ones(1)
    module(other, x=x, scale=other)
    assert module.args == (other,)
    assert module.kwargs["x"].shape == (4, 3)
    assert module.kwargs["scale"] is other
    module(x=x, mask=None)  # an optional input that is absent
    assert module.kwargs["mask"] is None


@simulate(2)
def test_positional_and_keyword_inputs_together():
    mesh = mesh_of(2)
    style = PrepareModuleInput(
        input_layouts=(Shard(0),),
        desired_input_layouts=(Replicate(),),
        input_kwarg_layouts={"mask": Shard(1)},
        desired_input_kwarg_layouts={"mask": Replicate()},
    )
    module = style.apply(Seen(), mesh)
    module(torch.ones(2, 3), mask=torch.ones(3, 2))
    assert module.args[0].shape == (4, 3)
    assert module.kwargs["mask"].shape == (3, 4)


@simulate(2)
def test_a_tuple_of_outputs_with_none_entries():
    mesh = mesh_of(2)
    style = PrepareModuleOutput(
        output_layouts=(Shard(0), None, Replicate()),
        desired_output_layouts=(Replicate(), None, Shard(0)),
    )
    module = style.apply(Seen(lambda x: (x, "kept", torch.ones(2, 2))), mesh)
    first, second, third = module(torch.ones(2, 3))
    assert first.shape == (4, 3)
    assert second == "kept"
    assert third.shape == (1, 2)


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@simulate(2)
def test_outputs_come_back_as_torch_gives_them():
    mesh = mesh_of(2)
    one = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    x = torch.ones(2, 3)
    assert one.apply(Seen(lambda x: (x,)), mesh)(x).shape == (4, 3)  # a tuple of one: bare
    two = PrepareModuleOutput(
        output_layouts=(Shard(0), None), desired_output_layouts=(Replicate(), None)
    )
    result = two.apply(Seen(lambda x: Pair(x, x)), mesh)(x)
    assert type(result) is tuple
    assert result[0].shape == (4, 3)


@simulate(2)
def test_inputs_and_outputs_in_one():
    mesh = mesh_of(2)
    style = PrepareModuleInputOutput(
        input_layouts=(Shard(0), None),
        desired_input_layouts=(Replicate(), None),
        input_kwarg_layouts={"mask": Shard(0)},
        desired_input_kwarg_layouts={"mask": Replicate()},
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
        use_local_output=False,
    )
    module = style.apply(Seen(), mesh)
    y = module(torch.ones(2, 4), 3, mask=torch.ones(2))
    assert type(module.args[0]) is torch.Tensor
    assert module.args[0].shape == (4, 4)
    assert module.args[1] == 3
    assert module.kwargs["mask"].shape == (4,)
    assert y.placements == (Shard(1),)


@simulate(2)
def test_by_default_modules_see_dtensors_and_callers_plain_tensors():
    mesh = mesh_of(2)
    style = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(0),
        output_layouts=Shard(0),
        desired_output_layouts=Replicate(),
    )
    module = style.apply(Seen(), mesh)
    x = torch.randn(3, 2)
    assert_same(module(x), x)
    assert module.args[0].placements == (Shard(0),)


def a_style(side, **options):
    if side == "input":
        return PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None), **options
        )
    return PrepareModuleOutput(
        output_layouts=(Replicate(), None), desired_output_layouts=(Replicate(), None), **options
    )


@pytest.mark.parametrize("side", ["input", "output"])
@simulate(2)
def test_one_entry_for_each_input_and_output_is_needed(side):
    net = nn.Sequential(Seen())
    parallelize_module(net, mesh_of(2), {"0": a_style(side)})
    text = rf"PrepareModule\w+ on '0': {side}_layouts must have one entry per .*{side}s=1"
    with pytest.raises(PlanError, match=text):
        net[0](torch.ones(2))


@pytest.mark.parametrize("side", ["input", "output"])
@simulate(2)
def test_a_layout_for_what_is_no_tensor_is_refused_by_name(side):
    net = nn.Sequential(Seen(lambda *args: args))
    parallelize_module(net, mesh_of(2), {"0": a_style(side)})
    text = r"PrepareModule\w+ on '0': what has a layout must be a tensor, but got layout=R"
    with pytest.raises(PlanError, match=text):
        net[0](3.0, 4)
    assert net[0](None, 4) == (None, 4)


@pytest.mark.parametrize(
    ("style", "options"),
    [
        (PrepareModuleInput, {"input_layouts": Shard(0)}),
        (PrepareModuleInput, {"desired_input_layouts": Shard(0)}),
        (
            PrepareModuleInput,
            {"input_layouts": (Shard(0), None), "desired_input_layouts": (Shard(0),)},
        ),
        (PrepareModuleInput, {"input_kwarg_layouts": {"x": Shard(0)}}),
        (
            PrepareModuleInput,
            {
                "input_kwarg_layouts": {"x": Shard(0)},
                "desired_input_kwarg_layouts": {"y": Shard(0)},
            },
        ),
        (
            PrepareModuleOutput,
            {"output_layouts": (Shard(0), None), "desired_output_layouts": Shard(0)},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None) or " ".join(value),
)
def test_declared_and_desired_layouts_must_match(style, options):
    with pytest.raises(PlanError, match=f"{style.__name__}: .* must match, but got"):
        style(**options)


def test_what_is_no_placement_is_refused():
    with pytest.raises(LayoutError, match="PrepareModuleInput: a placement must be"):
        PrepareModuleInput(input_layouts="R", desired_input_layouts=Replicate())
    with pytest.raises(LayoutError, match="PrepareModuleOutput: a placement must be"):
        PrepareModuleOutput(output_layouts=0, desired_output_layouts=Replicate())


def test_styles_show_their_options():
    style = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    assert repr(style).startswith("PrepareModuleInput(input_layouts=(S(1),), desired_input_layouts")
    style = PrepareModuleInputOutput(
        output_layouts=Shard(1), desired_output_layouts=(Replicate(),), use_local_output=False
    )
    assert "output_layouts=(S(1),), desired_output_layouts=(R,), use_local_output=False" in repr(
        style
    )


class Masked(nn.Module):
    """A module with a keyword input."""

    def forward(self, x, mask=None):
        return x if mask is None else x * mask


def masked_style(name):
    return PrepareModuleInput(
        input_kwarg_layouts={name: Shard(0)}, desired_input_kwarg_layouts={name: Replicate()}
    )


@simulate(2)
def test_a_misspelt_keyword_is_refused_when_the_style_is_applied():
    with pytest.raises(PlanError, match=r"must name arguments of .* Did you mean 'mask'"):
        masked_style("maskk").apply(Masked(), init_device_mesh(DEVICE, (2,)))


@simulate(2)
def test_a_keyword_input_passed_by_position_is_refused():
    net = masked_style("mask").apply(Masked(), init_device_mesh(DEVICE, (2,)))
    with pytest.raises(PlanError, match="must be passed by keyword"):
        net(torch.ones(2), torch.ones(2))
