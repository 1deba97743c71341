# SPDX-License-Identifier: Apache-2.0
"""Training with DTensor parameters equals training in one process, for all optimizers of torch."""

from __future__ import annotations

import copy
import inspect
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import swa_utils

from hyper_parallel import (
    DeviceMesh,
    DTensor,
    LayoutError,
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    get_total_norm,
    init_device_mesh,
    simulate,
    step_locally,
)
from hyper_parallel.dtensor import lists
from support.device import DEVICE, DTYPE, TOLERANCE, steps_lists_locally
from support.dtensors import laid, line, parameter, same, seeded

# Steps so short that the loss does not grow beyond float32.
OPTIMIZERS = {
    "SGD": {"lr": 0.0001, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "ASGD": {"lr": 0.001},
    "Adadelta": {"lr": 0.1, "maximize": True},
    "Adafactor": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adamax": {"lr": 0.01},
    "Muon": {"lr": 0.01},
    "NAdam": {"lr": 0.01, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.0001},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
}
NOT_ELEMENTWISE = ("Adafactor", "Muon")
# These multiply a list of parameters by a number; fused ones have kernels of lists as well.
MULTIPLIED = [("AdamW", "foreach")]
VARIANTS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
CASES = [
    (name, variant)
    for name in OPTIMIZERS
    if hasattr(optim, name)  # Muon is new in torch 2.9
    for variant, option in VARIANTS.items()
    if (name == "Muon" and variant == "loop")
    or set(option) <= set(inspect.signature(getattr(optim, name)).parameters)
]


class Model(nn.Module):
    """Two cut weights, a replicated norm, and a plain scale."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 5, bias=True)
        self.norm = nn.LayerNorm(6)
        self.down = nn.Linear(5, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        for i, p in enumerate(self.parameters()):
            p.data = seeded(*p.shape, seed=i)

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.norm(x))))
        y = y.full_tensor() if hasattr(y, "full_tensor") else y
        return (y.square().mean(1) * self.scale).square().sum()


def pair():
    mesh = line(2)
    plain = Model()
    ours = copy.deepcopy(plain)
    for module, name, placement in (
        (ours.up, "weight", Shard(0)),
        (ours.up, "bias", Shard(0)),
        (ours.norm, "weight", Replicate()),
        (ours.norm, "bias", Replicate()),
        (ours.down, "weight", Shard(1)),
    ):
        setattr(module, name, distribute_tensor(getattr(module, name), mesh, [placement]))
    x = seeded(3, 6, seed=9)
    return ours, plain, laid(x, mesh, Replicate()), x


def equal(ours, plain):
    """Compare tensors with those of one process."""
    for p, q in zip(ours, plain, strict=True):
        whole = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        torch.testing.assert_close(whole, q.detach(), rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE])


def trained(model, x, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


def made(model, name, **options):
    params = [p for p in model.parameters() if p.ndim == 2 or name != "Muon"]
    return getattr(optim, name)(params, **OPTIMIZERS[name], **options)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_optimizer_steps_equal_one_process(name, variant):
    options = {} if name == "Muon" else VARIANTS[variant]

    @simulate(2)
    def run():
        ours, plain, x, whole_x = pair()
        trained(plain, whole_x, made(plain, name, **options))
        optimizer = made(ours, name, **options)
        trained(ours, x, optimizer)
        equal(ours.parameters(), plain.parameters())
        if name in NOT_ELEMENTWISE:
            with pytest.raises(LayoutError, match="step_locally: the optimizer must be one of"):
                step_locally(optimizer)

    run()


def local_case(name, variant):
    multiplies_lists = variant == "fused" or (name, variant) in MULTIPLIED
    return pytest.param(name, variant, marks=[steps_lists_locally] if multiplies_lists else [])


@pytest.mark.parametrize(
    ("name", "variant"), [local_case(*case) for case in CASES if case[0] not in NOT_ELEMENTWISE]
)
def test_local_steps_equal_one_process(name, variant):
    @simulate(2)
    def run():
        ours, plain, x, whole_x = pair()
        trained(plain, whole_x, made(plain, name, **VARIANTS[variant]))
        trained(ours, x, step_locally(made(ours, name, **VARIANTS[variant])))
        equal(ours.parameters(), plain.parameters())

    run()


def test_every_optimizer_is_tried():
    every = {n for n, v in vars(optim).items() if inspect.isclass(v) and v is not optim.Optimizer}
    # These have tests of their own.
    assert every - {"SparseAdam", "LBFGS"} <= set(OPTIMIZERS)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_on_one_mesh_equals_one_process_and_refuses_plain_parameters(search):
    @simulate(2)
    def run():
        ours, plain, x, whole_x = pair()
        for model, given in ((ours, x), (plain, whole_x)):
            model.requires_grad_(True).scale.requires_grad_(False)
            params = [p for p in model.parameters() if p.requires_grad]
            optimizer = optim.LBFGS(params, lr=0.1, max_iter=3, line_search_fn=search)

            def closure(model=model, given=given, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(given)
                loss.backward()
                return loss

            for _ in range(2):
                optimizer.step(closure)
        equal(ours.parameters(), plain.parameters())
        ours.scale.requires_grad_(True)
        mixed = optim.LBFGS(ours.parameters())
        with pytest.raises(LayoutError, match="'cat': every tensor operand must be a DTensor"):
            mixed.step(lambda: ours(x).backward() or 1.0)

    run()


def test_lbfgs_on_two_meshes_is_refused_on_every_rank():
    def run():
        first, second = (init_device_mesh(DEVICE, (2,), mesh_dim_names=(n,)) for n in ("dp", "tp"))
        params = [parameter(seeded(4), mesh, Shard(0)) for mesh in (first, second)]
        for p in params:
            p.square().sum().backward()
        optim.LBFGS(params).step(lambda: 1.0)

    outcomes = simulate(2).outcomes(run)
    assert all(
        "'cat': all operands must be on one mesh, but got meshes=" in str(e) for e in outcomes
    )
    assert all(isinstance(error, LayoutError) for error in outcomes)


@simulate(2)
def test_sparse_adam_gets_no_sparse_gradients_and_refuses_dense_ones():
    table = parameter(seeded(6, 4), line(2), Shard(1))
    ids = laid(torch.tensor([1, 5]), line(2), Replicate())
    must = "sparse is not supported on DTensors, .* use Adam in place of SparseAdam"
    with pytest.raises(LayoutError, match=must):
        F.embedding(ids, table, sparse=True)
    F.embedding(ids, table).sum().backward()
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        optim.SparseAdam([table]).step()
    same(table, seeded(6, 4))


@pytest.mark.parametrize(
    "local", [False, pytest.param(True, marks=steps_lists_locally)], ids=["as it is", "locally"]
)
def test_two_meshes_and_a_plain_parameter_with_clipping(local):
    """Parameters on (2, 2), on one of its axes, and plain."""

    @simulate(4)
    def run():
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
        wholes = [seeded(5, 6, seed=i) for i in range(5)]
        plain = [nn.Parameter(whole.clone()) for whole in wholes]
        layouts = [
            (mesh, [Shard(0), Shard(1)]),
            (mesh, [Replicate(), Shard(0)]),
            (mesh["tp"], [Shard(1)]),
            (mesh["dp"], [Replicate()]),
        ]
        ours = [
            nn.Parameter(distribute_tensor(whole, on, placements))
            for whole, (on, placements) in zip(wholes, layouts, strict=False)
        ]
        ours.append(nn.Parameter(wholes[-1].clone()))
        optimizers = [optim.AdamW(params, lr=0.1, foreach=True) for params in (ours, plain)]
        if local:
            step_locally(optimizers[0])
        for _ in range(3):
            norms = []
            for params, optimizer, clip in zip(
                (ours, plain), optimizers, (clip_grad_norm_, nn.utils.clip_grad_norm_), strict=True
            ):
                optimizer.zero_grad()
                for p in params:
                    (p * p * p).sum().backward()
                norms.append(clip(params, 0.5))
                optimizer.step()
            torch.testing.assert_close(*norms, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE])
            equal([p.grad for p in ours], [p.grad for p in plain])
        equal(ours, plain)

    run()


@pytest.mark.parametrize("norm", [2.0, 1.0, math.inf])
def test_clip_equals_one_process_and_counts_replicas_once(norm):
    @simulate(2)
    def run():
        ours, plain, x, whole_x = pair()
        for model, given in ((ours, x), (plain, whole_x)):
            model(given).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm)
        total = clip_grad_norm_(ours.parameters(), 0.5, norm)
        torch.testing.assert_close(total, expected)
        equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
        again = get_total_norm([p.grad for p in ours.parameters()], norm)
        torch.testing.assert_close(again, torch.tensor(0.5).to(DTYPE), rtol=1e-4, atol=1e-5)

    run()


@pytest.mark.parametrize("foreach", [None, False])
def test_torchs_own_clipping_works_on_one_mesh(foreach):
    @simulate(2)
    def run():
        ours, plain, x, whole_x = pair()
        totals = []
        for model, given in ((ours, x), (plain, whole_x)):
            model(given).backward()
            totals.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach))
            nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        assert totals[0].item() == pytest.approx(totals[1].item(), rel=TOLERANCE[DTYPE])
        equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])

    run()


@pytest.mark.parametrize(
    ("fused", "local"),
    [
        (False, False),
        (False, True),
        (True, False),
        pytest.param(True, True, marks=steps_lists_locally),
    ],
)
def test_grad_scaler_skips_the_step_on_all_ranks(fused, local):
    @simulate(2)
    def run():
        ours, plain, x, whole_x = pair()
        scales = []
        for model, given in ((ours, x), (plain, whole_x)):
            optimizer = optim.AdamW(model.parameters(), lr=0.01, fused=fused)
            if local and model is ours:
                step_locally(optimizer)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
            for step in range(4):
                optimizer.zero_grad()
                scaler.scale(model(given)).backward()
                if step == 2:  # in the part of rank 0
                    grad = model.up.weight.grad
                    part = grad.to_local() if model is ours else grad
                    if model is plain or grad.device_mesh.get_rank() == 0:
                        part[0, 0] = math.inf
                if not fused:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
        assert scales[:4] == scales[4:] == [4.0, 8.0, 4.0, 4.0]
        equal(ours.parameters(), plain.parameters())

    run()


@pytest.mark.parametrize("reverse", [False, True])
def test_infinite_gradients_are_told_over_meshes_of_the_same_ranks_in_the_lists_order(
    reverse, monkeypatch
):
    seen, reduce = {}, lists.reduce

    def watched(mesh, axis, *rest):
        seen.setdefault(mesh.get_rank(), []).append((mesh.shape, axis))
        return reduce(mesh, axis, *rest)

    monkeypatch.setattr(lists, "reduce", watched)

    @simulate(4)
    def run():
        meshes = [line(4), DeviceMesh(DEVICE, [[0, 1], [2, 3]])]
        meshes = meshes[::-1] if reverse else meshes
        grads = [laid(torch.ones(4), mesh, *[Shard(0)] * mesh.ndim) for mesh in meshes]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.ones(()))
        return [mesh.shape for mesh in meshes]

    first = [(shape, 0) for shape in run()[0]]
    assert seen == {rank: [*first, ((2, 2), 1)] for rank in range(4)}


AVERAGES = {
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "ema, one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "swa": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "default": {},
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averaged_models_equal_one_process(kind):
    @simulate(2)
    def run():
        ours, plain, x, whole_x = pair()
        averages = []
        for model, given in ((ours, x), (plain, whole_x)):
            averages.append(swa_utils.AveragedModel(model, **AVERAGES[kind]))
            for _ in range(3):
                trained(model, given, optim.SGD(model.parameters(), lr=1e-4), steps=1)
                averages[-1].update_parameters(model)
        equal(averages[0].parameters(), averages[1].parameters())
        assert averages[0].module.up.weight.placements == (Shard(0),)

    run()


@simulate(2)
def test_optimizer_state_is_laid_out_as_its_parameter_and_round_trips():
    ours, _, x, _ = pair()
    optimizer = optim.AdamW(ours.parameters(), lr=0.01)
    trained(ours, x, optimizer, steps=1)
    assert optimizer.state[ours.up.weight]["exp_avg"].placements == (Shard(0),)
    twin = copy.deepcopy(ours)
    restored = optim.AdamW(twin.parameters(), lr=0.01)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    trained(ours, x, optimizer, steps=1)
    trained(twin, x, restored, steps=1)
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@simulate(2)
def test_state_of_local_steps_is_shown_as_dtensors_and_goes_both_ways():
    ours, plain, x, whole_x = pair()
    optimizer = step_locally(optim.AdamW(ours.parameters(), lr=0.01, amsgrad=True, foreach=False))
    trained(ours, x, optimizer, steps=1)
    assert type(optimizer.state[ours.up.weight]["exp_avg"]) is torch.Tensor
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file)  # by default, which takes only what is known to be safe
    index = [name for name, _ in ours.named_parameters()].index("up.weight")
    assert state["state"][index]["exp_avg_sq"].placements == (Shard(0),)
    assert state["state"][index]["step"].item() == 1
    twins = [copy.deepcopy(ours) for _ in range(2)]
    others = [
        optim.AdamW(twin.parameters(), lr=0.01, amsgrad=True, foreach=False) for twin in twins
    ]
    step_locally(others[1])
    for other in others:
        other.load_state_dict(copy.deepcopy(state))
    for model, one in zip((ours, *twins), (optimizer, *others), strict=True):
        trained(model, x, one)
    for twin in twins:
        equal(
            [p.full_tensor() if isinstance(p, DTensor) else p for p in twin.parameters()],
            [p.full_tensor() if isinstance(p, DTensor) else p for p in ours.parameters()],
        )
    # The state of one process, whole and plain, is cut.
    dense = optim.AdamW(plain.parameters(), lr=0.01, amsgrad=True, foreach=False)
    trained(plain, whole_x, dense, steps=1)
    fresh = step_locally(optim.AdamW(ours.parameters(), lr=0.01, amsgrad=True, foreach=False))
    fresh.load_state_dict(copy.deepcopy(dense.state_dict()))
    shown = fresh.state_dict()["state"][index]
    same(shown["exp_avg"], dense.state[plain.up.weight]["exp_avg"])


@simulate(2)
def test_local_steps_call_hooks_and_closures_on_dtensors_and_restore_after_an_error():
    ours, _, x, _ = pair()
    optimizer = step_locally(optim.SGD(ours.parameters(), lr=0.001))
    seen = []
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.append(type(o.param_groups[0]["params"][1]))
    )
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = ours(x)
        loss.backward()
        seen.append(type(ours.up.weight))
        return loss

    assert optimizer.step(closure) > 0
    scheduler.step()
    assert seen == [DTensor, DTensor]
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.param_groups[0]["lr"] = "none"
    with pytest.raises(TypeError):
        optimizer.step()
    assert type(ours.up.weight) is DTensor
    assert isinstance(ours.up.weight, nn.Parameter)


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        return p * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


@simulate(2)
def test_local_steps_take_what_a_users_function_gave():
    mesh = line(2)
    p = nn.Parameter(laid(seeded(4, 6), mesh, Shard(0)))
    optimizer = step_locally(optim.SGD([p], lr=1.0))
    Thrice.apply(p).sum().backward()
    optimizer.step()
    same(p, seeded(4, 6) - 3)
