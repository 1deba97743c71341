# SPDX-License-Identifier: Apache-2.0
"""Random numbers: alike on replicas, unlike on shards, and where told those of one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    DTensor,
    LayoutError,
    Partial,
    Replicate,
    SequenceParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    manual_seed,
    simulate,
)
from hyper_parallel.runtime import current_rank
from support.device import DEVICE, DTYPE
from support.dtensors import laid, line, same, seeded

gathers = pytest.mark.filterwarnings("ignore:DTensor op .* has no sharding rule")

DRAWS = {
    "dropout": F.dropout,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "poisson": lambda x: torch.poisson(x.exp()),
}


def every_rank(local):
    """Give all ranks' values of a local tensor of one shape."""
    mesh = line(2)
    return DTensor.from_local(local, mesh, [Shard(0)]).full_tensor().chunk(2)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@simulate(2)
def test_draws_are_alike_on_replicas_and_unlike_on_shards(draw):
    mesh = line(2)
    whole = seeded(64, 8)
    torch.manual_seed(7)
    dense = draw(whole)
    after_one = torch.get_rng_state()
    torch.manual_seed(7)
    same(draw(laid(whole, mesh, Replicate())), dense)
    assert torch.equal(torch.get_rng_state(), after_one)
    cut = draw(laid(torch.ones(64, 8, dtype=DTYPE), mesh, Shard(0)))
    assert cut.placements == (Shard(0),)
    one, other = every_rank(cut.to_local())
    assert not torch.equal(one, other)
    again = draw(laid(torch.ones(64, 8, dtype=DTYPE), mesh, Shard(0)))
    assert not torch.equal(cut.to_local(), again.to_local())
    one, other = every_rank(torch.rand(4))
    assert torch.equal(one, other)


@simulate(4)
def test_on_two_axes_only_the_axes_that_cut_count():
    mesh = init_device_mesh(DEVICE, (2, 2))
    x = laid(torch.ones(8, 8), mesh, Replicate(), Shard(0))
    drawn = F.dropout(x)
    parts = DTensor.from_local(drawn.to_local(), mesh, [Shard(0), Shard(0)]).full_tensor().chunk(4)
    assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3])
    assert not torch.equal(parts[0], parts[1])


@simulate(2)
def test_dropout_backward_uses_the_mask_of_forward():
    mesh = line(2)
    x = laid(torch.ones(64, 8), mesh, Shard(0), requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert torch.equal(x.grad.to_local(), y.to_local())
    kept = (y.full_tensor() != 0).to(DTYPE).mean().item()
    assert 0.6 < kept < 0.9
    channels = F.dropout2d(laid(torch.ones(4, 8, 3, 3), mesh, Shard(1)))
    assert channels.to_local().flatten(2).std(-1).abs().max() == 0


@simulate(2)
def test_a_pending_sum_is_reduced_before_it_is_dropped():
    mesh = line(2)
    torch.manual_seed(3)
    x = DTensor.from_local(torch.ones(64), mesh, [Partial()])
    dropped = F.dropout(x, 0.5).full_tensor()
    assert set(dropped.tolist()) == {0.0, 4.0}


@pytest.mark.parametrize("reentrant", [True, False])
@simulate(2)
def test_checkpointing_replays_the_masks(reentrant):
    mesh = line(2)
    torch.manual_seed(5)
    x = laid(torch.ones(32, 4), mesh, Shard(0), requires_grad=True)
    seen = []

    def block(x):
        y = F.dropout(x, 0.5)
        seen.append(y.detach().to_local())
        return y * y  # what it saves is made anew after the mask

    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)
    assert torch.equal(x.grad.to_local(), 2 * seen[0] * seen[0])


def fill_many(x):
    x.normal_()
    yield x.clone()
    x.uniform_(-1, 2)
    yield x.clone()
    for init in (
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        nn.init.trunc_normal_,
        nn.init.uniform_,
        nn.init.normal_,
    ):
        init(x)
        yield x.clone()
    x.exponential_()
    yield x.clone()
    x.bernoulli_(0.3)
    yield x.clone()


