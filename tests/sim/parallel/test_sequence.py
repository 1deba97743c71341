# SPDX-License-Identifier: Apache-2.0
"""SequenceParallel, and how a forward pass learns the global size of plain shards."""

import copy

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    LayoutError,
    PlanError,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from hyper_parallel.parallel.sizes import ScopedForward
from support.dense import assert_same, cut
from support.device import DEVICE, DTYPE


def mesh_of(size):
    return init_device_mesh(DEVICE, (size,), mesh_dim_names=("tp",))


class MyNorm(nn.Module):
    """A norm of the user's own, as Llama has it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Buffered(nn.Module):
    """A norm whose scale is a buffer."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("scale", torch.rand(width))

    def forward(self, x):
        return x * self.weight * self.scale


class Wrapped(nn.Module):
    """A module whose parameters are in modules inside it."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.GELU())

    def forward(self, x):
        return self.inner(x)


MODULES = {
    "LayerNorm": nn.LayerNorm,
    "no affine": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "RMSNorm": nn.RMSNorm,
    "own norm": MyNorm,
    "buffer": Buffered,
    "composite": Wrapped,
    "Dropout": lambda width: nn.Dropout(0.0),
    "Linear": lambda width: nn.Linear(width, 4),
}


@pytest.mark.parametrize("length", [4, 5, 1])
@pytest.mark.parametrize("arrival", ["plain", "S(1)", "R", "S(2)"])
@pytest.mark.parametrize("kind", MODULES)
@simulate(3)
def test_rows_alone_equal_dense(kind, arrival, length):
    mesh = mesh_of(3)
    rank = mesh.get_local_rank()
    torch.manual_seed(0)
    dense = MODULES[kind](6).to(DTYPE)
    x = torch.randn(2, length, 6, dtype=DTYPE, requires_grad=True)
    y = dense(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    for use_local_output in (False, True):
        style = SequenceParallel(use_local_output=use_local_output)
        module = style.apply(copy.deepcopy(dense), mesh)
        module.zero_grad()
        place = {"R": Replicate(), "S(2)": Shard(2)}.get(arrival, Shard(1))
        leaf = x.detach() if arrival == "R" else cut(x.detach(), place.dim, rank, 3)
        leaf = leaf.clone().requires_grad_()
        given = leaf
        if arrival != "plain":
            given = DTensor.from_local(leaf, mesh, [place], shape=x.shape)
        out = module(given)
        if not use_local_output:
            assert out.placements == (Shard(1),)
            assert out.shape == y.shape
            out = out.to_local()
        assert_same(out.detach(), cut(y.detach(), 1, rank, 3))
        out.backward(cut(grad, 1, rank, 3))
        assert_same(leaf.grad, x.grad if arrival == "R" else cut(x.grad, place.dim, rank, 3))
        for (name, want), got in zip(dense.named_parameters(), module.parameters(), strict=True):
            assert_same(got.grad.full_tensor(), want.grad, name)


@pytest.mark.parametrize("dim", [0, -2])
@simulate(2)
def test_another_sequence_dim(dim):
    mesh = mesh_of(2)
    torch.manual_seed(0)
    dense = nn.LayerNorm(4)
    norm = SequenceParallel(sequence_dim=dim).apply(copy.deepcopy(dense), mesh)
    x = torch.randn(3, 5, 4)
    out = norm(cut(x, dim, mesh.get_local_rank(), 2))
    assert_same(out.full_tensor(), dense(x))


class Residual(nn.Module):
    def forward(self, x):
        return x * 2, [x, 3], None


@simulate(2)
def test_several_outputs_are_each_handed_out():
    both = SequenceParallel().apply(Residual(), mesh_of(2))
    doubled, kept, nothing = both(torch.ones(1, 2, 3))
    assert doubled.placements == (Shard(1),)
    assert kept[1] == 3
    assert nothing is None


class Gathers(nn.Module):
    def forward(self, x):
        return x.full_tensor()


@simulate(2)
def test_a_module_that_gives_a_plain_tensor_is_refused_by_name():
    net = parallelize_module(nn.Sequential(Gathers()), mesh_of(2), {"0": SequenceParallel()})
    with pytest.raises(LayoutError, match=r"SequenceParallel on '0': .*must return a DTensor"):
        net(torch.ones(1, 2, 3))


@pytest.mark.parametrize("args", [(), (3,), ([1.0],)], ids=str)
@simulate(2)
def test_an_input_that_is_no_tensor_is_refused_by_name(args):
    net = nn.ModuleDict({"norm": nn.LayerNorm(3)})
    parallelize_module(net, mesh_of(2), {"norm": SequenceParallel()})
    with pytest.raises(
        PlanError, match=r"SequenceParallel on 'norm': .*must be the tensor to shard"
    ):
        net["norm"](*args)


@simulate(2)
def test_a_module_with_a_parallel_layer_inside_is_refused():
    net = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(net, mesh_of(2), {"0": ColwiseParallel()})
    with pytest.raises(PlanError, match=r"SequenceParallel: .*sharded by a style already"):
        SequenceParallel().apply(net, mesh_of(2))


# ---------------------------------------------------------------------- exchanges


class Count:
    """How often this rank exchanges sizes, by wrapping one mesh's communicator."""

    def __init__(self, mesh):
        self.calls = 0
        self.names = []
        comm = mesh.communicator(0)
        mesh._communicators[0] = self
        self.comm = comm

    def __getattr__(self, name):
        value = getattr(self.comm, name)
        if not callable(value):
            return value

        def call(*args, **kwargs):
            self.names.append(name)
            self.calls += name == "all_gather_ints"
            return value(*args, **kwargs)

        return call


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.norm2(x + self.down(self.up(self.norm(x))))


