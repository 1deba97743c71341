# SPDX-License-Identifier: Apache-2.0
"""Training with DTensor parameters equals training in one process, for torch's optimizers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    get_total_norm,
    simulate,
)
from support.device import DTYPE
from support.dtensors import laid, line, same, seeded

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
VARIANTS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


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
        return (y.square().mean(1) * self.scale).sum()


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


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_equal_one_process(name, variant):
    make, options = OPTIMIZERS[name]

    @simulate(2)
    def run():
        ours, plain, x, whole_x = pair()
        optimizers = [make(m.parameters(), **options, **VARIANTS[variant]) for m in (ours, plain)]
        for _ in range(5):
            losses = []
            for model, given, optimizer in zip(
                (ours, plain), (x, whole_x), optimizers, strict=True
            ):
                optimizer.zero_grad()
                loss = model(given)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses)
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            if hasattr(p, "full_tensor"):
                same(p, q)
            else:
                torch.testing.assert_close(p, q)

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
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            if hasattr(p, "full_tensor"):
                same(p.grad, q.grad)
            else:
                torch.testing.assert_close(p.grad, q.grad)
        again = get_total_norm([p.grad for p in ours.parameters()], norm)
        torch.testing.assert_close(again, torch.tensor(0.5).to(DTYPE), rtol=1e-4, atol=1e-5)

    run()


@simulate(2)
def test_optimizer_state_is_laid_out_as_its_parameter_and_round_trips():
    ours, _, x, _ = pair()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    ours(x).backward()
    optimizer.step()
    state = optimizer.state[ours.up.weight]
    assert state["exp_avg"].placements == (Shard(0),)
    twin = copy.deepcopy(ours)
    restored = torch.optim.AdamW(twin.parameters(), lr=0.01)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, opt in ((ours, optimizer), (twin, restored)):
        opt.zero_grad()
        model(x).backward()
        opt.step()
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
