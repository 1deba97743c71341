# SPDX-License-Identifier: Apache-2.0
"""Plans and styles give what torch's own give, on two processes: outputs and all gradients."""

import copy
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

from support.device import DEVICE, DTYPE, TOLERANCE

MODEL = Path(__file__).parents[3] / "examples" / "model.py"


def load_model():
    name = "hyper_parallel_example_model"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, MODEL)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def torch_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))


def our_mesh():
    from hyper_parallel import init_device_mesh

    return init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))


def translate(value):
    """Give torch's placement or style for one of ours."""
    import torch.distributed.tensor as tensor
    import torch.distributed.tensor.parallel as theirs

    from hyper_parallel import Partial, Replicate, Shard

    if isinstance(value, tuple):
        return tuple(translate(one) for one in value)
    if isinstance(value, Shard):
        return tensor.Shard(value.dim)
    if isinstance(value, Replicate):
        return tensor.Replicate()
    if isinstance(value, Partial):
        return tensor.Partial(value.reduce_op)
    options = dict(vars(value))
    options.pop("even_shards")
    name = type(value).__name__
    if name == "SequenceParallel":
        options["sequence_dim"] = options.pop("sequence_sharding")[0].dim
    elif name in ("ColwiseParallel", "RowwiseParallel"):
        options = {
            key: entry[0] if isinstance(entry, tuple) else entry for key, entry in options.items()
        }
    return getattr(theirs, name)(**{key: translate_option(v) for key, v in options.items()})


def translate_option(value):
    from hyper_parallel import Placement

    if isinstance(value, (tuple, Placement)):
        return translate(value)
    return value or None if isinstance(value, dict) else value


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same(got, want, what):
    import torch

    torch.testing.assert_close(
        got, want, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE], msg=lambda text: f"{what}: {text}"
    )


# ---------------------------------------------------------------------- the demo's model