def block_plan(**options):
    return {
        "norm": SequenceParallel(use_local_output=True, **options),
        "up": ColwiseParallel(input_layouts=Shard(1), **options),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(use_local_output=True, **options),
    }


def part_of(length, mesh, width=8):
    return cut(torch.ones(2, length, width), 1, mesh.get_local_rank(), mesh.size())


@simulate(2)
def test_sizes_are_exchanged_once_in_each_forward_pass():
    mesh = mesh_of(2)
    net = parallelize_module(
        nn.Sequential(Block(), Block()),
        mesh,
        {f"{i}.{name}": style for i in range(2) for name, style in block_plan().items()},
    )
    count = Count(mesh)
    for length in (5, 4, 5, 1):
        before = count.calls
        assert net(part_of(length, mesh)).shape[1] == part_of(length, mesh).shape[1]
        assert count.calls == before + 1


@simulate(2)
def test_a_submodule_called_by_itself_exchanges_by_itself():
    mesh = mesh_of(2)
    net = parallelize_module(
        nn.Sequential(Block()), mesh, {f"0.{name}": style for name, style in block_plan().items()}
    )
    count = Count(mesh)
    net[0].norm(part_of(5, mesh))
    net[0].norm(part_of(4, mesh))
    assert count.calls == 2


@simulate(2)
def test_a_promise_of_even_shards_exchanges_nothing():
    mesh = mesh_of(2)
    net = parallelize_module(Block(), mesh, block_plan(even_shards=True))
    count = Count(mesh)
    assert net(part_of(4, mesh)).shape == (2, 2, 8)
    assert count.calls == 0
    assert count.names


@pytest.mark.parametrize("table", [True, False])
@simulate(2)
def test_what_a_layer_upstream_knows_is_not_exchanged(table):
    mesh = mesh_of(2)
    first = nn.Embedding(7, 8) if table else nn.Linear(8, 8)
    net = nn.Sequential(first, Block())
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {"0": style, **{f"1.{name}": style for name, style in block_plan().items()}}
    parallelize_module(net, mesh, plan)
    count = Count(mesh)
    x = torch.ones(2, 5, dtype=torch.long) if table else torch.ones(2, 5, 8)
    assert net(x).shape[1] == (2 if mesh.get_local_rank() else 3)
    assert count.calls == 0
    assert count.names


@simulate(2)
def test_what_a_prepared_input_knows_is_not_exchanged():
    mesh = mesh_of(2)
    net = nn.Sequential(nn.Identity(), nn.LayerNorm(8), nn.Identity())
    plan = {
        "0": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "1": SequenceParallel(use_local_output=True),
        "2": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
    }
    parallelize_module(net, mesh, plan)
    count = Count(mesh)
    assert net(torch.ones(2, 5, 8)).shape == (2, 5, 8)
    assert count.calls == 0


class TwoLengths(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(7, 4), nn.Embedding(7, 4)
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, source, target):
        a, b = self.source(source), self.target(target)
        return self.norm1(a), self.norm2(b)


