# SPDX-License-Identifier: Apache-2.0
"""Styles of the user's own, module classes of the user's own, and hooks on parallel modules."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    ParallelStyle,
    PlanError,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from support.dense import assert_same
from support.device import DEVICE, DTYPE

WHOLE = {"input_layouts": Replicate(), "output_layouts": Replicate()}


def mesh_of(size):
    return init_device_mesh(DEVICE, (size,))


def check(style, *, dense=None, x=None, tp=2):
    """Compare a layer under `style`, whole to whole, with the dense one."""
    torch.manual_seed(0)
    dense = (dense or nn.Linear(5, 7)).to(DTYPE)
    x = torch.randn(3, 5, dtype=DTYPE) if x is None else x
    layer = style.apply(copy.deepcopy(dense), mesh_of(tp))
    xs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outs = [model(given) for model, given in zip((dense, layer), xs, strict=True)]
    for out in outs:
        out.square().sum().backward()
    assert_same(outs[1].detach(), outs[0].detach())
    assert_same(xs[1].grad, xs[0].grad)
    for (name, want), got in zip(dense.named_parameters(), layer.parameters(), strict=True):
        grad = got.grad
        assert_same(grad.full_tensor() if isinstance(grad, DTensor) else grad, want.grad, name)
    return layer


@pytest.mark.parametrize("base", [ColwiseParallel, RowwiseParallel])
@simulate(3)
def test_each_hook_may_be_overridden_alone(base):
    calls = []

    def hooked(hook):
        def run(self, *args, **kwargs):
            calls.append(hook)
            return getattr(base, hook)(self, *args, **kwargs)

        return type(f"My{hook}", (base,), {hook: run})

    for hook in (
        "validate_module",
        "validate_param",
        "shard_param",
        "transform_inputs_pre_forward",
        "context_around_forward",
        "transform_output_post_forward",
        "should_use_local_tensors",
        "install_forward",
        "apply",
        "modules_to_shard",
    ):
        check(hooked(hook)(**WHOLE), tp=3)
        assert hook in calls


@simulate(2)
def test_an_overridden_transform_is_used_and_not_bypassed():
    class Doubles(ColwiseParallel):
        def transform_output_post_forward(self, module, mesh, output):
            return super().transform_output_post_forward(module, mesh, output * 2)

    layer = nn.Linear(4, 4)
    want = layer(torch.ones(1, 4)) * 2
    Doubles(**WHOLE).apply(layer, mesh_of(2))
    assert_same(layer(torch.ones(1, 4)), want)


@simulate(2)
def test_an_overridden_context_is_entered_and_left():
    class Traces(RowwiseParallel):
        @contextlib.contextmanager
        def context_around_forward(self, module, mesh):
            trace.append("in")
            try:
                with super().context_around_forward(module, mesh):
                    yield
            finally:
                trace.append("out")

    trace = []
    check(Traces(**WHOLE))
    assert trace == ["in", "out"]


@simulate(2)
def test_a_weight_cut_otherwise_is_computed_as_it_lies():
    class Whole(ColwiseParallel):
        def shard_param(self, module, name, param, mesh):
            return self.distribute(param, mesh, Replicate())

    class Backwards(ColwiseParallel):
        def shard_param(self, module, name, param, mesh):
            return self.distribute(param, mesh, Shard(param.dim() - 1))

    assert check(Whole(**WHOLE)).weight.placements == (Replicate(),)
    assert check(Backwards(**WHOLE)).weight.placements == (Shard(1),)


@simulate(2)
def test_a_refusal_of_the_users_own_comes_before_any_change():
    class Even(ColwiseParallel):
        def validate_param(self, module, name, param, mesh):
            super().validate_param(module, name, param, mesh)
            if name == "bias":
                raise PlanError("Even: no bias, please")

    net = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(PlanError, match=r"Even on '0': no bias, please"):
        parallelize_module(net, mesh_of(2), {"0": Even()})
    assert type(net[0].weight) is nn.Parameter


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return x * self.scale


class ScaleStyle(ParallelStyle):
    """Cut a Scale with the features it scales."""

    def shard_param(self, module, name, param, mesh):
        return self.distribute(param, mesh, Shard(0))

    def transform_inputs_pre_forward(self, module, mesh, args, kwargs):
        (x,) = args
        return (DTensor.from_local(x, mesh, [Shard(-1)], shape=(*x.shape[:-1], 7)),), kwargs

    def transform_output_post_forward(self, module, mesh, output):
        return output.to_local()


@pytest.mark.parametrize("tp", [2, 3])
def test_a_style_for_a_module_of_the_users_own(tp):
    def run():
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(5, 7), Scale(7), nn.Linear(7, 2)).to(DTYPE)
        plan = {"0": ColwiseParallel(), "1": ScaleStyle(), "2": RowwiseParallel()}
        net = parallelize_module(copy.deepcopy(dense), mesh_of(tp), plan)
        x = torch.randn(3, 5, dtype=DTYPE)
        for model in (dense, net):
            model(x).square().sum().backward()
        assert_same(net(x), dense(x))
        for (name, want), got in zip(dense.named_parameters(), net.parameters(), strict=True):
            assert_same(got.grad.full_tensor(), want.grad, name)

    simulate(tp).run(run)


@pytest.mark.parametrize("src_data_rank", [None, 0, 1])
@simulate(2)
def test_a_style_that_defines_apply_alone_sees_the_source(src_data_rank):
    class Alone(ParallelStyle):
        def apply(self, module, device_mesh):
            seen.append(self.src_data_rank)
            module.weight = distribute_tensor(
                module.weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank
            )
            return module

    seen = []
    net = nn.ModuleDict({"a": nn.Linear(4, 4)})
    parallelize_module(net, mesh_of(2), {"a": Alone()}, src_data_rank=src_data_rank)
    assert seen == [src_data_rank]
    assert net["a"].weight.placements == (Shard(0),)


def test_a_style_written_for_torch_is_told_to_rename_apply():
    with pytest.raises(PlanError, match="Rename _apply to apply"):

        class Ported(ParallelStyle):
            def _apply(self, module, device_mesh):
                return module


@simulate(2)
def test_the_base_style_leaves_a_module_as_it_computes():
    layer = nn.Linear(4, 4)
    want = layer(torch.ones(1, 4))
    assert ParallelStyle().apply(layer, mesh_of(2)) is layer
    assert type(layer.weight) is nn.Parameter
    assert_same(layer(torch.ones(1, 4)), want)


# ---------------------------------------------------------------------- modules of the user's own


class Scaled(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, input):
        return F.linear(input, self.weight * 2, self.bias) + 1


class Named(nn.Linear):
    """A Linear that only has another name."""


class OwnEmbedding(nn.Embedding):
    def forward(self, input):
        return F.embedding(input, self.weight) * 3


@pytest.mark.parametrize("kind", [Scaled, Named])
@pytest.mark.parametrize("base", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_linear_subclass_equals_dense(base, kind, tp):
    simulate(tp).run(lambda: check(base(**WHOLE), dense=kind(5, 7), tp=tp) and None)


@pytest.mark.parametrize("base", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("tp", [2, 3])
def test_an_embedding_subclass_equals_dense(base, tp):
    def run():
        torch.manual_seed(0)
        dense = OwnEmbedding(7, 5).to(DTYPE)
        table = base(**WHOLE).apply(copy.deepcopy(dense), mesh_of(tp))
        ids = torch.tensor([[0, 6, 6], [3, 1, 2]])
        for model in (dense, table):
            model(ids).square().sum().backward()
        assert_same(table(ids), dense(ids))
        assert_same(table.weight.grad.full_tensor(), dense.weight.grad)

    simulate(tp).run(run)


@simulate(2)
def test_a_forward_replaced_on_the_instance_is_kept():
    dense = nn.Linear(5, 7).to(DTYPE)
    dense.forward = lambda input: F.linear(input, dense.weight) * 3
    x = torch.randn(3, 5, dtype=DTYPE)
    want = dense(x)
    ColwiseParallel(**WHOLE).apply(dense, mesh_of(2))
    assert_same(dense(x), want)


@simulate(2)
def test_a_keyword_input_is_taken():
    for kind in (nn.Linear, Scaled):
        torch.manual_seed(0)
        layer = kind(4, 4)
        want = layer(input=torch.ones(1, 4))
        ColwiseParallel(**WHOLE).apply(layer, mesh_of(2))
        assert_same(layer(input=torch.ones(1, 4)), want)
    with pytest.raises(PlanError, match="must be the tensor to shard"):
        layer()


# ---------------------------------------------------------------------- hooks


@pytest.mark.parametrize("kind", [nn.Linear, Scaled])
@simulate(2)
def test_forward_hooks_of_the_user_run_around_the_style(kind):
    layer = kind(4, 6)
    seen = []
    layer.register_forward_pre_hook(lambda m, args: seen.append(("pre", args[0].shape)))
    ColwiseParallel().apply(layer, mesh_of(2))
    layer.register_forward_hook(lambda m, args, out: seen.append(("post", out.shape)))
    layer.register_forward_hook(lambda m, args, out: out * 0)
    assert layer(torch.ones(2, 4)).abs().sum() == 0
    assert seen == [("pre", (2, 4)), ("post", (2, 3))]


@simulate(2)
def test_backward_hooks_of_the_user_run_on_a_parallel_layer():
    layer = ColwiseParallel().apply(nn.Linear(4, 6), mesh_of(2))
    seen = []
    layer.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0].shape, go[0].shape)))
    layer.weight.register_hook(lambda grad: seen.append(grad.shape))
    layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert len(seen) == 2
    assert torch.Size((6, 4)) in seen
    assert ((2, 4), (2, 3)) in seen


@simulate(2)
def test_a_style_object_may_serve_many_modules():
    style = RowwiseParallel(input_layouts=Replicate())
    net = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Embedding(5, 3), "c": nn.Linear(3, 2)})
    want = [net["a"](torch.ones(1, 4)), net["b"](torch.tensor([4])), net["c"](torch.ones(1, 3))]
    parallelize_module(net, mesh_of(2), {"*": style})
    got = [net["a"](torch.ones(1, 4)), net["b"](torch.tensor([4])), net["c"](torch.ones(1, 3))]
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)
