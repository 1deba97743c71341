# SPDX-License-Identifier: Apache-2.0
"""The styles' signatures are torch's; what they cannot serve is refused with a reason."""

import inspect

import pytest
import torch
import torch.distributed.tensor.parallel as theirs
from torch import nn

import hyper_parallel as ours
from hyper_parallel import (
    ColwiseParallel,
    LayoutError,
    Partial,
    PlanError,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    init_device_mesh,
    simulate,
)
from support.device import DEVICE

NAMES = [
    "ColwiseParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "PrepareModuleInputOutput",
    "parallelize_module",
]


def mesh_of(size):
    return init_device_mesh(DEVICE, (size,))


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_is_torchs_with_keyword_only_additions(name):
    want = inspect.signature(getattr(theirs, name)).parameters
    got = inspect.signature(getattr(ours, name)).parameters
    assert [p for p in got if p in want] == list(want)
    for parameter, theirs_is in want.items():
        assert got[parameter].kind == theirs_is.kind, parameter
        assert got[parameter].default == theirs_is.default, parameter
    for parameter in got.keys() - want.keys():
        assert got[parameter].kind is inspect.Parameter.KEYWORD_ONLY, parameter
        assert got[parameter].default is not inspect.Parameter.empty, parameter


@pytest.mark.parametrize("name", [name for name in NAMES if name != "parallelize_module"])
def test_every_style_is_a_parallel_style_with_a_source(name):
    assert issubclass(getattr(ours, name), ours.ParallelStyle)
    assert getattr(ours, name).src_data_rank == getattr(theirs, name).src_data_rank


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_layouts_are_kept_as_torch_keeps_them(style):
    from torch.distributed.tensor import Replicate as TheirReplicate
    from torch.distributed.tensor import Shard as TheirShard

    made = style(input_layouts=TheirReplicate(), output_layouts=TheirShard(1))
    assert made.input_layouts == (Replicate(),)
    assert made.output_layouts == (Shard(1),)
    defaults = {"ColwiseParallel": (Replicate(), Shard(-1))}
    given, wanted = defaults.get(style.__name__, (Shard(-1), Replicate()))
    assert style().input_layouts == (given,)
    assert style().output_layouts == (wanted,)


@pytest.mark.parametrize("argument", ["input_layouts", "output_layouts"])
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("value", ["R", 1, (Shard(0), Shard(1))], ids=str)
def test_what_is_no_placement_is_refused_by_argument(style, argument, value):
    with pytest.raises(LayoutError, match=rf"{style.__name__}\({argument}=\.\.\.\): a placement"):
        style(**{argument: value})


def test_a_sequence_dim_must_be_an_int():
    with pytest.raises(LayoutError, match="dim must be an int"):
        SequenceParallel(sequence_dim="1")


@pytest.mark.parametrize(
    ("style", "shown"),
    [
        (
            ColwiseParallel(),
            "ColwiseParallel(input_layouts=R, output_layouts=S(-1), use_local_output=True)",
        ),
        (
            RowwiseParallel(output_layouts=Partial(), use_local_output=False),
            "RowwiseParallel(input_layouts=S(-1), output_layouts=P(sum), use_local_output=False)",
        ),
        (SequenceParallel(), "SequenceParallel(sequence_dim=1, use_local_output=False)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_styles_show_their_options(style, shown):
    assert repr(style) == shown


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel, SequenceParallel])
@pytest.mark.parametrize("mesh", [None, "tp", 2, (0, 1)], ids=str)
def test_what_is_no_mesh_is_refused(style, mesh):
    with pytest.raises(LayoutError, match=f"{style.__name__}: device_mesh must be a DeviceMesh"):
        style().apply(nn.Linear(4, 4), mesh)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@simulate(2)
def test_a_computed_weight_is_refused_before_anything_changes(style):
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    want = layer(torch.ones(1, 4))
    with pytest.raises(PlanError, match="the weight must be a parameter of the module itself"):
        style().apply(layer, mesh_of(2))
    assert torch.equal(layer(torch.ones(1, 4)), want)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@simulate(2)
def test_a_pruned_weight_is_refused(style):
    from torch.nn.utils import prune

    layer = prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=2)
    with pytest.raises(PlanError, match="the weight must be a parameter of the module itself"):
        style().apply(layer, mesh_of(2))


