# SPDX-License-Identifier: Apache-2.0
"""A Linear under ColwiseParallel and RowwiseParallel equals the dense one, gradients too."""

import copy
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    HyperParallelError,
    LayoutError,
    ParallelStyle,
    Partial,
    PlanError,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from support.dense import assert_same, cut, cut_cotangent, join, spread
from support.device import DEVICE, DTYPE

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
PLACES = [Replicate(), Shard(-1), Shard(0), Shard(1), Partial()]
WEIGHT_DIM = {ColwiseParallel: 0, RowwiseParallel: 1}


def dense_run(layer, x, grad):
    """Give output and gradients (input, weight, bias) of the dense layer."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    bias = None if layer.bias is None else layer.bias.grad
    return y.detach(), x.grad, layer.weight.grad, bias


def check_params(layer, weight_grad, bias_grad, style, rank, num_ranks):
    """Compare the local parts of the parameters' gradients with cuts of the dense ones."""
    dim = WEIGHT_DIM[type(style)]
    assert layer.weight.grad.placements == layer.weight.placements
    assert_same(layer.weight.grad.to_local(), cut(weight_grad, dim, rank, num_ranks), "weight")
    if bias_grad is not None:
        want = cut(bias_grad, 0, rank, num_ranks) if dim == 0 else bias_grad
        assert_same(layer.bias.grad.to_local(), want, "bias")


def inputs_of(x, kind, declared, mesh):
    """Give (leaf, input): a plain part, or a DTensor in the declared or another layout."""
    rank, size = mesh.get_local_rank(), mesh.size()
    if kind == "plain":
        leaf = spread(x, declared, rank, size).requires_grad_()
        return leaf, leaf, declared
    place = declared if kind == "declared" else Shard(x.dim() - 2 if x.dim() > 1 else 0)
    leaf = spread(x, place, rank, size).requires_grad_()
    return leaf, DTensor.from_local(leaf, mesh, [place], shape=x.shape), place


@dataclass(frozen=True)
class Case:
    """One layer and one input; `arrival`: plain, or a DTensor as declared or elsewhere."""

    style: ParallelStyle
    x: torch.Tensor
    arrival: str = "plain"
    bias: bool = True
    out_features: int = 6


def compare(case, mesh):
    """Run one layer dense and parallel, on this rank; give the local output and the dense one."""
    style, x = case.style, case.x
    rank, size = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(0)
    layer = nn.Linear(x.shape[-1], case.out_features, bias=case.bias, dtype=x.dtype)
    grad = torch.randn(*x.shape[:-1], case.out_features, dtype=x.dtype)
    y, x_grad, weight_grad, bias_grad = dense_run(copy.deepcopy(layer), x, grad)
    parallel = style.apply(layer, mesh)
    leaf, given, place = inputs_of(x, case.arrival, style.input_layouts[0], mesh)
    out = parallel(given)
    out_place = style.output_layouts[0]
    if style.use_local_output:
        assert type(out) is torch.Tensor
        local = out
    else:
        assert out.shape == y.shape
        assert out.layout == distribute_tensor(y, mesh, [out_place]).layout
        local = out.to_local()
    local.backward(cut_cotangent(grad, out_place, rank, size))
    assert_same(leaf.grad, cut_cotangent(x_grad, place, rank, size), "input")
    check_params(parallel, weight_grad, bias_grad, style, rank, size)
    return local.detach(), y


def compare_all(tp, cases):
    """Compare the cases on every rank, and the joined outputs."""

    def run():
        mesh = init_device_mesh(DEVICE, (tp,))
        return [compare(case, mesh) for case in cases]

    for case, *ranks in zip(cases, *simulate(tp).run(run), strict=True):
        got = join([local for local, _ in ranks], case.style.output_layouts[0])
        assert_same(got, ranks[0][1], f"output of {case.style}")


def styles(kind, givens, wanteds, **options):
    for given, wanted in itertools.product(givens, wanteds):
        yield STYLES[kind](input_layouts=given, output_layouts=wanted, **options)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("given", PLACES, ids=repr)
