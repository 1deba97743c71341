# SPDX-License-Identifier: Apache-2.0
"""parallelize_module: which modules a plan names, ties, sources of data, and what is refused."""

import copy

import pytest
import torch
import torch.distributed.tensor.parallel as theirs
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    LayoutError,
    PlanError,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from support.dense import assert_same
from support.device import DEVICE, DTYPE


def mesh_of(*shape):
    names = ("dp", "tp")[-len(shape) :]
    return init_device_mesh(DEVICE, shape, mesh_dim_names=names)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wo = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.wo(self.wq(x) + self.wk(x))


class Net(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sharded(net):
    """Name the modules whose weight is a DTensor."""
    return [
        name for name, m in net.named_modules() if isinstance(getattr(m, "weight", None), DTensor)
    ]


LAYER_PLAN = {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wo": RowwiseParallel()}


def check_equal(net, dense):
    ids = torch.tensor([[0, 5, 2], [3, 3, 1]])
    outs = []
    for model in (dense, net):
        out = model(ids)
        out.square().sum().backward()
        outs.append(out.detach())
    assert_same(outs[1], outs[0])
    parallel = dict(net.named_parameters())
    for name, param in dense.named_parameters():
        grad = parallel[name].grad
        assert_same(grad.full_tensor() if isinstance(grad, DTensor) else grad, param.grad, name)


# ---------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.*.wq", ["layers.0.wq", "layers.1.wq", "layers.2.wq"]),
        ("layers.[01].wo", ["layers.0.wo", "layers.1.wo"]),
        ("layers.?.w[qk]", [f"layers.{i}.w{c}" for i in range(3) for c in "qk"]),
        ("layers.1.*", ["layers.1.wq", "layers.1.wk", "layers.1.wo"]),
        ("layers.[!0].wk", ["layers.1.wk", "layers.2.wk"]),
        ("head", ["head"]),
        ("*", []),
    ],
)
@simulate(2)
def test_a_pattern_names_modules_part_by_part(pattern, names):
    net = Net()
    if pattern == "*":  # one part never reaches further in
        net = net.layers[0]
        names = ["wq", "wk", "wo"]
    parallelize_module(net, mesh_of(2), {pattern: ColwiseParallel()})
    assert sharded(net) == names


@simulate(2)
def test_a_style_alone_and_the_empty_key_are_the_module_itself():
    for plan in (ColwiseParallel(), {"": ColwiseParallel()}):
        layer = nn.Linear(4, 4)
        assert parallelize_module(layer, mesh_of(2), plan) is layer
        assert layer.weight.placements == (Shard(0),)


@pytest.mark.parametrize("src_data_rank", [0, 1])
@simulate(2)
def test_the_empty_key_takes_its_data_from_the_same_rank(src_data_rank):
    mesh = mesh_of(2)
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, mesh.get_local_rank())
    parallelize_module(layer, mesh, {"": ColwiseParallel()}, src_data_rank=src_data_rank)
    assert (layer.weight.to_local() == src_data_rank).all()