def compare_decoder(bias, sequence_parallel, mesh_kind):
    import torch
    import torch.distributed.tensor.parallel as theirs

    import hyper_parallel

    demo = load_model()
    config = demo.Config(
        vocab=24, dim=16, layers=2, heads=4, kv_heads=2, mlp_multiple=4, max_seq=8, bias=bias
    )
    torch.manual_seed(0)
    dense = demo.Decoder(config).to(DTYPE)
    for name, param in dense.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(param)
    plan = demo.tp_plan(config, sequence_parallel)
    their_plan = {name: translate(style) for name, style in plan.items()}
    tokens = torch.randint(config.vocab, (2, 9))
    models = [copy.deepcopy(dense) for _ in range(2)]
    theirs.parallelize_module(models[0], torch_mesh(), their_plan)
    mesh = our_mesh() if mesh_kind == "ours" else torch_mesh()
    hyper_parallel.parallelize_module(models[1], mesh, plan)
    logits = []
    for model in (dense, *models):
        logits.append(model(tokens[:, :-1]))
        loss = torch.nn.functional.cross_entropy(logits[-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    same(logits[2], logits[1].detach(), "logits")
    same(logits[2], logits[0].detach(), "dense logits")
    their_params, dense_params = (dict(m.named_parameters()) for m in (models[0], dense))
    assert [n for n, _ in models[1].named_parameters()] == list(their_params)
    for name, param in models[1].named_parameters():
        theirs_is = their_params[name]
        same(full(param.grad), full(theirs_is.grad), name)
        same(full(param.grad), dense_params[name].grad, f"dense {name}")
        assert local(param).shape == local(theirs_is).shape
    # torch's lists of tensors mix its DTensors and plain ones.
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in models]
    for optimizer in optimizers:
        optimizer.step()
    same(models[1](tokens[:, 1:]), models[0](tokens[:, 1:]).detach(), "logits after a step")


@pytest.mark.parametrize("mesh_kind", ["ours", "torch's"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_the_decoder_gives_torchs_numbers(procs2, bias, sequence_parallel, mesh_kind):
    procs2.run(compare_decoder, bias, sequence_parallel, mesh_kind)


# ---------------------------------------------------------------------- the styles' options


def compare_layers(kind, style_name):
    """Run one module under both libraries for all options and compare what each rank sees."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import hyper_parallel
    from hyper_parallel import Partial, Replicate, Shard

    meshes = torch_mesh(), our_mesh()
    rank = meshes[1].get_local_rank()
    places = [Replicate(), Shard(-1), Shard(0), Shard(1), Partial()]
    given_places = [p for p in places if kind == "linear" or p != Partial()]
    count = 0
    for given, wanted, use_local in itertools.product(given_places, places, (True, False)):
        if wanted == Partial() and (kind, style_name) != ("linear", "RowwiseParallel"):
            continue  # torch refuses a move to a pending sum
        torch.manual_seed(0)
        if kind == "linear":
            dense = nn.Linear(6, 4).to(DTYPE)
            x = torch.randn(2, 4, 6, dtype=DTYPE)
        else:
            dense = nn.Embedding(6, 4).to(DTYPE)
            x = torch.randint(6, (2, 4))
        style = getattr(hyper_parallel, style_name)(
            input_layouts=given, output_layouts=wanted, use_local_output=use_local
        )
        part = x.chunk(2, given.dim)[rank].clone() if given.is_shard() else x
        layers = [copy.deepcopy(dense), copy.deepcopy(dense)]
        translate(style)._apply(layers[0], meshes[0])
        style.apply(layers[1], meshes[1])
        results = []
        for layer in layers:
            leaf = part.clone()
            if kind == "linear":
                leaf.requires_grad_()
            out = layer(leaf)
            assert hasattr(out, "placements") is not use_local
            out = local(out)
            torch.manual_seed(1)
            out.backward(torch.randn(out.shape, dtype=DTYPE))
            results.append((out.detach(), leaf.grad, layer))
        (want, want_grad, want_layer), (got, got_grad, got_layer) = results
        what = f"{style}"
        if wanted == Partial():  # what each rank holds of a sum is its own affair
            got, want = got.clone(), want.clone()
            dist.all_reduce(got), dist.all_reduce(want)
        same(got, want, what)
        if kind == "linear":
            same(got_grad, want_grad, f"input of {what}")
        for name, param in got_layer.named_parameters():
            same(full(param.grad), full(getattr(want_layer, name).grad), f"{name} of {what}")
        count += 1
    return count


@pytest.mark.parametrize("style", ["ColwiseParallel", "RowwiseParallel"])
@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_every_pair_of_layouts_gives_torchs_numbers(procs2, kind, style):
    inputs = 5 if kind == "linear" else 4
    outputs = 5 if (kind, style) == ("linear", "RowwiseParallel") else 4
    assert procs2.run(compare_layers, kind, style) == [inputs * outputs * 2] * 2


def compare_prepared():
    import torch
    from torch import nn

    from hyper_parallel import (
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        Replicate,
        SequenceParallel,
        Shard,
    )

    meshes = torch_mesh(), our_mesh()
    layouts = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    out_layouts = {"output_layouts": Replicate(), "desired_output_layouts": Shard(0)}
    styles = [
        PrepareModuleInput(**layouts, use_local_output=True),
        PrepareModuleInput(**layouts),
        PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        PrepareModuleOutput(**out_layouts, use_local_output=False),
        PrepareModuleInputOutput(**layouts, **out_layouts),
        PrepareModuleInputOutput(**layouts, **out_layouts, use_local_input=True),
        SequenceParallel(),
        SequenceParallel(use_local_output=True),
        SequenceParallel(sequence_dim=0, use_local_output=True),
    ]
    for style in styles:
        theirs_is = translate_nested(style)
        results = []
        for one, mesh in ((theirs_is, meshes[0]), (style, meshes[1])):
            torch.manual_seed(0)
            module = nn.LayerNorm(6) if "Sequence" in type(style).__name__ else nn.Identity()
            apply = one._apply if one is theirs_is else one.apply
            module = apply(module.to(DTYPE), mesh)
            x = torch.randn(2, 4, 6, dtype=DTYPE, requires_grad=True)
            out = module(x)
            is_dtensor = hasattr(out, "placements")
            out = local(out)
            out.backward(torch.randn(out.shape, dtype=DTYPE))
            grads = [full(p.grad) for p in module.parameters()]
            results.append((is_dtensor, [out.detach(), x.grad, *grads]))
        assert results[0][0] == results[1][0], style
        for got, want in zip(results[1][1], results[0][1], strict=True):
            same(got, want, str(style))
    return len(styles)


def translate_nested(style):
    if type(style).__name__ != "PrepareModuleInputOutput":
        return translate(style)
    import torch.distributed.tensor.parallel as theirs

    before, after = style.prepare_module_input, style.prepare_module_output
    return theirs.PrepareModuleInputOutput(
        input_layouts=translate(before.input_layouts),
        desired_input_layouts=translate(before.desired_input_layouts),
        use_local_input=before.use_local_output,
        output_layouts=translate(after.output_layouts),
        desired_output_layouts=translate(after.desired_output_layouts),
        use_local_output=after.use_local_output,
    )


def test_prepared_inputs_and_outputs_and_norms_give_torchs_numbers(procs2):
    assert procs2.run(compare_prepared) == [9, 9]


# ---------------------------------------------------------------------- loss_parallel


def compare_losses():
    """Compare losses of logits cut along the classes, and their gradients, for all reductions."""
    import torch
    import torch.distributed.tensor.parallel as theirs
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor import distribute_tensor as torch_distribute
    from torch.nn import functional as F

    import hyper_parallel as ours

    torch.manual_seed(0)
    count, meshes = 0, (torch_mesh(), our_mesh())
    for shape, weighted in itertools.product(((6, 8), (2, 8, 3), (8,)), (False, True)):
        logits = torch.randn(shape, dtype=DTYPE)
        target = torch.randint(8, shape[:1] + shape[2:] if len(shape) > 1 else ())
        if target.ndim and not weighted:  # with weights torch's own looks -100 up
            target.view(-1)[1] = -100
        weight = torch.rand(8, dtype=DTYPE) if weighted else None
        dim = min(len(shape) - 1, 1)
        for reduction in ("none", "sum", "mean"):
            given = (
                torch_distribute(logits, meshes[0], [TorchShard(dim)]),
                ours.distribute_tensor(logits, meshes[1], [ours.Shard(dim)]),
            )
            results = []
            for x, context in zip(given, (theirs.loss_parallel, ours.loss_parallel), strict=True):
                x.requires_grad_()
                with context():
                    loss = F.cross_entropy(x, target, weight, reduction=reduction)
                    loss.sum().backward()
                results.append((full(loss).detach(), full(x.grad)))
            for got, want in zip(results[1], results[0], strict=True):
                same(got, want, f"{shape}, {reduction}, weighted {weighted}")
            count += 1
    return count


def test_loss_parallel_gives_torchs_numbers(procs2):
    assert procs2.run(compare_losses) == [18, 18]


# ---------------------------------------------------------------------- a script half ported


def run_half_ported():
    """Only the tensor.parallel import was swapped: torch's mesh and torch's placements."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    from hyper_parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x):
            return self.down(torch.relu(self.up(self.norm(x))))

    torch.manual_seed(0)
    dense = Block().to(DTYPE)
    mesh = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    block = parallelize_module(copy.deepcopy(dense), mesh["tp"], plan)
    copied = copy.deepcopy(block)
    x = torch.randn(2, 5, 6, dtype=DTYPE)
    for model in (dense, block, copied):
        model(x).square().sum().backward()
    for model in (block, copied):
        same(model(x), dense(x).detach(), "output")
        for (name, want), got in zip(dense.named_parameters(), model.parameters(), strict=True):
            same(full(got.grad), want.grad, name)


def test_a_script_with_torchs_mesh_and_placements(procs2):
    procs2.run(run_half_ported)


def refuse_two_axes():
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from hyper_parallel import ColwiseParallel, LayoutError, parallelize_module

    mesh = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("dp", "tp"))
    try:
        parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
    except LayoutError as error:
        return str(error)
    return "no error"


def test_torchs_mesh_of_two_axes_must_be_sliced(procs2):
    for text in procs2.run(refuse_two_axes):
        assert text.startswith("parallelize_module: device_mesh must have one axis")
        assert "pass mesh['tp']" in text


def train_odd_sequence():
    """Plain uneven parts of a sequence, where torch's own aborts the process."""
    import torch
    from torch import nn

    from hyper_parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        Shard,
        parallelize_module,
    )

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    torch.manual_seed(0)
    dense = Block().to(DTYPE)
    mesh = our_mesh()
    rank = mesh.get_local_rank()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    block = parallelize_module(copy.deepcopy(dense), mesh, plan)
    for length, first in ((5, 3), (4, 2), (1, 1)):
        x = torch.randn(3, length, 8, dtype=DTYPE)
        part = x.tensor_split([first], 1)[rank]
        y = dense(x)
        y.square().sum().backward()
        out = block(part)
        out.square().sum().backward()
        same(out.detach(), y.detach().tensor_split([first], 1)[rank], "output")
    for (name, want), got in zip(dense.named_parameters(), block.parameters(), strict=True):
        same(full(got.grad), want.grad, name)


def test_plain_parts_of_an_odd_sequence_equal_dense(procs2):
    procs2.run(train_odd_sequence)