@gathers
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(0, block=3)], ids=str)
@simulate(4)
def test_fills_are_those_of_one_process(placement):
    mesh = line(4)
    torch.manual_seed(11)
    dense = [y.clone() for y in fill_many(torch.empty(9, 5))]
    after = torch.get_rng_state()
    torch.manual_seed(11)
    x = distribute_tensor(torch.empty(9, 5), mesh, [placement])
    with torch.no_grad():
        drawn = list(fill_many(x))
    for one, other in zip(drawn, dense, strict=True):
        assert torch.equal(one.full_tensor(), other)
    assert torch.equal(torch.get_rng_state(), after)


@simulate(2)
def test_a_module_made_on_meta_is_initialised_as_one_process_would():
    mesh = line(2)
    torch.manual_seed(1)
    dense = nn.Linear(6, 5)
    with torch.device("meta"):
        layer = nn.Linear(6, 5)
    layer.weight = nn.Parameter(
        distribute_tensor(layer.weight, mesh, [Shard(0)], src_data_rank=None)
    )
    layer.bias = nn.Parameter(distribute_tensor(layer.bias, mesh, [Shard(0)], src_data_rank=None))
    layer.to_empty(device=DEVICE)
    torch.manual_seed(1)
    layer.reset_parameters()
    assert torch.equal(layer.weight.full_tensor(), dense.weight)
    assert torch.equal(layer.bias.full_tensor(), dense.bias)


@gathers
@simulate(2)
def test_a_random_op_without_a_rule_draws_on_the_whole():
    mesh = line(2)
    whole = seeded(8, 4).abs()
    for op in (
        lambda t: t.multinomial(2),
        lambda t: torch.normal(t, 1.0),
        lambda t: F.rrelu(-t, training=True),
        lambda t: F.gumbel_softmax(t, hard=True),
    ):
        torch.manual_seed(2)
        dense = op(whole)
        torch.manual_seed(2)
        if op(laid(whole, mesh, Shard(0))).placements == (Replicate(),):
            torch.manual_seed(2)
            same(op(laid(whole, mesh, Shard(0))), dense)


@simulate(2)
def test_attention_with_dropout_on_cut_heads():
    mesh = line(2)
    q = laid(seeded(2, 4, 6, 8), mesh, Shard(1))
    drawn = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert drawn.placements == (Shard(1),)
    one, other = every_rank(drawn.to_local())
    assert not torch.equal(one, other)


@simulate(2)
def test_dropout_under_sequence_parallel_trains():
    mesh = line(2)
    layer = SequenceParallel(use_local_output=True).apply(nn.Dropout(0.5), mesh)
    x = torch.ones(2, 16, 4, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(x.grad, y)
    one, other = every_rank(y.detach())
    assert not torch.equal(one, other)


def test_states_that_differ_are_refused_on_every_rank():
    def draw():
        mesh = init_device_mesh(DEVICE, (2, 2))
        torch.manual_seed(0 if current_rank() != 3 else 1)
        return F.dropout(laid(torch.ones(4), mesh, Replicate(), Shard(0)))

    outcomes = simulate(4).outcomes(draw)
    assert all(isinstance(error, LayoutError) for error in outcomes)
    assert "random states must be the same on every rank of the mesh" in str(outcomes[0])

    def seed():
        manual_seed(current_rank(), line(2))

    outcomes = simulate(2).outcomes(seed)
    assert all("every rank of the mesh must pass the same seed" in str(e) for e in outcomes)


@simulate(2)
def test_manual_seed_makes_states_alike():
    mesh = line(2)
    torch.manual_seed(current_rank())
    manual_seed(4, mesh)
    drawn = F.dropout(laid(torch.ones(64), mesh, Replicate()))
    one, other = every_rank(drawn.to_local())
    assert torch.equal(one, other)