@simulate(2)
def test_a_root_plan_and_then_one_for_each_layer():
    torch.manual_seed(0)
    dense = Net().to(DTYPE)
    mesh = mesh_of(2)
    net = copy.deepcopy(dense)
    parallelize_module(
        net,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    for layer in net.layers:
        parallelize_module(layer, mesh, LAYER_PLAN)
    check_equal(net, dense)


@simulate(2)
def test_styles_run_in_the_order_of_the_plan():
    class Note(ColwiseParallel):
        def apply(self, module, device_mesh):
            seen.append(self.where())
            return super().apply(module, device_mesh)

    seen = []
    parallelize_module(Layer(), mesh_of(2), {"wk": Note(), "wo": Note(), "wq": Note()})
    assert seen == ["Note on 'wk'", "Note on 'wo'", "Note on 'wq'"]


@simulate(2)
def test_inputs_pass_through_the_styles_of_one_module_in_the_order_applied():
    # As torch's hooks: first the cut sequence is gathered, then the layer takes it as replicated.
    torch.manual_seed(0)
    mesh = mesh_of(2)
    dense = nn.Linear(4, 6)
    plan = {
        "0": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        "[0]": ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
        "?": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
    }
    net = parallelize_module(nn.Sequential(copy.deepcopy(dense)), mesh, plan)
    x = torch.randn(4, 4)
    rows = slice(0, 2) if mesh.get_local_rank() == 0 else slice(2, 4)
    assert_same(net(x[rows]), dense(x)[rows])


@simulate(2)
def test_a_module_under_two_names_is_styled_once():
    shared = nn.Linear(4, 4)
    net = nn.ModuleDict({"a": shared, "b": shared})
    parallelize_module(net, mesh_of(2), {"*": ColwiseParallel()})
    assert net["a"](torch.ones(1, 4)).shape == (1, 2)
    other = nn.Linear(4, 4)
    net = nn.ModuleDict({"a": other, "b": other})
    with pytest.raises(PlanError, match="one pattern at most may shard module 'b'"):
        parallelize_module(net, mesh_of(2), {"a": ColwiseParallel(), "b": RowwiseParallel()})
    parallelize_module(net, mesh_of(2), {"b": ColwiseParallel()})
    assert isinstance(other.weight, DTensor)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("layers.0.wqq", "layers.0.wq"),
        ("layer.0.wq", "layers.0.wq"),
        ("layers.3.wq", "layers.0.wq"),
        ("haed", "head"),
        ("layers.0.wq.weight", "layers.0.wq"),
        ("layers..wq", "layers.0.wq"),
    ],
)
@simulate(2)
def test_a_key_that_matches_nothing_names_what_is_near(key, near):
    net = Net()
    with pytest.raises(PlanError) as caught:
        parallelize_module(net, mesh_of(2), {"head": ColwiseParallel(), key: ColwiseParallel()})
    text = str(caught.value)
    assert text.startswith("parallelize_module: every key of parallelize_plan must match a module")
    assert f"key={key!r}" in text
    assert repr(near) in text
    assert sharded(net) == []  # nothing was done before


@simulate(2)
def test_a_key_that_matches_nothing_may_warn():
    net = Net()
    plan = {"layers.9.wq": ColwiseParallel(), "head": ColwiseParallel()}
    with pytest.warns(UserWarning, match=r"key='layers\.9\.wq'") as caught:
        parallelize_module(net, mesh_of(2), plan, strict=False)
    assert caught[0].filename == __file__
    assert sharded(net) == ["head"]


@pytest.mark.parametrize("plan", [None, {}], ids=str)
@simulate(2)
def test_no_plan_warns(plan):
    net = Net()
    with pytest.warns(UserWarning, match="no parallelize_plan was given") as caught:
        assert parallelize_module(net, mesh_of(2), plan) is net
    assert caught[0].filename == __file__
    assert sharded(net) == []


@simulate(2)
def test_a_key_without_a_style_warns_as_torch_does():
    net = Net()
    with pytest.warns(UserWarning, match="key 'norm' has no style"):
        parallelize_module(net, mesh_of(2), {"norm": None, "head": ColwiseParallel()})
    assert sharded(net) == ["head"]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"head": "colwise!"}, "key='head', value='colwise!'"),
        ({"head": ColwiseParallel}, "key='head', value=<class"),
        ({0: ColwiseParallel()}, "key=0"),
        ([ColwiseParallel()], r"parallelize_plan=\[ColwiseParallel"),
        (ColwiseParallel, "parallelize_plan=<class"),
    ],
    ids=str,
)
@simulate(2)
def test_a_plan_of_the_wrong_type_is_refused(plan, text):
    with pytest.raises(PlanError, match=f"must be a ParallelStyle, or map .*{text}"):
        parallelize_module(Net(), mesh_of(2), plan)


@pytest.mark.parametrize("given", [theirs.ColwiseParallel(), theirs.ColwiseParallel], ids=str)
@simulate(2)
def test_a_style_of_torch_is_refused_by_name_with_the_one_to_import(given):
    name = r"torch\.distributed\.tensor\.parallel\.ColwiseParallel'\."
    fix = r"Import hyper_parallel\.ColwiseParallel in its place, which takes the same arguments"
    with pytest.raises(PlanError, match=rf"key='head', value='{name} {fix}"):
        parallelize_module(Net(), mesh_of(2), {"head": given})
    with pytest.raises(PlanError, match=rf"but got parallelize_plan='{name} {fix}"):
        parallelize_module(Net(), mesh_of(2), given)


@simulate(2)
def test_a_style_that_is_made_of_torchs_is_refused_by_the_nearest():
    class Own(theirs.ParallelStyle):
        def _apply(self, module, device_mesh):
            return module

    with pytest.raises(PlanError, match=r"Import hyper_parallel\.ParallelStyle in its place"):
        parallelize_module(Net(), mesh_of(2), {"head": Own()})


