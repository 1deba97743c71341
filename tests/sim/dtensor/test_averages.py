# SPDX-License-Identifier: Apache-2.0
"""Averages count globally: uneven shards, weights and ignored targets give the dense values."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import Partial, Replicate, Shard, init_device_mesh, simulate, strict_rules
from support.device import DEVICE, DTYPE
from support.dtensors import laid, line, same, seeded


@simulate(2)
def test_averages_known_by_heart():
    mesh = line(2)
    rows = laid(torch.arange(12.0).reshape(3, 4), mesh, Shard(0))
    row = laid(torch.arange(4.0).reshape(1, 4), mesh, Shard(0))
    assert rows.mean().item() == 5.5
    assert rows.var().item() == 13
    assert row.mean().item() == 1.5
    torch.manual_seed(0)
    logits, weight = torch.randn(6, 5), torch.tensor([0.1, 1, 1, 2, 5.0])
    target = torch.tensor([0, 0, 1, 4, 4, 3])
    logs = F.log_softmax(laid(logits, mesh, Shard(0)), -1)
    loss = F.nll_loss(logs, laid(target, mesh, Shard(0)), weight=laid(weight, mesh, Replicate()))
    assert round(loss.item(), 4) == 1.5374
    target[1:3] = -100
    loss = F.cross_entropy(laid(logits, mesh, Shard(0)), laid(target, mesh, Shard(0)))
    assert round(loss.item(), 4) == 1.8943


STATISTICS = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0, keepdim=True),
    "mean of both": lambda x: x.mean((0, 1)),
    "var": lambda x: x.var(),
    "var of rows": lambda x: x.var(0, unbiased=False),
    "var with correction": lambda x: torch.var(x, dim=(0, 1), correction=2, keepdim=True),
    "std": lambda x: x.std(0),
    "std_mean": lambda x: torch.std_mean(x, 0),
    "var_mean": lambda x: torch.var_mean(x, dim=0, keepdim=True),
    "nanmean": lambda x: x.nanmean(0),
    "norm": lambda x: x.norm(),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, 0),
    "norm of order 1": lambda x: torch.norm(x, 1, dim=0, keepdim=True),
    "distance": lambda x: torch.dist(x, 2 * x),
    "normalize": lambda x: F.normalize(x, dim=0),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: F.log_softmax(x, 0),
    "mse": lambda x: F.mse_loss(x, x.detach() * 2),
    "l1 against a row": lambda x: F.smooth_l1_loss(x, x.detach()[:1]),
    "batchmean": lambda x: F.kl_div(x, x.detach().softmax(1), reduction="batchmean"),
}


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:(std|var)")
def test_a_statistic_over_uneven_shards_is_that_of_the_whole(name):
    @simulate(4)
    def run():
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
        for rows, layout in itertools.product(
            (7, 6, 1),
            (
                (Shard(0), Replicate()),
                (Shard(0), Shard(0)),
                (Shard(1), Shard(0)),
                (Shard(0), Partial()),
            ),
        ):
            whole = seeded(rows, 5).requires_grad_()
            x = laid(whole, mesh, *layout, requires_grad=True)
            with strict_rules():
                ours, dense = STATISTICS[name](x), STATISTICS[name](whole)
            pairs = (
                [(ours, dense)]
                if isinstance(dense, torch.Tensor)
                else zip(ours, dense, strict=True)
            )
            total, wanted = 0, 0
            for got, expected in pairs:
                same(got, expected)
                total, wanted = total + got.sin().sum(), wanted + expected.sin().sum()
            if rows > 1:  # else torch divides by zero in some
                total.backward()
                wanted.backward()
                same(x.grad, whole.grad)

    run()


@pytest.mark.filterwarnings("error")
@simulate(2)
def test_a_statistic_over_a_cut_dim_stays_pending_or_small():
    """Nothing of the size of the operand is gathered."""
    x = laid(seeded(5, 6), line(2), Shard(0))
    assert x.mean(0).placements == (Partial("sum"),)
    assert laid(seeded(4, 6), line(2), Shard(0)).mean(0).placements == (Partial("avg"),)
    assert x.softmax(0).placements == (Shard(0),)
    assert F.normalize(x, dim=0).placements == (Shard(0),)
    assert x.logsumexp(0).placements == (Replicate(),)


@simulate(2)
def test_a_norm_at_zero_has_gradient_zero():
    x = laid(torch.zeros(4, 3), line(2), Shard(0), requires_grad=True)
    for norm in (x.norm(), torch.linalg.vector_norm(x, 3), x.std(unbiased=False)):
        (grad,) = torch.autograd.grad(norm, x)
        same(grad, torch.zeros(4, 3))


@simulate(2)
def test_statistics_of_half_precision_add_up_in_single():
    whole = seeded(64, 3, dtype=torch.bfloat16)
    x = laid(whole, line(2), Shard(0))
    for op in (lambda t: t.norm(), lambda t: t.softmax(0), lambda t: t.log_softmax(0)):
        assert op(x).dtype == torch.bfloat16
        torch.testing.assert_close(op(x).full_tensor(), op(whole))


@simulate(2)
def test_statistics_under_autocast_have_the_dtype_of_the_plain_op():
    whole = seeded(6, 3, dtype=torch.bfloat16)
    x = laid(whole, line(2), Shard(0))
    for op in (lambda t: t.norm(), lambda t: t.softmax(0), lambda t: t.var(0), lambda t: t.mean()):
        with torch.autocast("cpu", torch.bfloat16):
            assert op(x).dtype == op(whole).dtype


LOSSES = {
    "plain": {},
    "ignored": {"ignore_index": 1},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": True, "ignore_index": 2, "label_smoothing": 0.2},
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("shape", [(7, 4), (5, 4, 3), (1, 4)], ids=str)
def test_cross_entropy_means_over_all_targets(options, shape):
    @simulate(2)
    def run():
        mesh = line(2)
        whole = seeded(*shape).requires_grad_()
        target = (seeded(shape[0], *shape[2:], seed=1).abs() * 100).long() % 4
        weight = torch.tensor([0.1, 1, 2, 5.0]).to(DTYPE)
        dense = F.cross_entropy(
            whole, target, **{**options, **({"weight": weight} if "weight" in options else {})}
        )
        dense.backward()
        for at, placement in itertools.product(
            [Replicate(), *(Shard(d) for d in range(whole.ndim))], (Replicate(), Shard(0))
        ):
            x = laid(whole, mesh, at, requires_grad=True)
            given = {**options}
            if "weight" in options:
                given["weight"] = laid(weight, mesh, Shard(0))
            with strict_rules():
                loss = F.cross_entropy(x, laid(target, mesh, placement), **given)
            same(loss, dense)
            loss.backward()
            same(x.grad, whole.grad)

    run()


@simulate(2)
def test_cross_entropy_of_distributions_and_of_nothing():
    mesh = line(2)
    whole, chances = seeded(5, 4).requires_grad_(), seeded(5, 4, seed=1).softmax(1)
    dense = F.cross_entropy(whole, chances, label_smoothing=0.1)
    dense.backward()
    x = laid(whole, mesh, Shard(0), requires_grad=True)
    loss = F.cross_entropy(x, laid(chances, mesh, Shard(0)), label_smoothing=0.1)
    same(loss, dense)
    loss.backward()
    same(x.grad, whole.grad)
    nothing = torch.full((5,), -100)
    assert F.cross_entropy(x, laid(nothing, mesh, Shard(0))).isnan().item()
    nothing[4] = 2  # only the last rank has a target
    same(F.cross_entropy(x, laid(nothing, mesh, Shard(0))), F.cross_entropy(whole, nothing))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@simulate(2)
def test_losses_of_sequences_cut_in_the_middle(reduction):
    mesh = line(2)
    logits, target = seeded(2, 7, 4).requires_grad_(), (seeded(2, 7, seed=1).abs() * 9).long() % 4
    loss_of = partial(F.cross_entropy, reduction=reduction)
    dense = loss_of(logits.flatten(0, 1), target.flatten())
    x = laid(logits, mesh, Shard(1), requires_grad=True)
    loss = loss_of(x.flatten(0, 1), laid(target, mesh, Shard(1)).flatten())
    same(loss, dense)
    loss.sum().backward()
    dense.sum().backward()
    same(x.grad, logits.grad)
