# SPDX-License-Identifier: Apache-2.0
"""Linears whose backend has fused kernels: the same values and gradients, counted either way."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    LayoutError,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from hyper_parallel.parallel import fused_collectives
from hyper_parallel.runtime.fused import find_fused
from support.dense import assert_same
from support.device import DEVICE, DTYPE
from support.stepwise import Stepwise, give_kernels

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


@pytest.fixture
def kernels(monkeypatch):
    """Give simulated ranks kernels."""
    give_kernels(monkeypatch)


def run_layer(layer, given, grad):
    """Give output and gradients (input, parameters) of this rank, plain."""
    leaf = given.detach().requires_grad_()
    y = layer(leaf)
    y.backward(grad)
    grads = [leaf.grad, *(p.grad for p in layer.parameters())]
    return [getattr(t, "_local", t).detach() for t in (y, *grads) if t is not None]


def compare(style, shape, kinds, *, bias=True, arrives=True):
    """Run one layer apart and fused on this rank."""
    mesh = init_device_mesh(DEVICE, (2,))
    torch.manual_seed(0)
    layer = nn.Linear(shape[-1], 8, bias=bias, dtype=DTYPE)
    x, grad = torch.randn(shape, dtype=DTYPE), torch.randn(*shape[:-1], 8, dtype=DTYPE)
    x = distribute_tensor(x, mesh, style.input_layouts)
    grad = distribute_tensor(grad, mesh, style.output_layouts)
    x = x if arrives else x.to_local()
    grad = grad.to_local() if style.use_local_output else grad
    layers = [style.apply(copy.deepcopy(layer), mesh) for _ in range(2)]
    want = run_layer(layers[0], x, grad)
    with fused_collectives() as calls:
        got = run_layer(layers[1], x, grad)
    assert len(got) == len(want) == 3 + bias
    for a, b in zip(got, want, strict=True):
        assert_same(a, b, str(style))
    assert got[0].is_contiguous()
    assert calls.get_counts() == dict.fromkeys(kinds, 1)


SHAPES = {"rows": (4, 6), "first dim": (4, 3, 6), "sequence": (3, 4, 6), "long": (1, 4, 6)}
SEQUENCES = {"rows": Shard(0), "first dim": Shard(0), "sequence": Shard(1), "long": Shard(-2)}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.usefixtures("kernels")
def test_a_cut_sequence_is_exact(case):
    place, options = SEQUENCES[case], itertools.product((True, False), repeat=3)

    @simulate(2)
    def run():
        for bias, local, arrives in options:
            for other in (Shard(-1), Replicate()):
                for style in (
                    ColwiseParallel(
                        input_layouts=place, output_layouts=other, use_local_output=local
                    ),
                    RowwiseParallel(
                        input_layouts=other, output_layouts=place, use_local_output=local
                    ),
                ):
                    compare(style, SHAPES[case], (GATHER, SCATTER), bias=bias, arrives=arrives)

    options = list(options)
    run()


@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "parameters"])
@pytest.mark.usefixtures("kernels")
@simulate(2)
def test_what_is_frozen_gets_no_gradient(frozen):
    mesh = init_device_mesh(DEVICE, (2,))
    for style in (
        ColwiseParallel(input_layouts=Shard(0)),
        RowwiseParallel(output_layouts=Shard(0)),
    ):
        torch.manual_seed(0)
        dense = nn.Linear(4, 6, dtype=DTYPE)
        layers = [style.apply(copy.deepcopy(dense), mesh) for _ in range(2)]
        x = distribute_tensor(torch.randn(4, 4, dtype=DTYPE), mesh, style.input_layouts).to_local()
        grads = []
        for layer, within in zip(layers, (nullcontext(), fused_collectives()), strict=True):
            for name, param in layer.named_parameters():
                param.requires_grad_(frozen not in (name, "parameters"))
            leaf = x.clone().requires_grad_(frozen != "input")
            with within:
                y = layer(leaf)
            y.square().sum().backward()
            grads.append([leaf.grad, *(p.grad for p in layer.parameters())])
        for got, want in zip(*reversed(grads), strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                assert_same(getattr(got, "_local", got), getattr(want, "_local", want))


def block():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6)
    ).to(DTYPE)


def parallel_block(mesh):
    return parallelize_module(
        block(),
        mesh,
        {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1)),
            "4": SequenceParallel(use_local_output=True),
        },
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.usefixtures("kernels")
def test_a_block_equals_one_process_and_backward_is_fused_outside_of_the_block(ranks):
    @simulate(ranks)
    def run():
        mesh = init_device_mesh(DEVICE, (ranks,))
        torch.manual_seed(1)
        x = torch.randn(2, 8, 6, dtype=DTYPE)
        dense, net = block(), parallel_block(mesh)
        inputs = [x, x.chunk(ranks, 1)[mesh.get_local_rank()].contiguous()]
        inputs = [one.clone().requires_grad_() for one in inputs]
        want = dense(inputs[0])
        with fused_collectives() as calls:
            got = net(inputs[1])
        for y in (want, got):
            y.square().sum().backward()
        assert_same(got, want.chunk(ranks, 1)[mesh.get_local_rank()])
        assert_same(inputs[1].grad, inputs[0].grad.chunk(ranks, 1)[mesh.get_local_rank()])
        for mine, theirs in zip(net.parameters(), dense.parameters(), strict=True):
            assert_same(mine.grad.full_tensor(), theirs.grad)
        assert str(calls).splitlines() == [
            "module                  pass      calls  kind                   fused",
            "ColwiseParallel on '1'  forward       1  all_gather_matmul      yes",
            "RowwiseParallel on '3'  forward       1  matmul_reduce_scatter  yes",
            "RowwiseParallel on '3'  backward      1  all_gather_matmul      yes",
            "ColwiseParallel on '1'  backward      1  matmul_reduce_scatter  yes",
        ]

    run()


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)], ids=str)
@pytest.mark.usefixtures("kernels")
@simulate(2)
def test_an_all_reduce_is_fused_only_without_gradients(shape):
    mesh = init_device_mesh(DEVICE, (2,))
    layer = nn.Linear(6, 5, dtype=DTYPE)
    x = torch.randn(shape, dtype=DTYPE)
    want = layer(x)
    RowwiseParallel(input_layouts=Replicate()).apply(layer, mesh)
    with fused_collectives() as calls:
        assert_same(layer(x), want)
        with torch.no_grad():
            assert_same(layer(x), want)
    reason = "kernels of this kind are for inference, and gradients are recorded"
    assert [(call.kind, call.refusal) for call in calls.counts] == [
        (REDUCE, reason),
        (REDUCE, None),
    ]


@pytest.mark.usefixtures("kernels")
@simulate(2)
def test_the_simple_moves_are_fused_and_listed():
    mesh = init_device_mesh(DEVICE, (2,))
    layer = RowwiseParallel().apply(nn.Linear(6, 5, dtype=DTYPE), mesh)
    x = torch.randn(4, 3, dtype=DTYPE)
    with torch.no_grad(), CommDebugMode() as mode:
        want = layer(x)
        with fused_collectives() as calls:
            assert_same(layer(x), want)
    assert calls.get_counts() == {REDUCE: 1}
    counts = [(one.op, one.bytes_in, one.bytes_out) for one in mode.collectives]
    nbytes = want.nbytes
    assert (REDUCE, nbytes, nbytes) in counts


@pytest.mark.usefixtures("kernels")
@simulate(2)
def test_bytes_of_kernels_are_those_of_the_collectives():
    mesh = init_device_mesh(DEVICE, (2,))
    x, w = torch.ones(4, 6), torch.ones(6, 5)
    with torch.no_grad(), CommDebugMode() as mode:
        for kind in (GATHER, SCATTER):
            run = find_fused(kind, mesh, x, w)
            run()
    moved = {one.op: (one.axes, one.bytes_in, one.bytes_out) for one in mode.collectives}
    assert moved[GATHER] == (("axis0",), 96, 192)
    assert moved[SCATTER] == (("axis0",), 80, 40)


def reasons(style, x, features=6):
    """Give why a call was not fused on this rank, with its result's largest error."""
    mesh = init_device_mesh(DEVICE, (2,))
    torch.manual_seed(0)
    layer = nn.Linear(x.shape[-1], features, dtype=x.dtype)
    layers = [style.apply(copy.deepcopy(layer), mesh) for _ in range(2)]
    x = distribute_tensor(x, mesh, style.input_layouts)
    with fused_collectives() as calls:
        got = layers[1](x)
    assert torch.equal(got, layers[0](x))
    assert not calls.get_counts()
    return [call.refusal for call in calls.counts]