@simulate(4)
def test_a_mesh_of_two_axes_must_be_sliced():
    mesh = mesh_of(2, 2)
    text = r"parallelize_module: device_mesh must have one axis.*Slice it: pass mesh\['tp'\]"
    with pytest.raises(LayoutError, match=text):
        parallelize_module(Net(), mesh, {"head": ColwiseParallel()})
    with pytest.raises(LayoutError, match=r"ColwiseParallel: device_mesh must have one axis"):
        ColwiseParallel().apply(nn.Linear(4, 4), mesh)
    layer = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    assert layer.weight.to_local().shape == (2, 4)


@simulate(3)
def test_a_rank_outside_the_mesh_is_refused():
    from hyper_parallel import DeviceMesh

    mesh = DeviceMesh(DEVICE, [0, 2])
    layer = nn.Linear(4, 4)
    if mesh.get_coordinate() is None:
        with pytest.raises(LayoutError, match="rank 1 not in mesh"):
            parallelize_module(layer, mesh, ColwiseParallel())
        assert not isinstance(layer.weight, DTensor)
    else:
        parallelize_module(layer, mesh, ColwiseParallel())
        assert layer.weight.to_local().shape == (2, 4)


@simulate(2)
def test_the_mesh_of_the_enclosing_block_is_the_default():
    with mesh_of(2):
        layer = parallelize_module(nn.Linear(4, 4), parallelize_plan=ColwiseParallel())
    assert layer.weight.to_local().shape == (2, 4)
    with pytest.raises(LayoutError, match="parallelize_module: device_mesh must be a DeviceMesh"):
        parallelize_module(nn.Linear(4, 4), parallelize_plan=ColwiseParallel())


@simulate(2)
def test_two_patterns_may_not_shard_one_module():
    net = Net()
    plan = {"layers.*.wq": ColwiseParallel(), "layers.0.w?": RowwiseParallel()}
    with pytest.raises(PlanError) as caught:
        parallelize_module(net, mesh_of(2), plan)
    assert "one pattern at most may shard module 'layers.0.wq'" in str(caught.value)
    assert "patterns=('layers.*.wq', 'layers.0.w?')" in str(caught.value)
    assert sharded(net) == []


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("module", [nn.LayerNorm(4), nn.Conv1d(4, 4, 1), nn.GELU()], ids=repr)
@simulate(2)
def test_a_module_of_another_kind_is_refused_by_name(style, module):
    net = nn.ModuleDict({"it": module})
    text = f"{style.__name__} on 'it': the module must be an nn.Linear or an nn.Embedding"
    with pytest.raises(PlanError, match=f"{text}, but got module='{type(module).__name__}'"):
        parallelize_module(net, mesh_of(2), {"it": style()})


@pytest.mark.parametrize("second", [ColwiseParallel, RowwiseParallel, SequenceParallel])
@pytest.mark.parametrize("first", [ColwiseParallel, RowwiseParallel, SequenceParallel])
@simulate(2)
def test_a_second_style_on_one_module_is_refused(first, second):
    net = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(net, mesh_of(2), {"0": first()})
    before = net[0].weight, net[0].forward
    with pytest.raises(PlanError, match=f"{second.__name__} on '0': .*by a style already"):
        parallelize_module(net, mesh_of(2), {"0": second()})
    assert before == (net[0].weight, net[0].forward)


@simulate(2)
def test_a_parameter_distributed_by_hand_is_taken_where_it_fits():
    from hyper_parallel import distribute_tensor

    mesh = mesh_of(2)
    layer = nn.Linear(4, 4)
    want = layer(torch.ones(1, 4))
    layer.weight = distribute_tensor(layer.weight, mesh, [Shard(0)])
    copied = copy.deepcopy(layer)
    ColwiseParallel(output_layouts=Replicate()).apply(layer, mesh)
    assert_same(layer(torch.ones(1, 4)), want)
    with pytest.raises(PlanError, match="parameter 'weight' must be plain, or sharded already"):
        RowwiseParallel().apply(copied, mesh)
    assert not isinstance(copied.bias, DTensor)


@pytest.mark.parametrize("src_data_rank", [2, -1, "0", 0.5], ids=str)
@simulate(2)
def test_a_source_outside_the_mesh_is_refused(src_data_rank):
    with pytest.raises(PlanError, match=r"src_data_rank must be a position on the mesh \(0 to 1\)"):
        parallelize_module(
            nn.Linear(4, 4), mesh_of(2), ColwiseParallel(), src_data_rank=src_data_rank
        )


