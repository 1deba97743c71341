# SPDX-License-Identifier: Apache-2.0
"""The demo's decoder and small nets under a plan equal one process: outputs and all gradients."""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    LayoutError,
    PlanError,
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

MODEL = Path(__file__).parents[3] / "examples" / "model.py"
SMALL = {"vocab": 24, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 4, "mlp_multiple": 4}


def load_model():
    name = "hyper_parallel_example_model"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, MODEL)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


demo = load_model()


def train_step(model, tokens):
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return logits.detach()


def check(config, *, tp, positions, sequence_parallel, dtype=DTYPE):
    """Run one step dense and parallel on this rank, and compare everything."""
    mesh = init_device_mesh(DEVICE, (tp,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    dense = demo.Decoder(config).to(dtype)
    for name, param in dense.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(param)
    model = copy.deepcopy(dense)
    parallelize_module(model, mesh, demo.tp_plan(config, sequence_parallel))
    tokens = torch.randint(config.vocab, (2, positions + 1))
    want, got = train_step(dense, tokens), train_step(model, tokens)
    assert_same(got, want, "logits")
    names = [name for name, _ in dense.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    parallel = dict(model.named_parameters())
    for name, param in dense.named_parameters():
        grad = parallel[name].grad
        assert_same(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, param.grad, name)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tp", [2, 4])
def test_the_decoder_equals_one_process(tp, bias, tied, sequence_parallel):
    config = demo.Config(**SMALL, bias=bias, tied=tied)
    simulate(tp).run(check, config, tp=tp, positions=8, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_the_decoder_equals_one_process_in_single_precision(sequence_parallel):
    options = {"tp": 2, "positions": 8, "sequence_parallel": sequence_parallel}
    simulate(2).run(check, demo.Config(**SMALL), dtype=torch.float32, **options)


@pytest.mark.parametrize("positions", [1, 3, 5, 7, 9])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_sequence_that_does_not_divide_equals_one_process(tp, positions):
    sizes = SMALL | {"heads": 6, "kv_heads": 3, "dim": 24} if tp == 3 else SMALL
    config = demo.Config(**sizes, bias=True, tied=True)
    simulate(tp).run(check, config, tp=tp, positions=positions, sequence_parallel=True)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(("vocab", "multiple"), [(23, 4), (24, 5), (25, 7), (3, 1)])
def test_sizes_that_do_not_divide_equal_one_process(vocab, multiple, sequence_parallel):
    sizes = SMALL | {"vocab": vocab, "mlp_multiple": multiple}
    config = demo.Config(**sizes, bias=True, tied=True)
    options = {"tp": 4, "positions": 6, "sequence_parallel": sequence_parallel}
    simulate(4).run(check, config, **options)


# ---------------------------------------------------------------------- heads


def outcomes_of(config, tp, plan=None):
    def run():
        mesh = init_device_mesh(DEVICE, (tp,))
        model = demo.Decoder(config)
        parallelize_module(model, mesh, plan or demo.tp_plan(config))
        return model(torch.zeros(1, 4, dtype=torch.long))

    return simulate(tp).outcomes(run)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp"),
    [(6, 3, 2), (4, 2, 4), (8, 1, 2), (3, 3, 2), (4, 4, 3)],
    ids=lambda value: str(value),
)
def test_a_cut_through_a_head_never_gives_numbers(heads, kv_heads, tp):
    config = demo.Config(vocab=8, dim=4 * heads, layers=1, heads=heads, kv_heads=kv_heads)
    for outcome in outcomes_of(config, tp):
        assert isinstance(outcome, Exception)


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(35, 5, 3), (10, 5, 3)])
def test_heads_cut_apart_from_their_key_heads_are_refused_by_name(heads, kv_heads, tp):
    config = demo.Config(vocab=8, dim=2 * heads, layers=1, heads=heads, kv_heads=kv_heads)
    for outcome in outcomes_of(config, tp):
        assert isinstance(outcome, PlanError)
        assert "ColwiseParallel on 'layers.0.attention.wq'" in str(outcome)
        assert f"its {2 * heads} features must be cut over {tp} ranks" in str(outcome)
        assert f"'layers.0.attention.wk' are, {heads // kv_heads} for each one" in str(outcome)


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(6, 3, 2), (10, 5, 3), (5, 5, 3), (4, 2, 2)])
def test_heads_in_blocks_equal_one_process(heads, kv_heads, tp):
    config = demo.Config(**SMALL | {"dim": 4 * heads, "heads": heads, "kv_heads": kv_heads})
    group = 4 * heads // kv_heads
    blocks = {"wq": group, "wk": 4, "wv": 4}

    def run():
        mesh = init_device_mesh(DEVICE, (tp,))
        torch.manual_seed(0)
        dense = demo.Decoder(config).to(DTYPE)
        plan = demo.tp_plan(config)
        for layer in range(config.layers):
            attention = f"layers.{layer}.attention"
            for name, block in blocks.items():
                plan[f"{attention}.{name}"] = ColwiseParallel(output_layouts=Shard(-1, block=block))
            plan[f"{attention}.wo"] = RowwiseParallel(input_layouts=Shard(-1, block=group))
        model = parallelize_module(copy.deepcopy(dense), mesh, plan)
        tokens = torch.randint(config.vocab, (2, 6))
        assert_same(train_step(model, tokens), train_step(dense, tokens), "logits")
        parallel = dict(model.named_parameters())
        for name, param in dense.named_parameters():
            grad = parallel[name].grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            assert_same(whole, param.grad, name)

    simulate(tp).run(run)


