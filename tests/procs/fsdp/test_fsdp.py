# SPDX-License-Identifier: Apache-2.0
"""fully_shard over tensor parallel on a (2, 2) mesh: the numbers of one process, in float64."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    clip_grad_norm_,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from support.device import DEVICE, DTYPE, TOLERANCE

VOCAB = 32
CLOSE = max(1e-10, TOLERANCE[DTYPE])
MAX_NORM = 0.05


def joint_mesh(kind="ours", names=("dp", "tp")):
    """The (2, 2) mesh, made by us or by the user with torch."""
    if kind == "ours":
        return init_device_mesh(DEVICE, (2, 2), mesh_dim_names=names)
    return torch.distributed.device_mesh.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=names)


def example_model():
    path = Path(__file__).parents[3] / "examples" / "model.py"
    if "example_model" not in sys.modules:
        spec = importlib.util.spec_from_file_location("example_model", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["example_model"] = module
        spec.loader.exec_module(module)
    return sys.modules["example_model"]


class LanguageModel(nn.Module):
    """The example's decoder, and a norm that no plan knows."""

    def __init__(self, config):
        super().__init__()
        self.decoder = example_model().Decoder(config)
        self.scores_norm = nn.LayerNorm(VOCAB)

    def forward(self, tokens_BT):
        return self.scores_norm(self.decoder(tokens_BT))


def language_models(mesh, sequence, tied):
    """The same model twice: whole, and parallel over both axes, layer by layer as tutorials do."""
    model = example_model()
    config = model.Config(
        vocab=VOCAB,
        dim=16,
        layers=2,
        heads=4,
        kv_heads=2,
        mlp_multiple=8,
        max_seq=8,
        bias=True,
        tied=tied,
    )
    whole = LanguageModel(config).to(DTYPE)
    ours = copy.deepcopy(whole)
    parallelize_module(ours.decoder, mesh["tp"], model.tp_plan(config, sequence))
    for layer in ours.decoder.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(ours, mesh=mesh["dp"])
    return whole, ours