@pytest.mark.parametrize("kind", STYLES)
def test_every_pair_of_layouts_equals_dense(kind, given, tp):
    torch.manual_seed(1)
    x = torch.randn(3, 5, 7, dtype=DTYPE)
    compare_all(
        tp,
        [
            Case(style, x, arrival, bias)
            for local, bias in itertools.product((True, False), repeat=2)
            for style in styles(kind, [given], PLACES, use_local_output=local)
            for arrival in ("plain", "declared", "elsewhere")
        ],
    )


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", STYLES)
def test_positive_dims_are_the_negative_ones(kind, tp):
    x = torch.randn(2, 4, 8, dtype=DTYPE)
    places = [Shard(2), Shard(-2), Shard(-3)]
    compare_all(tp, [Case(style, x) for style in styles(kind, places, places)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", STYLES)
def test_other_dtypes_equal_dense(kind, dtype):
    torch.manual_seed(2)
    x = torch.randn(2, 4, 8).to(dtype)
    compare_all(2, [Case(style, x) for style in styles(kind, PLACES, PLACES)])


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (2, 2, 3, 7)], ids=str)
@pytest.mark.parametrize("kind", STYLES)
def test_inputs_of_one_to_four_dims_equal_dense(kind, shape):
    torch.manual_seed(3)
    x = torch.randn(*shape, dtype=DTYPE)
    places = [Replicate(), Shard(-1), Partial()]
    if len(shape) > 1:
        places += [Shard(0), Shard(-2)]
    compare_all(
        3,
        [
            Case(style, x, arrival)
            for style in styles(kind, places, places)
            for arrival in ("plain", "declared")
        ],
    )