@pytest.mark.usefixtures("kernels")
@simulate(2)
def test_what_is_not_even_runs_apart():
    styles = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
    uneven = ["the ranks' parts must be of one size"]
    for style in styles:
        assert reasons(style, torch.randn(5, 6, dtype=DTYPE)) == uneven  # rows
        features = (6, 5) if style is styles[0] else (5, 6)
        assert reasons(style, torch.randn(4, features[0], dtype=DTYPE), features[1]) == uneven
    with torch.no_grad():
        assert reasons(RowwiseParallel(), torch.randn(4, 5, dtype=DTYPE)) == uneven


@pytest.mark.usefixtures("kernels")
def test_what_a_kernel_refuses_runs_apart(monkeypatch):
    monkeypatch.setattr(Stepwise, "unserved", DTYPE)

    @simulate(2)
    def run():
        x = torch.ones(4, 6, dtype=DTYPE)
        for style in (
            ColwiseParallel(input_layouts=Shard(0)),
            RowwiseParallel(output_layouts=Shard(0)),
        ):
            assert reasons(style, x) == [f"{DTYPE} is not served"]

    run()


@pytest.mark.usefixtures("kernels")
@simulate(2)
def test_a_wrong_shape_is_refused_as_outside_of_the_block():
    layer = RowwiseParallel().apply(nn.Linear(6, 5), init_device_mesh(DEVICE, (2,)))
    for x in (torch.ones(4, 4), torch.tensor(1.0)):
        texts = []
        for within in (nullcontext(), fused_collectives()):
            with pytest.raises(LayoutError) as caught, torch.no_grad(), within:
                layer(x)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