def mlps(mesh, hidden, width=6, **kwargs):
    """The same MLP with a norm outside the plan, whole and parallel."""
    whole = nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.LayerNorm(width)
    ).to(DTYPE)
    ours = copy.deepcopy(whole)
    parallelize_module(ours, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(ours, mesh=mesh["dp"], **kwargs)
    return whole, ours


def worst(ours, whole, of=lambda param: param):
    """The largest difference between parameters, or what `of` makes of them."""
    pairs = zip(ours.parameters(), whole.parameters(), strict=True)
    return max((of(p).full_tensor() - of(q)).abs().max().item() for p, q in pairs)


def mean_over_dp(value, mesh):
    total = value.detach().clone()
    dist.all_reduce(total, group=mesh["dp"].get_group())
    return total / 2


def language_loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def square_loss(model, x):
    return (model(x) - x).square().mean()


def drawn(factory, seed, *args):
    """Draw on the CPU, alike on every rank, for the device."""
    generator = torch.Generator().manual_seed(seed)
    return factory(*args, generator=generator, device="cpu").to(DEVICE)


def tokens_of(step):
    return drawn(torch.randint, step, 0, VOCAB, (4, 9))


def rows_of(step, width=6):
    return drawn(torch.randn, step, 4, width).to(DTYPE)


def train(whole, ours, mesh, loss_of, batch_of, steps=5):
    """Train both with AdamW; the largest differences of losses, norms and parameters."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (whole, ours)]
    differences = {"loss": 0.0, "norm": 0.0, "parameter": 0.0}
    for step in range(steps):
        batch = batch_of(step)
        mine = batch.chunk(2)[mesh["dp"].get_local_rank()]
        losses = [loss_of(whole, batch), loss_of(ours, mine)]
        for loss in losses:
            loss.backward()
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        norm = clip_grad_norm_(ours.parameters(), MAX_NORM)
        assert wanted > MAX_NORM
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found = {
            "loss": (mean_over_dp(losses[1], mesh) - losses[0]).abs().item(),
            "norm": (norm - wanted).abs().item(),
            "parameter": worst(ours, whole),
        }
        differences = {name: max(found[name], differences[name]) for name in found}
    return differences


# ---------------------------------------------------------------- training


def train_language_model(kind, sequence, tied):
    mesh = joint_mesh(kind)
    whole, ours = language_models(mesh, sequence, tied)
    start = copy.deepcopy(whole)
    differences = train(whole, ours, mesh, language_loss, tokens_of)
    still_tied = ours.decoder.embed.weight is ours.decoder.head.weight
    return differences, still_tied, worst(ours, start)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_training_equals_one_process(procs4, sequence, tied):
    for differences, still_tied, moved in procs4.run(train_language_model, "ours", sequence, tied):
        assert max(differences.values()) < CLOSE, differences
        assert still_tied is tied
        assert moved > 1e-2


def test_training_on_the_users_own_torch_mesh(procs4):
    for differences, _, _ in procs4.run(train_language_model, "torch", True, False):
        assert max(differences.values()) < CLOSE, differences


def any_size(hidden, names):
    mesh = joint_mesh(names=names)
    whole, ours = mlps(mesh, hidden)
    pairs = zip(ours.parameters(), whole.parameters(), strict=True)
    exact = [torch.equal(p.full_tensor(), q) for p, q in pairs]
    return exact, train(whole, ours, mesh, square_loss, rows_of)


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")], ids="-".join)
@pytest.mark.parametrize("hidden", [8, 10, 5, 3])
def test_any_size_is_whole_again_and_trains(procs4, hidden, names):
    for exact, differences in procs4.run(any_size, hidden, names):
        assert exact == [True] * 6
        assert max(differences.values()) < CLOSE, differences


def hybrid(shape):
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("rep", "shard", "tp"))
    whole = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6)).to(DTYPE)
    ours = copy.deepcopy(whole)
    parallelize_module(ours, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(ours, mesh=mesh["rep", "shard"])
    square_loss(whole, rows_of(0)).backward()
    square_loss(ours, rows_of(0).chunk(2)[dist.get_rank() // 2]).backward()
    norms = [
        clip(m.parameters(), 1.0)
        for clip, m in ((torch.nn.utils.clip_grad_norm_, whole), (clip_grad_norm_, ours))
    ]
    return worst(ours, whole, lambda p: p.grad), (norms[0] - norms[1]).abs().item()


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
def test_hybrid_sharding_on_two_axes(procs4, shape):
    for gradient, norm in procs4.run(hybrid, shape):
        assert gradient < CLOSE
        assert norm < CLOSE


def flattened(kind):
    """The data axis is two axes in one; in "ours" torch's flat mesh is no slice of the root."""
    names = ("dp", "cp", "model")
    if kind == "ours":
        mesh = init_device_mesh(DEVICE, (2, 1, 2), mesh_dim_names=names)
        data = mesh["dp", "cp"].flatten("data")
    else:
        mesh = torch.distributed.device_mesh.init_device_mesh(
            DEVICE, (2, 1, 2), mesh_dim_names=names
        )
        data = mesh["dp", "cp"]._flatten("data")
    whole = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 6)).to(DTYPE)
    ours = copy.deepcopy(whole)
    parallelize_module(
        ours,
        mesh["model"],
        {
            "0": ColwiseParallel(output_layouts=Replicate()),
            "2": RowwiseParallel(input_layouts=Replicate()),
        },
    )
    groups = len(dist.distributed_c10d._world.pg_map)
    fully_shard(ours[0], mesh=data)
    fully_shard(ours, mesh=data)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    differences = train(whole, ours, {"dp": data}, square_loss, rows_of, steps=2)
    return differences, ours[0].weight.device_mesh.mesh_dim_names


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_flattened_data_mesh(procs4, kind):
    for differences, names in procs4.run(flattened, kind):
        assert max(differences.values()) < CLOSE
        assert names == ("data", "model")


# ---------------------------------------------------------------- what FSDP2 builds


def built():
    # Names of its own: torch takes any earlier mesh that is equal, with that one's groups.
    mesh = joint_mesh(names=("data", "model"))
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))
    parallelize_module(net, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    weight = net[0].weight
    torch_mesh, axes = mesh.handle, ("data", "model")
    return {
        "groups": [mesh[axis].get_group() is torch_mesh[axis].get_group() for axis in axes],
        "groups of the parameter": [
            weight.device_mesh.get_group(axis) is mesh[axis].get_group() for axis in axes
        ],
        "axes": weight.device_mesh.mesh_dim_names,
        "placements": [str(tuple(p.placements)) for p in net.parameters()],
    }


def test_fsdp_builds_joint_layouts_on_the_same_groups(procs4):
    for found in procs4.run(built):
        assert found["groups"] == [True, True]
        assert found["groups of the parameter"] == [True, True]
        assert found["axes"] == ("data", "model")
        column = "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
        assert found["placements"] == [
            column,
            column,
            "(Shard(dim=0), Shard(dim=1))",
            "(Shard(dim=0), Replicate())",
            "(Shard(dim=0),)",
            "(Shard(dim=0),)",
        ]


def placed():
    mesh = joint_mesh()
    whole = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).to(DTYPE)
    ours = copy.deepcopy(whole)
    parallelize_module(ours, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    wide = {ours[0].weight}
    fully_shard(ours, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1) if p in wide else None)
    return str(ours[0].weight.placements), train(whole, ours, mesh, square_loss, rows_of, steps=2)


def test_shard_placement_fn_sees_our_parameters_and_may_give_our_shard(procs4):
    for placements, differences in procs4.run(placed):
        assert placements == "(Shard(dim=1), Shard(dim=0))"
        assert max(differences.values()) < CLOSE