@simulate(2)
def test_a_parameter_nobody_knows_how_to_cut_is_refused():
    layer = nn.Linear(4, 4)
    layer.scale = nn.Parameter(torch.ones(4))
    with pytest.raises(PlanError, match=r"must be among \['bias', 'weight'\], but got .*'scale'"):
        ColwiseParallel().apply(layer, mesh_of(2))
    assert type(layer.weight) is nn.Parameter


@simulate(2)
def test_the_weight_stays_what_users_reach_for():
    layer = ColwiseParallel().apply(nn.Linear(4, 6), mesh_of(2))
    assert layer.weight.shape == (6, 4)
    assert layer.bias.shape == (6,)
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.to_local().shape == (3, 4)
    assert layer.weight.to_local().is_contiguous()
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert repr(layer) == "Linear(in_features=4, out_features=6, bias=True)"
    layer = RowwiseParallel().apply(nn.Linear(4, 6, bias=False), mesh_of(2))
    assert layer.bias is None
    assert layer.weight.to_local().is_contiguous()


@pytest.mark.parametrize("kind", ["linear", "embedding"])
@simulate(2)
def test_an_out_of_range_output_dim_names_style_and_module(kind):
    module = nn.Linear(4, 4) if kind == "linear" else nn.Embedding(4, 4)
    net = nn.ModuleDict({"it": module})
    style = ColwiseParallel(output_layouts=Shard(3))
    ours.parallelize_module(net, mesh_of(2), {"it": style})
    x = torch.ones(2, 4) if kind == "linear" else torch.zeros(2, dtype=torch.long)
    with pytest.raises(LayoutError, match=r"^ColwiseParallel on 'it': .*dim"):
        net["it"](x)


@simulate(2)
def test_a_weight_that_is_computed_from_now_on_is_refused_at_use_by_a_linear():
    layer = ColwiseParallel().apply(nn.Linear(4, 4), mesh_of(2))
    layer.weight = layer._parameters.pop("weight").detach() * 2  # as torch.nn.utils.weight_norm
    with pytest.raises(PlanError, match=r"must keep the parameters .*missing=.*weight"):
        layer(torch.ones(2, 4))


@simulate(2)
def test_a_table_that_is_computed_from_now_on_is_used_as_it_lies():
    layer = ColwiseParallel(output_layouts=Replicate()).apply(nn.Embedding(4, 4), mesh_of(2))
    layer.weight = layer._parameters.pop("weight").detach() * 2
    assert torch.equal(layer(torch.tensor([3])), layer.weight.full_tensor()[3:])


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("kind", ["linear", "embedding"])
@simulate(2)
def test_an_input_that_is_no_tensor_is_refused(kind, style):
    module = nn.Linear(4, 4) if kind == "linear" else nn.Embedding(4, 4)
    layer = style(input_layouts=Shard(0)).apply(module, mesh_of(2))
    with pytest.raises(PlanError, match="must be the tensor to shard, but got args=\\('list',\\)"):
        layer([1, 2])


@simulate(2)
def test_a_dtensor_on_another_mesh_is_refused_by_name():
    mesh = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("dp", "tp"))
    for module, x in (
        (nn.Linear(4, 4), torch.ones(2, 4)),
        (nn.Embedding(4, 4), torch.zeros(2, dtype=torch.long)),
    ):
        given = ours.distribute_tensor(x, mesh, [Replicate(), Replicate()])
        layer = ColwiseParallel().apply(module, mesh["tp"])
        with pytest.raises(LayoutError, match="ColwiseParallel: a DTensor input must be on the"):
            layer(given)


@simulate(2)
def test_an_embedding_without_its_weight_is_refused_at_use():
    layer = ColwiseParallel().apply(nn.Embedding(4, 4), mesh_of(2))
    del layer._parameters["weight"]
    with pytest.raises(PlanError, match=r"must keep the parameters .*missing=.*weight"):
        layer(torch.zeros(2, dtype=torch.long))
