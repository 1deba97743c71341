# SPDX-License-Identifier: Apache-2.0
"""Attention written with DTensors: heads cut between ranks, weights that all heads share."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    LayoutError,
    Replicate,
    RowwiseParallel,
    distribute_tensor,
    parallelize_module,
    simulate,
    strict_rules,
)
from support.device import DTYPE, TOLERANCE
from support.dtensors import line

HEAD = 2


class SharedNorm(nn.Module):
    """Project to heads, normalise each with one weight, project back."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8, dtype=DTYPE)
        self.o = nn.Linear(8, 8, dtype=DTYPE)
        self.g = nn.Parameter(torch.rand(HEAD, dtype=DTYPE))

    def forward(self, x):
        heads = self.q(x).unflatten(-1, (-1, HEAD))
        return self.o(F.rms_norm(heads, (HEAD,), self.g).flatten(-2))


@pytest.mark.parametrize("is_plain", [False, True], ids=["replicated", "plain"])
@simulate(2, seed=3)
def test_a_norm_weight_that_all_heads_share_gets_the_sum_of_their_gradients(is_plain):
    mesh, x = line(2), torch.randn(3, 5, 8, dtype=DTYPE)
    dense = SharedNorm()
    net = copy.deepcopy(dense)
    if not is_plain:
        net.g = nn.Parameter(distribute_tensor(net.g.detach(), mesh, [Replicate()]))
    plan = {"q": ColwiseParallel(use_local_output=False), "o": RowwiseParallel()}
    parallelize_module(net, mesh, plan)
    expected = dense(x)
    expected.square().sum().backward()
    try:
        with strict_rules():
            out = net(x)
    except LayoutError as error:
        assert is_plain and "every tensor operand must be a DTensor" in str(error)
        return
    out.square().sum().backward()
    torch.testing.assert_close(out, expected)
    for name, weight in dense.named_parameters():
        grad = net.get_parameter(name).grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(whole, weight.grad, msg=name)


class Rope(nn.Module):
    """Grouped-query attention with rotary positions, as decoder models write it."""

    def __init__(self, heads: int, kv_heads: int, style: str) -> None:
        super().__init__()
        wide, self.heads, self.kv_heads, self.style = 8 * heads, heads, kv_heads, style
        self.q = nn.Linear(wide, wide, bias=False, dtype=DTYPE)
        self.k = nn.Linear(wide, 8 * kv_heads, bias=False, dtype=DTYPE)
        self.v = nn.Linear(wide, 8 * kv_heads, bias=False, dtype=DTYPE)
        self.o = nn.Linear(wide, wide, bias=False, dtype=DTYPE)

    def turn(self, x, angles):
        if self.style == "halves":
            cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
            first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
            return x * cos[None, None] + torch.cat((-second, first), dim=-1) * sin[None, None]
        if self.style == "pairs":
            even, odd = x[..., ::2], x[..., 1::2]
            cos, sin = angles.cos(), angles.sin()
            return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turns = torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(numbers * turns.view(1, 1, *turns.shape)).flatten(3)

    def forward(self, x, angles, mask):
        q, k, v = (
            f(x).view(*x.shape[:-1], -1, 8).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = self.turn(q, angles), self.turn(k, angles)
        group = self.heads // self.kv_heads
        k = k[:, :, None].expand(-1, -1, group, -1, -1).reshape(len(x), -1, *k.shape[2:])
        v = v.repeat_interleave(group, dim=1)
        scores = (q @ k.mT * 8**-0.5).masked_fill(mask, float("-inf"))
        mixed = scores.float().softmax(-1).type_as(q) @ v
        return self.o(mixed.transpose(1, 2).contiguous().view(*x.shape[:-1], -1))


@pytest.mark.parametrize("style", ["halves", "pairs", "complex"])
@simulate(2, seed=5)
def test_rotary_attention_on_cut_heads_runs_by_rules(style):
    mesh, heads = line(2), 4
    dense = Rope(heads, 2, style)
    x = torch.randn(2, 6, 8 * heads, dtype=DTYPE)
    angles = torch.outer(torch.arange(6.0, dtype=DTYPE), torch.rand(4, dtype=DTYPE))
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = dense(x, angles, mask)
    expected.sin().sum().backward()
    net = copy.deepcopy(dense)
    cut = ColwiseParallel(use_local_output=False)
    parallelize_module(net, mesh, {"q": cut, "k": cut, "v": cut, "o": RowwiseParallel()})
    for weight in net.parameters():
        weight.grad = None
    with strict_rules():
        out = net(x, *(distribute_tensor(t, mesh, [Replicate()]) for t in (angles, mask)))
    close = max(1e-6, 10 * TOLERANCE[DTYPE])
    torch.testing.assert_close(out, expected, atol=close, rtol=close)
    out.sin().sum().backward()
    for name, weight in dense.named_parameters():
        grad = net.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(grad, weight.grad, atol=close, rtol=close, msg=name)
