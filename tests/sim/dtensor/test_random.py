# SPDX-License-Identifier: Apache-2.0
"""Random numbers: alike on replicas, unlike on shards, and where told those of one process."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    DeviceMesh,
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
from hyper_parallel.core import AbstractMesh, Layout
from hyper_parallel.dtensor import rand, randn
from hyper_parallel.dtensor.random import own_draw
from hyper_parallel.runtime import current_rank
from support.device import DEVICE, DTYPE, has_generators
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


FACTORIES = {torch.rand: rand, torch.randn: randn}
PLACED = {
    "replicated": (Replicate(), Replicate()),
    "rows": (Shard(0), Replicate()),
    "rows and columns": (Shard(0), Shard(1)),
    "rows twice": (Shard(0), Shard(0)),
    "a pending sum": (Partial(), Shard(1)),
}


@pytest.mark.parametrize("placements", PLACED.values(), ids=PLACED)
@simulate(4)
def test_drawing_factories_gather_to_what_one_process_draws(placements):
    mesh = init_device_mesh(DEVICE, (2, 2))
    on = {"device_mesh": mesh, "placements": placements}
    for theirs, ours in FACTORIES.items():
        for shape, dtype in (((9, 5), None), ((64, 3), torch.bfloat16), ((1, 40), DTYPE)):
            torch.manual_seed(13)
            dense = theirs(shape, dtype=dtype)
            after = torch.get_rng_state()
            torch.manual_seed(13)
            made = ours(*shape, dtype=dtype, **on)
            assert made.dtype == dense.dtype and made.placements == placements
            if placements[0] == Partial():
                same(made, dense)
            else:
                assert torch.equal(made.full_tensor(), dense)
            assert torch.equal(torch.get_rng_state(), after)
            part = made.to_local()
            assert part.untyped_storage().nbytes() == part.nbytes  # the whole is let go
    leaf = rand(4, requires_grad=True, **{**on, "placements": [Replicate()] * 2})
    assert leaf.is_leaf and leaf.requires_grad


def test_drawing_factories_need_equal_random_states_and_floating_values():
    def draw():
        torch.manual_seed(current_rank())
        return rand(4, device_mesh=line(2), placements=[Shard(0)])

    outcomes = simulate(2).outcomes(draw)
    assert all("DTensor op 'rand': random states must be the same" in str(e) for e in outcomes)
    outcomes = simulate(2).outcomes(lambda: rand(4, dtype=torch.int64, device_mesh=line(2)))
    assert all("rand: dtype must be floating point or complex" in str(e) for e in outcomes)
    assert all(isinstance(error, LayoutError) for error in outcomes)


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


def test_states_that_part_later_are_seen_in_checked_mode():
    def draw(checked):
        mesh = line(2)
        mesh.checked = checked
        x = laid(torch.ones(4), mesh, Replicate())
        F.dropout(x)
        torch.rand(current_rank())
        return F.dropout(x)

    outcomes = simulate(2).outcomes(draw, True)
    assert all(
        "'dropout': random states must be the same on every rank" in str(e) for e in outcomes
    )
    assert all(isinstance(x, DTensor) for x in simulate(2).outcomes(draw, False))


@simulate(2)
def test_manual_seed_makes_states_alike():
    mesh = line(2)
    torch.manual_seed(current_rank())
    manual_seed(4, mesh)
    drawn = F.dropout(laid(torch.ones(64), mesh, Replicate()))
    one, other = every_rank(drawn.to_local())
    assert torch.equal(one, other)


# ---------------------------------------------------------------------- all of torch.nn.init

INITS = {
    name: getattr(nn.init, name)
    for name in vars(nn.init)
    if name.endswith("_") and not name.startswith("_")
}
OPTIONS = {"constant_": (0.3,), "sparse_": (0.3,)}
SHAPES = {"dirac_": [(4, 4, 3)], "orthogonal_": [(5, 3), (2, 6)]}


@gathers
@pytest.mark.parametrize("name", INITS)
@simulate(3)
def test_every_initialiser_gives_what_one_process_gets(name):
    mesh = line(3)
    for shape in SHAPES.get(name, [(5, 3)]):
        for placement in (Replicate(), Shard(0), Shard(1), Partial()):
            torch.manual_seed(3)
            dense = INITS[name](torch.full(shape, 9.0), *OPTIONS.get(name, ()))
            after = torch.get_rng_state()
            torch.manual_seed(3)
            x = nn.Parameter(laid(torch.full(shape, 9.0), mesh, placement))
            assert INITS[name](x, *OPTIONS.get(name, ())) is x
            assert torch.equal(x.full_tensor(), dense)
            assert torch.equal(torch.get_rng_state(), after)


@simulate(2)
def test_transposing_in_place_is_for_tensors_without_a_gradient():
    mesh, whole = line(2), seeded(5, 3)
    x = laid(whole, mesh, Shard(0))
    assert x.t_() is x and x.placements == (Shard(1),)
    same(x, whole.T)
    with pytest.raises(LayoutError, match="must not need a gradient"):
        laid(whole, mesh, Shard(0), requires_grad=True).t_()


# ---------------------------------------------------------------------- generators

GIVEN = {
    "rand_like": lambda x, g: torch.rand_like(x, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x.sigmoid(), generator=g),
    "poisson": torch.poisson,
}


@has_generators
@pytest.mark.parametrize("draw", GIVEN.values(), ids=GIVEN)
@simulate(2)
def test_a_given_generator_draws_alike_on_replicas_and_unlike_on_shards(draw):
    mesh, ones = line(2), torch.ones(64)
    before = torch.get_rng_state()
    first, second, dense = (torch.Generator().manual_seed(5) for _ in range(3))
    want = draw(ones, dense)
    same(draw(laid(ones, mesh, Replicate()), first), want)
    cut = draw(laid(ones, mesh, Shard(0)), second).to_local()
    one, other = every_rank(cut)
    assert not torch.equal(one, other)
    assert not torch.equal(cut, draw(laid(ones, mesh, Shard(0)), second).to_local())
    one, other = every_rank(second.get_state().double())
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)
    x = laid(ones, mesh, Shard(0)).normal_(generator=first)
    assert torch.equal(x.full_tensor(), torch.empty(64).normal_(generator=dense))


@has_generators
def test_a_given_generator_is_not_compared_with_the_default_ones():
    def draw():
        torch.manual_seed(current_rank())
        x = laid(torch.ones(4), line(2), Shard(0))
        torch.rand_like(x, generator=torch.Generator().manual_seed(1))
        x.uniform_(generator=torch.Generator().manual_seed(1))
        return x.full_tensor().tolist()

    one, other = simulate(2)(draw)()
    assert one == other


def test_other_devices_are_served_through_their_module(monkeypatch):
    class Module:
        """What torch.get_device_module gives, as torch.cuda and torch.npu have it."""

        generators = (torch.Generator(), torch.Generator())
        current = 0

        def get_rng_state(self, device):
            return self.generators[device.index].get_state()

        def set_rng_state(self, new_state, device):
            self.generators[device.index].set_state(new_state)

        def manual_seed(self, seed):
            self.generators[self.current].manual_seed(seed)

        @contextmanager
        def device(self, device):
            self.current, before = device.index, self.current
            yield
            self.current = before

    module, device = Module(), torch.device("cuda", 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    layout = Layout(AbstractMesh("cpu", (2,)), (Shard(0),), (8,))
    monkeypatch.setattr(AbstractMesh, "get_rank", lambda mesh: 1, raising=False)
    idle, before = (generator.get_state() for generator in module.generators)
    drawn = []
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: torch.tensor([0.0]))
    for _ in range(2):
        with own_draw(layout, device):
            drawn.append(torch.rand(4, generator=module.generators[1], device="cpu"))
    assert torch.equal(*drawn)
    assert torch.equal(module.generators[0].get_state(), idle)
    assert torch.equal(module.generators[1].get_state(), before)


# ---------------------------------------------------------------------- what is not on this rank


@gathers
@simulate(3)
def test_a_rank_outside_the_mesh_draws_nothing():
    mesh = DeviceMesh("cpu", [0, 2])
    before = torch.get_rng_state()
    x = laid(torch.ones(8, 2), mesh, Shard(0))
    with torch.no_grad():
        for draw in (F.dropout, torch.rand_like, torch.Tensor.normal_, nn.init.xavier_uniform_):
            assert draw(x).shape == (8, 2)
    assert rand(8, 2, device_mesh=mesh, placements=[Shard(0)]).shape == (8, 2)
    drew = not torch.equal(torch.get_rng_state(), before)
    assert drew is (mesh.get_coordinate() is not None)


@simulate(2)
def test_meta_tensors_draw_nothing():
    mesh, before = line(2), torch.get_rng_state()
    x = distribute_tensor(torch.empty(8, 2, device="meta"), mesh, [Shard(0)], src_data_rank=None)
    for draw in (F.dropout, torch.Tensor.normal_, nn.init.kaiming_uniform_):
        assert draw(x).is_meta
    assert torch.equal(torch.get_rng_state(), before)


@simulate(2)
def test_what_is_dropped_together_is_not_cut():
    mesh, eye = line(2), torch.eye(4).repeat(1, 2)
    q = laid(seeded(4, 8, dtype=torch.float32), mesh, Replicate())
    drawn = F.scaled_dot_product_attention(q, q, laid(eye, mesh, Shard(1)), dropout_p=0.5)
    weights = drawn.full_tensor()
    assert torch.equal(weights[:, :4], weights[:, 4:])  # each key is dropped for all columns
    for dropout, shape in ((F.dropout1d, (64, 6)), (F.dropout3d, (64, 6, 2, 2))):  # no batch
        dropped = dropout(laid(torch.ones(shape), mesh, Shard(1))).full_tensor()
        assert dropped.flatten(1).std(1).max() == 0


@simulate(2)
def test_seeds_are_those_of_torch():
    mesh = line(2)
    for seed in (-1, 2**64 - 1, True, torch.tensor(3)):
        manual_seed(seed, mesh)
        assert torch.initial_seed() == torch.Generator().manual_seed(int(seed)).initial_seed()
    with mesh:
        manual_seed(5)
    with pytest.raises(ValueError, match="Overflow"):
        manual_seed(2**70, mesh)
    with pytest.raises(LayoutError, match="manual_seed: device_mesh must be a DeviceMesh"):
        manual_seed(3)


@simulate(4)
def test_seeds_may_differ_between_replicas_of_a_mesh_of_one_axis():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    manual_seed(mesh.get_local_rank("dp"), mesh["tp"])
    drawn = F.dropout(laid(torch.ones(64), mesh["tp"], Replicate())).to_local()
    rows = DTensor.from_local(drawn, mesh, [Shard(0), Replicate()]).full_tensor().chunk(2)
    assert not torch.equal(*rows)
    columns = DTensor.from_local(drawn, mesh, [Replicate(), Shard(0)]).full_tensor().chunk(2)
    assert torch.equal(*columns)