class Side(nn.Module):
    """Two layers side by side."""

    def __init__(self, one, two):
        super().__init__()
        self.one, self.two = nn.Linear(*one), nn.Linear(*two)


@pytest.mark.parametrize(
    ("one", "two", "tp"),
    [
        ((4, 10), (4, 10), 4),  # the same features: cut alike
        ((4, 10), (5, 5), 4),  # they read different features
        ((4, 10), (4, 7), 4),  # no multiple: nothing pairs them
        ((4, 8), (4, 4), 2),  # even cuts
        ((4, 10), (4, 5), 5),
    ],
    ids=str,
)
def test_layers_side_by_side_that_belong_together_no_closer_are_left_alone(one, two, tp):
    @simulate(tp)
    def run():
        plan = {"*": ColwiseParallel()}
        parallelize_module(Side(one, two), init_device_mesh(DEVICE, (tp,)), plan)

    run()


def test_unlike_layers_side_by_side_are_taken_where_dtensors_or_whole_features_leave_them():
    @simulate(4)
    def run():
        mesh = init_device_mesh(DEVICE, (4,))
        with pytest.raises(PlanError, match="10 features must be cut over 4 ranks"):
            parallelize_module(Side((4, 10), (4, 5)), mesh, {"*": ColwiseParallel()})
        for style in (
            ColwiseParallel(use_local_output=False),
            ColwiseParallel(output_layouts=Replicate()),
        ):
            parallelize_module(Side((4, 10), (4, 5)), mesh, {"*": style})

    run()


def test_a_block_that_does_not_divide_is_refused_by_name():
    @simulate(2)
    def run():
        net = nn.Sequential(nn.Linear(4, 6))
        style = ColwiseParallel(output_layouts=Shard(-1, block=4))
        with pytest.raises(LayoutError, match=r"ColwiseParallel on '0': .*block"):
            parallelize_module(net, init_device_mesh(DEVICE, (2,)), {"0": style})

    run()


# ---------------------------------------------------------------------- field cases


@pytest.mark.parametrize("hidden", [8, 10, 5])
@simulate(4)
def test_a_column_and_row_pair_equals_dense_for_any_hidden_size(hidden):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, hidden), nn.GELU(), nn.Linear(hidden, 3)).to(DTYPE)
    mesh = init_device_mesh(DEVICE, (4,), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    net = parallelize_module(copy.deepcopy(dense), mesh, plan)
    x = torch.randn(5, 6, dtype=DTYPE)
    outs = []
    for model in (dense, net):
        outs.append(model(x))
        outs[-1].square().sum().backward()
    assert_same(outs[1], outs[0].detach())
    for (name, param), parallel in zip(dense.named_parameters(), net.parameters(), strict=True):
        assert_same(parallel.grad.full_tensor(), param.grad, name)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize(("length", "cuts"), [(5, [3]), (4, [2]), (1, [1])])
@simulate(2)
def test_plain_parts_of_an_odd_sequence_equal_dense(length, cuts):
    torch.manual_seed(0)
    dense = Block().to(DTYPE)
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    block = parallelize_module(copy.deepcopy(dense), mesh, plan)
    x = torch.randn(3, length, 8, dtype=DTYPE, requires_grad=True)
    part = x.detach().tensor_split(cuts, 1)[rank].clone().requires_grad_()
    y, y_part = dense(x), block(part)
    grad = torch.randn_like(y)
    y.backward(grad)
    y_part.backward(grad.tensor_split(cuts, 1)[rank])
    assert_same(y_part.detach(), y.detach().tensor_split(cuts, 1)[rank])
    assert_same(part.grad, x.grad.tensor_split(cuts, 1)[rank])
    for (name, param), parallel in zip(dense.named_parameters(), block.parameters(), strict=True):
        assert_same(parallel.grad.full_tensor(), param.grad, name)


def test_parts_that_are_no_chunks_are_refused_on_every_rank_before_any_tensor_moves():
    def run():
        mesh = init_device_mesh(DEVICE, (2,))
        plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
        block = parallelize_module(Block(), mesh, plan)
        x = torch.ones(3, 5, 8)
        return block(x.tensor_split([2], 1)[mesh.get_local_rank()])

    for outcome in simulate(2).outcomes(run):
        assert isinstance(outcome, LayoutError)
        assert str(outcome).startswith("SequenceParallel on 'norm': the shards of dim 1 must have")
        assert "sizes=(2, 3)" in str(outcome)