@pytest.mark.parametrize(
    ("in_features", "out_features", "rows"), [(1, 1, 1), (3, 2, 2), (2, 9, 1), (9, 2, 0), (5, 5, 5)]
)
@pytest.mark.parametrize("kind", STYLES)
def test_more_ranks_than_rows_equals_dense(kind, in_features, out_features, rows):
    torch.manual_seed(4)
    x = torch.randn(2, rows, in_features, dtype=DTYPE)
    places = [Replicate(), Shard(-1), Shard(1), Partial()]
    compare_all(4, [Case(s, x, out_features=out_features) for s in styles(kind, places, places)])


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_cut_between_blocks_keeps_heads_whole(tp):
    heads, width = 4, 3

    def run():
        mesh = init_device_mesh(DEVICE, (tp,))
        rank = mesh.get_local_rank()
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(5, heads * width), nn.Linear(heads * width, 5)).to(DTYPE)
        net = copy.deepcopy(dense)
        block = Shard(-1, block=width)
        ColwiseParallel(output_layouts=block).apply(net[0], mesh)
        RowwiseParallel(input_layouts=block).apply(net[1], mesh)
        x = torch.randn(2, 5, dtype=DTYPE)
        hidden = net[0](x)
        per_rank = -(-heads // tp)
        mine = min(per_rank, max(heads - per_rank * rank, 0))
        assert hidden.shape == (2, mine * width)
        assert_same(hidden, dense[0](x)[:, rank * per_rank * width :][:, : mine * width])
        for model in (dense, net):
            model(x).square().sum().backward()
        check_grads(net, dense)

    simulate(tp).run(run)


# ---------------------------------------------------------------------- how it is trained


def pair(hidden=10, dtype=DTYPE, bias=True):
    """Make a column-wise and a row-wise Linear with a GELU between."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, hidden, bias=bias, dtype=dtype),
        nn.GELU(),
        nn.Linear(hidden, 3, bias=bias, dtype=dtype),
    )


def parallel_pair(net, mesh):
    ColwiseParallel().apply(net[0], mesh)
    RowwiseParallel().apply(net[2], mesh)
    return net


def whole_grads(net):
    return {
        name: None if p.grad is None else p.grad.full_tensor() for name, p in net.named_parameters()
    }


def check_grads(net, dense):
    for name, param in dense.named_parameters():
        got = whole_grads(net)[name]
        if param.grad is None:
            assert got is None, name
        else:
            assert_same(got, param.grad, name)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias", "all", "only bias"])
@simulate(3)
def test_frozen_parameters_get_no_gradient(frozen):
    dense = pair()
    for name, param in dense.named_parameters():
        if frozen == "all" or frozen == name or (frozen == "only bias" and "bias" not in name):
            param.requires_grad_(False)
    net = parallel_pair(copy.deepcopy(dense), init_device_mesh(DEVICE, (3,)))
    x = torch.randn(4, 6, dtype=DTYPE)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    dense(inputs[0]).square().sum().backward()
    net(inputs[1]).square().sum().backward()
    assert_same(inputs[1].grad, inputs[0].grad)
    check_grads(net, dense)


@simulate(2)
def test_freezing_after_apply_is_respected():
    net = parallel_pair(pair(), init_device_mesh(DEVICE, (2,)))
    net[0].requires_grad_(False)
    net(torch.randn(4, 6, dtype=DTYPE)).sum().backward()
    assert net[0].weight.grad is None
    assert net[0].bias.grad is None
    assert net[2].weight.grad is not None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("use_local_output", [True, False])
@simulate(3)
def test_without_grad_equals_dense(context, use_local_output):
    mesh = init_device_mesh(DEVICE, (3,))
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=DTYPE)
    for style in (ColwiseParallel, RowwiseParallel):
        dense = nn.Linear(6, 5, dtype=DTYPE)
        options = {"input_layouts": Replicate(), "output_layouts": Replicate()}
        layer = style(**options, use_local_output=use_local_output).apply(
            copy.deepcopy(dense), mesh
        )
        with context():
            y = layer(x)
            want = dense(x)
            assert not y.requires_grad
            assert_same(y if use_local_output else y.full_tensor(), want)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16], ids=str)
@simulate(2)
def test_autocast_is_close_to_dense_autocast(parameters, inputs):
    dense = pair(dtype=parameters)
    net = parallel_pair(copy.deepcopy(dense), init_device_mesh(DEVICE, (2,)))
    x = torch.randn(4, 6, dtype=inputs)
    xs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outs = []
    for model, given in zip((dense, net), xs, strict=True):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = model(given)
        out.float().square().sum().backward()
        outs.append(out)
    assert outs[1].dtype == outs[0].dtype == torch.bfloat16
    torch.testing.assert_close(outs[1], outs[0], rtol=2e-2, atol=2e-2)
    assert xs[1].grad.dtype == xs[0].grad.dtype
    torch.testing.assert_close(xs[1].grad, xs[0].grad, rtol=5e-2, atol=5e-2)
    grads = whole_grads(net)
    for name, param in dense.named_parameters():
        assert grads[name].dtype == param.dtype
        torch.testing.assert_close(grads[name], param.grad, rtol=5e-2, atol=1e-1)


@simulate(2)
def test_gradients_accumulate_over_calls():
    dense = pair()
    net = parallel_pair(copy.deepcopy(dense), init_device_mesh(DEVICE, (2,)))
    for _ in range(3):
        x = torch.randn(4, 6, dtype=DTYPE)
        for model in (dense, net):
            model(x).square().sum().backward()
    check_grads(net, dense)


@simulate(2)
def test_one_layer_used_twice_in_a_graph():
    dense = nn.Linear(6, 6, dtype=DTYPE)
    style = ColwiseParallel(output_layouts=Replicate())
    layer = style.apply(copy.deepcopy(dense), init_device_mesh(DEVICE, (2,)))
    x = torch.randn(4, 6, dtype=DTYPE)
    for model in (dense, layer):
        model(torch.tanh(model(x))).square().sum().backward()
    assert_same(layer.weight.grad.full_tensor(), dense.weight.grad)
    assert_same(layer.bias.grad.full_tensor(), dense.bias.grad)


@simulate(2)
def test_retain_graph_runs_backward_twice():
    dense = pair()
    net = parallel_pair(copy.deepcopy(dense), init_device_mesh(DEVICE, (2,)))
    x = torch.randn(4, 6, dtype=DTYPE)
    for model in (dense, net):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    check_grads(net, dense)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("kind", STYLES)
@simulate(2)
def test_create_graph_is_refused(kind):
    layer = STYLES[kind](input_layouts=Replicate(), output_layouts=Replicate()).apply(
        nn.Linear(4, 4), init_device_mesh(DEVICE, (2,))
    )
    x = torch.ones(2, 4, requires_grad=True)
    y = layer(x).square().sum()
    with pytest.raises(HyperParallelError, match="without create_graph"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("reentrant", [True, False])
@simulate(3)
def test_activation_checkpointing_equals_dense(reentrant):
    dense = pair()
    net = parallel_pair(copy.deepcopy(dense), init_device_mesh(DEVICE, (3,)))
    x = torch.randn(4, 6, dtype=DTYPE)
    xs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    dense(xs[0]).square().sum().backward()
    checkpoint(net, xs[1], use_reentrant=reentrant).square().sum().backward()
    assert_same(xs[1].grad, xs[0].grad)
    check_grads(net, dense)


@simulate(3)
def test_a_deep_copy_trains_apart_from_its_original():
    dense = pair()
    net = parallel_pair(copy.deepcopy(dense), init_device_mesh(DEVICE, (3,)))
    x = torch.randn(4, 6, dtype=DTYPE)
    net(x).sum().backward()  # plans are cached now
    net.zero_grad()
    copied = copy.deepcopy(net)
    assert copied[0].weight is not net[0].weight
    before = net(x).detach()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (dense, copied)]
    for _ in range(3):
        for model, optimizer in zip((dense, copied), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert net[0].weight.grad is None
    assert_same(net(x).detach(), before)
    check_grads(copied, dense)
    assert_same(copied(x), dense(x))


@simulate(2)
def test_an_in_place_change_of_a_saved_operand_is_found():
    mesh = init_device_mesh(DEVICE, (2,))
    layer = ColwiseParallel().apply(nn.Linear(4, 4), mesh)
    x = torch.ones(2, 4)
    y = layer(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = layer(torch.ones(2, 4, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", STYLES)
@simulate(2)
def test_the_input_of_a_frozen_layer_may_be_changed_in_place_as_in_a_dense_one(kind):
    dense = nn.Linear(4, 4).requires_grad_(False)
    style = STYLES[kind](input_layouts=Replicate(), output_layouts=Replicate())
    layer = style.apply(copy.deepcopy(dense), init_device_mesh(DEVICE, (2,)))
    grads = []
    for model in (dense, layer):
        leaf = torch.ones(2, 4, requires_grad=True)
        x = leaf * 2
        y = model(x).square()
        x.add_(1)
        y.sum().backward()
        grads.append(leaf.grad)
    assert_same(grads[1], grads[0])


@pytest.mark.parametrize("kind", STYLES)
@pytest.mark.parametrize("name", ["weight", "bias"])
@simulate(2)
def test_a_plain_parameter_assigned_later_is_refused(kind, name):
    layer = STYLES[kind]().apply(nn.Linear(4, 4), init_device_mesh(DEVICE, (2,)))
    x = torch.ones(1, 4 if kind == "colwise" else 2)
    layer(x)
    setattr(layer, name, nn.Parameter(torch.ones(4, 4) if name == "weight" else torch.ones(4)))
    with pytest.raises(PlanError, match="the parameters must stay the DTensors"):
        layer(x)
    with torch.no_grad(), pytest.raises(PlanError, match="the parameters must stay the DTensors"):
        layer(x)


@simulate(3)
def test_a_batch_of_nothing_equals_dense():
    dense = pair()
    net = parallel_pair(copy.deepcopy(dense), init_device_mesh(DEVICE, (3,)))
    for model in (dense, net):
        out = model(torch.empty(0, 6, dtype=DTYPE))
        assert out.shape == (0, 3)
        out.sum().backward()
    check_grads(net, dense)


@simulate(2)
def test_a_converted_module_follows_its_new_dtype():
    dense = pair(dtype=torch.float32)
    net = parallel_pair(copy.deepcopy(dense), init_device_mesh(DEVICE, (2,)))
    x = torch.randn(4, 6)
    net(x)
    dense, net = dense.to(DTYPE), net.to(DTYPE)
    for model in (dense, net):
        model(x.to(DTYPE)).square().sum().backward()
    check_grads(net, dense)


@simulate(2)
def test_functional_call_with_other_weights_reaches_them():
    dense = pair()
    net = parallel_pair(copy.deepcopy(dense), init_device_mesh(DEVICE, (2,)))
    x = torch.randn(4, 6, dtype=DTYPE)
    results = []
    for model in (dense, net):
        scaled = {name: p * 2 for name, p in model.named_parameters()}
        torch.func.functional_call(model, scaled, (x,)).square().sum().backward()
        results.append(model)
    check_grads(net, dense)


@pytest.mark.parametrize("kind", STYLES)
@simulate(2)
def test_complex_weights_equal_dense(kind):
    torch.manual_seed(0)
    dtype = DTYPE.to_complex()
    dense = nn.Linear(4, 6, dtype=dtype)
    style = STYLES[kind](input_layouts=Replicate(), output_layouts=Replicate())
    layer = style.apply(copy.deepcopy(dense), init_device_mesh(DEVICE, (2,)))
    x = torch.randn(3, 4, dtype=dtype)
    xs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    for model, given in zip((dense, layer), xs, strict=True):
        model(given).abs().square().sum().backward()
    torch.testing.assert_close(xs[1].grad, xs[0].grad)
    torch.testing.assert_close(layer.weight.grad.full_tensor(), dense.weight.grad)


@pytest.mark.parametrize("which", ["input", "output"])
@pytest.mark.parametrize("kind", STYLES)
@simulate(3)
def test_a_pending_average_equals_dense(kind, which):
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (3,))
    dense = nn.Linear(4, 6, dtype=DTYPE)
    places = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    places[f"{which}_layouts"] = Partial("avg")
    layer = STYLES[kind](**places).apply(copy.deepcopy(dense), mesh)
    x = torch.randn(2, 4, dtype=DTYPE)
    dense_x = x.clone().requires_grad_()
    y = dense(dense_x)
    y.square().sum().backward()
    share = 3 * (mesh.get_local_rank() + 1) / 6 if which == "input" else 1
    local_x = (x * share).requires_grad_()
    out = layer(local_x)
    if which == "output":
        out = DTensor.from_local(out, mesh, [Partial("avg")]).full_tensor()
    assert_same(out, y.detach())
    out.square().sum().backward()
    assert_same(local_x.grad, dense_x.grad / (3 if which == "input" else 1))
    assert_same(layer.weight.grad.full_tensor(), dense.weight.grad)
    assert_same(layer.bias.grad.full_tensor(), dense.bias.grad)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("style", "shape"),
    [
        (ColwiseParallel(), (2, 5)),
        (ColwiseParallel(), ()),
        (ColwiseParallel(output_layouts=Replicate()), (2, 5)),
        (ColwiseParallel(input_layouts=Shard(1)), (2, 2, 5)),
        (ColwiseParallel(input_layouts=Shard(-1)), (2, 3)),
        (ColwiseParallel(input_layouts=Shard(5)), (2, 4)),
        (ColwiseParallel(input_layouts=Shard(3)), (2, 2)),
        (ColwiseParallel(output_layouts=Shard(5)), (2, 4)),
        (RowwiseParallel(), (2, 3)),
        (RowwiseParallel(), ()),
        (RowwiseParallel(output_layouts=Shard(1)), (2, 3, 3)),
        (RowwiseParallel(input_layouts=Replicate()), (2, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("grad", [True, False])
@simulate(2)
def test_an_input_that_does_not_fit_is_refused_on_every_rank(style, shape, grad):
    layer = style.apply(nn.Linear(4, 4), init_device_mesh(DEVICE, (2,)))
    with torch.set_grad_enabled(grad), pytest.raises(LayoutError, match=type(style).__name__):
        layer(torch.ones(shape))


def test_a_failure_on_one_rank_does_not_send_it_into_another_exchange():
    def run():
        mesh = init_device_mesh(DEVICE, (2,))
        layer = ColwiseParallel(input_layouts=Shard(1)).apply(nn.Linear(4, 4), mesh)
        if mesh.get_local_rank() == 1:
            layer.to(torch.bfloat16)
        return layer(torch.ones(2, 2, 4)).shape

    first, second = simulate(2).outcomes(run)
    assert first == (2, 4, 2)
    assert isinstance(second, RuntimeError)
    assert "dtype" in str(second)