@pytest.mark.parametrize(("first", "second"), [(5, 6), (6, 5), (4, 7), (3, 3)])
@simulate(2)
def test_two_lengths_in_one_forward_pass(first, second):
    mesh = mesh_of(2)
    torch.manual_seed(0)
    dense = TwoLengths()
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    net = parallelize_module(
        copy.deepcopy(dense),
        mesh,
        {"source": rows, "target": rows, "norm*": SequenceParallel()},
    )
    ids = torch.arange(first)[None], torch.arange(second)[None] % 7
    for got, want in zip(net(*ids), dense(*ids), strict=True):
        assert_same(got.full_tensor(), want)


class TwoDims(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.columns, self.last = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, a, b, c, d):
        return self.rows(a), self.columns(b), self.last(c), self.last(d)


@simulate(2)
def test_the_sizes_of_one_dim_say_nothing_of_another():
    mesh = mesh_of(2)
    net = TwoDims()
    places = {"rows": Shard(0), "columns": Shard(1), "last": Shard(-1)}
    plan = {
        name: PrepareModuleInput(
            input_layouts=place, desired_input_layouts=Replicate(), use_local_output=True
        )
        for name, place in places.items()
    }
    parallelize_module(net, mesh, plan)
    whole = [torch.randn(3, 5, 4), torch.randn(3, 5, 4), torch.randn(2, 7), torch.randn(2, 6)]
    dims = [0, 1, -1, -1]
    parts = [cut(x, dim, mesh.get_local_rank(), 2) for x, dim in zip(whole, dims, strict=True)]
    for got, gathered in zip(net(*parts), whole, strict=True):
        assert_same(got, gathered)


@simulate(2)
def test_a_second_length_that_nobody_knows_is_refused():
    mesh = mesh_of(2)
    net = nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.LayerNorm(4)})
    net.forward = lambda x, y: (net["a"](x), net["b"](y))
    parallelize_module(net, mesh, {"*": SequenceParallel()})
    with pytest.raises(LayoutError, match=r"SequenceParallel on 'b': a plain shard must have"):
        net(part_of(5, mesh, 4), part_of(8, mesh, 4))
    for got in net(part_of(8, mesh, 4), part_of(8, mesh, 4)):  # the scope was closed
        assert got.shape == (2, 8, 4)


class Interrupts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.error = None

    def forward(self, x):
        y = self.norm(x)
        if self.error is not None:
            raise self.error
        return y


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("outer", [True, False])
@simulate(2)
def test_a_pass_that_is_left_by_an_exception_knows_nothing_afterwards(outer, error):
    mesh = mesh_of(2)
    inner = parallelize_module(Interrupts(), mesh, {"norm": SequenceParallel()})
    net = inner
    if outer:
        net = parallelize_module(
            nn.Sequential(inner),
            mesh,
            {"": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1))},
        )
    count = Count(mesh)
    inner.error = error
    with pytest.raises(type(error)):
        net(part_of(5, mesh, 4))
    inner.error = None
    assert net(part_of(4, mesh, 4)).shape == (2, 4, 4)
    assert net(part_of(3, mesh, 4)).shape == (2, 3, 4)
    assert count.calls == 3


@simulate(2)
def test_scopes_do_not_pile_up_over_calls_and_copies():
    mesh = mesh_of(2)
    net = nn.Sequential(Block(), Block())
    for i in range(2):
        parallelize_module(
            net, mesh, {f"{i}.{name}": style for name, style in block_plan().items()}
        )
    assert isinstance(net.forward, ScopedForward)
    assert not isinstance(net.forward.original, ScopedForward)
    copied = copy.deepcopy(net)
    assert copied.forward.original.__self__ is copied
    whole_input = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True
    )
    parallelize_module(copied, mesh, {"": whole_input})
    count = Count(mesh)
    copied(part_of(5, mesh))
    assert count.calls == 1


@simulate(2)
def test_a_plan_without_sequence_shards_needs_no_scope():
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(net, mesh_of(2), plan)
    assert "forward" not in net.__dict__


@simulate(2)
def test_checkpointing_a_block_exchanges_alike_on_every_rank():
    from torch.utils.checkpoint import checkpoint

    mesh = mesh_of(2)
    torch.manual_seed(0)
    dense = Block().to(DTYPE)
    net = parallelize_module(copy.deepcopy(dense), mesh, block_plan())
    x = torch.randn(2, 5, 8, dtype=DTYPE)
    part = cut(x, 1, mesh.get_local_rank(), 2).requires_grad_()
    y = checkpoint(net, part, use_reentrant=False)
    y.square().sum().backward()
    dense(x).square().sum().backward()
    for (name, want), got in zip(dense.named_parameters(), net.parameters(), strict=True):
        assert_same(got.grad.full_tensor(), want.grad, name)