# ---------------------------------------------------------------------- data and ties


@pytest.mark.parametrize("src_data_rank", [None, 0, 1])
@simulate(2)
def test_whose_parameters_count(src_data_rank):
    mesh = mesh_of(2)
    rank = mesh.get_local_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4))
    nn.init.uniform_(net[2].weight)
    mine = copy.deepcopy(net.state_dict())
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": SequenceParallel()}
    parallelize_module(net, mesh, plan, src_data_rank=src_data_rank)
    if src_data_rank is None:
        assert torch.equal(net[0].weight.to_local(), mine["0.weight"].chunk(2)[rank])
        assert torch.equal(net[2].weight.to_local(), mine["2.weight"])
        return
    source = [mine if rank == src_data_rank else None]
    parts = {name: p.full_tensor() for name, p in net.named_parameters()}
    if source[0] is not None:
        for name, whole in parts.items():
            assert torch.equal(whole, mine[name]), name
    else:
        assert not torch.equal(parts["0.weight"], mine["0.weight"])
        assert not torch.equal(parts["2.weight"], mine["2.weight"])


def tied_net():
    torch.manual_seed(0)
    net = Net(1).to(DTYPE)
    net.head.weight = net.embed.weight
    return net


EMBED = RowwiseParallel(input_layouts=Replicate())
HEAD = ColwiseParallel(output_layouts=Replicate())


@pytest.mark.parametrize("order", ["one call", "head first", "two calls", "two calls, head first"])
@simulate(2)
def test_tied_parameters_are_sharded_once_and_stay_tied(order):
    mesh = mesh_of(2)
    dense = tied_net()
    net = copy.deepcopy(dense)
    plans = [{"embed": EMBED}, {"head": HEAD}]
    if "head first" in order:
        plans.reverse()
    if "two" not in order:
        plans = [plans[0] | plans[1]]
    for plan in plans:
        parallelize_module(net, mesh, plan)
    assert net.head.weight is net.embed.weight
    assert net.head.weight.placements == (Shard(0),)
    check_equal(net, dense)


@simulate(2)
def test_parameters_tied_by_one_shared_module_stay_tied():
    shared = nn.Linear(4, 4)
    net = nn.Sequential(nn.Linear(4, 4), shared, shared, nn.Linear(4, 4))
    net[3].weight = shared.weight
    net[3].bias = shared.bias
    want = net(torch.ones(1, 4)).detach()
    style = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(net, mesh_of(2), {"[123]": style})
    assert net[3].weight is shared.weight
    assert net[3].bias is shared.bias
    assert_same(net(torch.ones(1, 4)), want)


@simulate(2)
def test_a_tie_is_kept_where_one_holder_is_in_the_plan_and_the_other_is_refused_at_use():
    net = parallelize_module(tied_net(), mesh_of(2), {"embed": EMBED})
    assert net.head.weight is net.embed.weight
    with pytest.raises(LayoutError, match="every tensor operand must be a DTensor"):
        net(torch.zeros(1, 2, dtype=torch.long))


@simulate(2)
def test_tied_parameters_cut_otherwise_are_refused_by_name():
    plan = {"embed": ColwiseParallel(), "head": HEAD}
    with pytest.raises(PlanError, match=r"ColwiseParallel on 'head': .*cut tied ones alike"):
        parallelize_module(tied_net(), mesh_of(2), plan)


@simulate(2)
def test_frozen_parameters_stay_frozen_and_names_stay():
    net = Net(1)
    net.layers.requires_grad_(False)
    names = [name for name, _ in net.named_parameters()]
    keys = list(net.state_dict())
    parallelize_module(
        net,
        mesh_of(2),
        {"embed": EMBED, "head": HEAD, "norm": SequenceParallel(), "layers.0.wq": HEAD},
    )
    assert [name for name, _ in net.named_parameters()] == names
    assert list(net.state_dict()) == keys
    assert not net.layers[0].wq.weight.requires_grad
    assert net.head.weight.requires_grad
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())


@simulate(2)
def test_parameters_on_the_meta_device_are_cut_without_data():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    parallelize_module(net, mesh_of(2), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    assert net[0].weight.to_local().shape == (3, 4)
    assert net[1].weight.device.type == "meta"
    net.to_empty(device=DEVICE)
    for param in net.parameters():
        nn.init.ones_(param)
    assert net(torch.ones(1, 4)).tolist() == [[31.0] * 4]