def grouped():
    mesh = joint_mesh()
    whole = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).to(DTYPE)
    ours = copy.deepcopy(whole)
    parallelize_module(ours, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    kept = ours[2].bias
    fully_shard([ours[0], ours[2]], mesh=mesh["dp"], ignored_params={kept})
    return ours[2].bias is kept, type(ours[0].weight).__module__


def test_a_list_of_modules_is_one_group_and_ignored_parameters_stay(procs4):
    for kept, kind in procs4.run(grouped):
        assert kept
        assert kind == "torch.distributed.tensor"


def state():
    mesh = joint_mesh()
    whole, ours = language_models(mesh, True, True)
    wanted = whole.state_dict()
    found = ours.state_dict()
    assert found.keys() == wanted.keys()
    kinds = {type(value).__module__ for value in found.values()}
    exact = all(torch.equal(found[name].full_tensor(), wanted[name]) for name in wanted)
    other = language_models(mesh, True, True)[1]
    before = worst(other, whole)
    other.load_state_dict(found)
    return kinds, exact, before, worst(other, whole)


def test_state_dict_holds_torch_dtensors_and_loads_again(procs4):
    for kinds, exact, before, after in procs4.run(state):
        assert kinds == {"torch.distributed.tensor"}
        assert exact
        assert before > 0
        assert after == 0


# ---------------------------------------------------------------- ways to train


def accumulate(sync):
    mesh = joint_mesh()
    whole, ours = language_models(mesh, True, False)
    for step in range(2):
        batch = tokens_of(step)
        language_loss(whole, batch).backward()
        ours.set_requires_gradient_sync(sync or step == 1)
        ours.set_reshard_after_backward(sync or step == 1)
        language_loss(ours, batch.chunk(2)[mesh["dp"].get_local_rank()]).backward()
    return worst(ours, whole, lambda p: p.grad)


@pytest.mark.parametrize("sync", [True, False], ids=["synced", "unsynced"])
def test_gradients_accumulate_over_two_backwards(procs4, sync):
    assert max(procs4.run(accumulate, sync)) < CLOSE


def freeze():
    mesh = joint_mesh()
    whole = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).to(DTYPE)
    whole[0].weight.requires_grad_(False)
    whole[2].bias.requires_grad_(False)
    ours = copy.deepcopy(whole)
    parallelize_module(ours, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(ours, mesh=mesh["dp"])
    differences = train(whole, ours, mesh, square_loss, rows_of, steps=2)
    return [p.requires_grad for p in ours.parameters()], differences


def test_frozen_parameters_stay(procs4):
    for asks, differences in procs4.run(freeze):
        assert asks == [False, True, True, False]
        assert max(differences.values()) < CLOSE


def recompute():
    from torch.utils.checkpoint import checkpoint

    mesh = joint_mesh()
    whole, ours = mlps(mesh, 8)
    square_loss(whole, rows_of(0)).backward()
    mine = rows_of(0).chunk(2)[mesh["dp"].get_local_rank()]
    square_loss(lambda x: checkpoint(ours, x, use_reentrant=False), mine).backward()
    return worst(ours, whole, lambda p: p.grad)


def test_activation_checkpointing(procs4):
    assert max(procs4.run(recompute)) < CLOSE


def half_precision(sequence):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = joint_mesh()
    model = example_model()
    config = model.Config(
        vocab=VOCAB, dim=16, layers=1, heads=4, kv_heads=2, mlp_multiple=8, max_seq=8
    )
    whole = model.Decoder(config)
    ours = copy.deepcopy(whole)
    for module in ours.modules():  # the rotary tables: a policy casts parameters and inputs only
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.bfloat16())
    parallelize_module(ours, mesh["tp"], model.tp_plan(config, sequence))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(ours.layers[0], mesh=mesh["dp"], mp_policy=policy)
    fully_shard(ours, mesh=mesh["dp"], mp_policy=policy)
    seen = []
    ours.layers[0].mlp.down.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    mine = tokens_of(0).chunk(2)[mesh["dp"].get_local_rank()]
    losses = [language_loss(whole, tokens_of(0)), language_loss(ours, mine)]
    for loss in losses:
        loss.backward()
    wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    norm = clip_grad_norm_(ours.parameters(), 1.0)
    loss = (mean_over_dp(losses[1].float(), mesh) - losses[0]).abs() / losses[0]
    dtypes = {p.grad.dtype for p in ours.parameters()}
    return loss.item(), ((norm - wanted).abs() / wanted).item(), seen, dtypes


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_mixed_precision_computes_in_bfloat16_and_is_close(procs4, sequence):
    for loss, norm, seen, dtypes in procs4.run(half_precision, sequence):
        assert seen == [torch.bfloat16]
        assert dtypes == {torch.float32}
        assert 0 < loss < 0.01
        assert norm < 0.05