@simulate(2)
def test_a_backend_without_kernels_is_counted():
    style = ColwiseParallel(input_layouts=Shard(0))
    name = init_device_mesh(DEVICE, (2,)).backend.name
    assert reasons(style, torch.ones(4, 6)) == [f"the {name} backend has no such kernel"]


@pytest.mark.usefixtures("kernels")
@simulate(2)
def test_other_layouts_are_no_case_of_it():
    mesh = init_device_mesh(DEVICE, (2,))
    for style in (
        ColwiseParallel(),
        ColwiseParallel(input_layouts=Shard(-1)),
        RowwiseParallel(output_layouts=Shard(-1)),
    ):
        x = distribute_tensor(torch.ones(4, 6), mesh, style.input_layouts)
        layer = style.apply(nn.Linear(6, 8), mesh)
        with fused_collectives() as calls:
            layer(x).sum().backward()
        assert not calls.counts


@pytest.mark.usefixtures("kernels")
@simulate(2)
def test_blocks_nest_and_end_with_an_exception():
    mesh = init_device_mesh(DEVICE, (2,))
    layer = ColwiseParallel(input_layouts=Shard(0)).apply(nn.Linear(6, 8), mesh)
    x = torch.ones(2, 6)
    with fused_collectives() as outer:
        with pytest.raises(KeyError), fused_collectives() as inner:
            layer(x)
            raise KeyError
        layer(x), layer(x)
    layer(x)
    assert (inner.get_counts(), outer.get_counts()) == ({GATHER: 1}, {GATHER: 2})


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, DTYPE], ids=str)
@pytest.mark.usefixtures("kernels")
@simulate(2)
def test_autocast_is_that_of_the_two_steps(parameters):
    mesh = init_device_mesh(DEVICE, (2,))
    for style in (
        ColwiseParallel(input_layouts=Shard(0)),
        RowwiseParallel(output_layouts=Shard(0)),
    ):
        torch.manual_seed(0)
        layer = nn.Linear(6, 8, bias=False, dtype=parameters)
        x = distribute_tensor(torch.randn(4, 6, dtype=parameters), mesh, style.input_layouts)
        results = []
        for within in (nullcontext(), fused_collectives()):
            net = style.apply(copy.deepcopy(layer), mesh)
            leaf = x.to_local().requires_grad_()
            with within as calls, torch.autocast(DEVICE, dtype=torch.bfloat16):
                y = net(leaf)
            y.float().square().sum().backward()
            results.append([y.detach(), leaf.grad, net.weight.grad.to_local()])
        assert sum(calls.get_counts().values()) == 2
        for got, want in zip(*reversed(results), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
