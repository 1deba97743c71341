# SPDX-License-Identifier: Apache-2.0
"""CommDebugMode lists what a block issues, for the right module, and leaves nothing behind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    HyperParallelError,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from support.device import DEVICE
from support.dtensors import line


def mlp(mesh):
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def listed(mode):
    """Give what the mode lists: module, whether backward, op and bytes."""
    return [
        (one.module, one.is_backward, one.op, one.bytes_in, one.bytes_out)
        for one in mode.collectives
    ]


def x_of(*shape):
    return torch.ones(*shape, requires_grad=True)


MLP_FORWARD = ("Sequential.2", False, "all_reduce", 48, 48)
MLP_BACKWARD = ("Sequential.0", True, "all_reduce", 48, 48)


# ---------------------------------------------------------------------- what is listed


@simulate(2)
def test_an_mlp_issues_one_all_reduce_each_way():
    net = mlp(line(2))
    with CommDebugMode() as mode:
        y = net(x_of(3, 4))
        assert (mode.get_comm_counts(), mode.get_total_counts()) == ({"all_reduce": 1}, 1)
        y.sum().backward()
    assert listed(mode) == [MLP_FORWARD, MLP_BACKWARD]
    assert mode.get_comm_counts() == {"all_reduce": 2}
    assert repr(mode) == "CommDebugMode(get_total_counts()=2)"
    assert {(one.axes, one.ranks) for one in mode.collectives} == {(("tp",), (0, 1))}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.norm2(x + self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.blocks = nn.ModuleList([Block()])

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NET_PLAN = {
    "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(use_local_output=True),
    "blocks.*.norm2": SequenceParallel(use_local_output=True),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
ROWS, WHOLE, LOGITS = 2 * 2 * 8 * 4, 2 * 4 * 8 * 4, 2 * 4 * 5 * 4  # bytes for 2 x 4 ids


@simulate(2)
def test_a_sequence_parallel_model_is_listed_by_module_and_pass():
    net = parallelize_module(Net(), line(2), NET_PLAN)
    with CommDebugMode() as mode:
        net(torch.arange(8).view(2, 4)).sum().backward()
    gather, scatter = ("all_gather", ROWS, WHOLE), ("reduce_scatter", WHOLE, ROWS)
    norms = {one for one in listed(mode) if ".norm" in one[0]}
    assert norms == {(f"Net.blocks.0.{n}", True, "all_reduce", 32, 32) for n in ("norm", "norm2")}
    assert [one for one in listed(mode) if one not in norms] == [
        ("Net.table", False, *scatter),
        ("Net.blocks.0.up", False, *gather),
        ("Net.blocks.0.down", False, *scatter),
        ("Net.head", False, *gather),
        ("Net.head", False, "all_gather", LOGITS, 2 * LOGITS),
        ("Net.head", True, *scatter),
        ("Net.blocks.0.down", True, *gather),
        ("Net.blocks.0.up", True, *scatter),
        ("Net.table", True, *gather),
    ]


@simulate(2)
def test_an_exchange_of_sizes_is_listed():
    mesh = line(2)
    net = parallelize_module(nn.Sequential(nn.LayerNorm(8)), mesh, {"0": SequenceParallel()})
    with CommDebugMode() as mode:
        net(torch.ones(1, 3 - mesh.get_local_rank(), 8))
    assert listed(mode) == [("Sequential.0", False, "all_gather_ints", 8, 16)]


@simulate(4)
def test_what_no_module_issues_is_global():
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    with CommDebugMode() as mode:
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
        x.requires_grad_()
        x.redistribute(mesh, [Replicate(), Shard(1)]).sum().full_tensor().backward()
        net = mlp(mesh["tp"])
        clip_grad_norm_(net.parameters(), 1.0)
        mesh.flatten().communicator(0).barrier()
    assert {one.module for one in mode.collectives} == {"Global"}
    assert {"dp", "tp", "dp_tp"} <= {"+".join(one.axes) for one in mode.collectives}
    assert mode.collectives[-1].op == "barrier"
    counts = mode.get_comm_counts()
    assert counts["scatter"] and counts["broadcast"]
    assert any(one.is_backward for one in mode.collectives)


class Mixer(nn.Module):
    """Moves of its own, before, between and after those of a layer inside it."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.inner = mesh, Gather(mesh)

    def forward(self, x):
        x = x.redistribute(self.mesh, [Shard(1)])
        x = self.inner(x * 2)
        return x.redistribute(self.mesh, [Shard(0)]).redistribute(self.mesh, [Shard(1)])


class Gather(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, x):
        return x.redistribute(self.mesh, [Replicate()])


@simulate(2)
def test_moves_between_a_module_and_one_inside_it_belong_to_each():
    mesh = line(2)
    net = Mixer(mesh)
    x = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]).requires_grad_()
    with CommDebugMode() as mode:
        net(x).sum().full_tensor().backward()
    found = [(one.module, one.is_backward, one.op) for one in mode.collectives]
    assert found == [
        ("Mixer", False, "all_to_all_v"),
        ("Mixer.inner", False, "all_gather"),
        ("Mixer", False, "all_to_all_v"),
        ("Global", False, "all_reduce"),
        ("Mixer", True, "all_to_all_v"),
        ("Mixer", True, "all_gather"),
        ("Mixer", True, "all_to_all_v"),
    ]


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@simulate(2)
def test_what_checkpoint_runs_again_has_its_module_in_backward(reentrant):
    net = mlp(line(2))
    with CommDebugMode() as mode:
        checkpoint(net, x_of(3, 4), use_reentrant=reentrant).sum().backward()
    again = (*MLP_FORWARD[:1], True, *MLP_FORWARD[2:])
    assert listed(mode) == [MLP_FORWARD, again, MLP_BACKWARD]


@simulate(2)
def test_a_second_backward_starts_outside_of_modules():
    mesh = line(2)
    net = mlp(mesh)
    whole = distribute_tensor(torch.ones(3, 4), mesh, [Replicate()])
    with CommDebugMode() as mode:
        y = net(x_of(3, 4))
        y.sum().backward(retain_graph=True)
        cut = DTensor.from_local(y, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
        (cut * whole).sum().full_tensor().backward()
    backward = [one[0] for one in listed(mode) if one[1]]
    assert backward == ["Sequential.0", "Global", "Sequential.0"]


def call_head_first(net, x):
    net[0](x)
    return net(x)


@simulate(2)
def test_names_are_those_of_the_largest_module_seen():
    mesh = line(2)
    net = nn.Sequential(mlp(mesh), nn.Identity())
    with CommDebugMode() as mode:
        call_head_first(net, x_of(3, 4))
        net[0](x_of(3, 4))
    assert [one.module for one in mode.collectives] == [
        "Sequential.2",
        "Sequential.0.2",
        "Sequential.0.2",
    ]


class Maker(nn.Module):
    """Makes its inner module anew in each forward."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, x):
        return Gather(self.mesh)(x)


@simulate(2)
def test_a_module_made_on_the_way_is_named_by_its_class():
    mesh = line(2)
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with CommDebugMode() as mode:
        Maker(mesh)(x)
    assert [one.module for one in mode.collectives] == ["Maker.Gather"]


# ---------------------------------------------------------------------- when and for whom


@simulate(2)
def test_only_the_block_is_listed_even_where_plans_ran_before():
    mesh = line(2)
    net, x = mlp(mesh), distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    for _ in range(2):
        net(x_of(3, 4)), x.full_tensor()
        with CommDebugMode() as mode:
            net(x_of(3, 4)), x.full_tensor()
        net(x_of(3, 4)), x.full_tensor()
        assert mode.get_comm_counts() == {"all_reduce": 1, "all_gather": 1}


@simulate(2)
def test_entered_again_it_starts_anew():
    net, mode = mlp(line(2)), CommDebugMode()
    for _ in range(2):
        with mode:
            net(x_of(3, 4))
        assert mode.get_total_counts() == 1
    with mode, pytest.raises(HyperParallelError, match="CommDebugMode: a mode must not be entered"):
        mode.__enter__()
    assert mode.get_total_counts() == 0


def hooks():
    return [
        len(found)
        for name, found in vars(torch_module).items()
        if name.startswith("_global_") and isinstance(found, dict)
    ]


class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("no forward")


def fail_in_and_around_blocks():
    net = mlp(line(2))
    with pytest.raises(ValueError, match="no forward"), CommDebugMode() as outer:
        net(x_of(3, 4))
        with pytest.raises(ValueError, match="no forward"), CommDebugMode() as inner:
            net(x_of(3, 4))
            nn.Sequential(net, Broken())(x_of(3, 4))
        net(x_of(3, 4)).sum().backward()
        nn.Sequential(Broken())(x_of(3, 4))
    net(x_of(3, 4))
    return listed(outer), listed(inner)


def test_nested_modes_and_exceptions_leave_nothing_behind():
    (kind,) = simulate(1).run(lambda: type(line(1).communicator(0)))
    before = hooks(), dict(vars(kind))
    for outer, inner in simulate(2).run(fail_in_and_around_blocks):
        nested = ("Sequential.0.2", *MLP_FORWARD[1:])
        assert inner == [MLP_FORWARD, nested]
        backward = ("Sequential.0.0", *MLP_BACKWARD[1:])
        assert outer == [MLP_FORWARD, MLP_FORWARD, nested, nested, backward]
    assert (hooks(), dict(vars(kind))) == before


def watch_on_one_rank():
    mesh = line(2)
    net = mlp(mesh)
    if mesh.get_local_rank():
        net(x_of(3, 4)).sum().backward()
        return []
    with CommDebugMode() as mode:
        net(x_of(3, 4)).sum().backward()
    return listed(mode)


def test_a_rank_lists_its_own_and_one_that_did_not_enter_is_undisturbed():
    assert simulate(2).run(watch_on_one_rank) == [[MLP_FORWARD, MLP_BACKWARD], []]


def test_outside_of_the_ranks_it_lists_nothing():
    with CommDebugMode() as mode:
        simulate(2).run(lambda: mlp(line(2))(x_of(3, 4)))
    assert mode.get_total_counts() == 0


# ---------------------------------------------------------------------- text


@simulate(9)
def test_the_table_counts_what_is_alike_and_shortens_large_groups():
    mesh = line(9)
    with CommDebugMode() as mode:
        for _ in range(2):
            mesh.communicator(0).all_reduce(torch.ones(1024))
        mesh.communicator(0).barrier()
    assert str(mode).splitlines() == [
        "module  pass     calls  op          group                    bytes in  bytes out",
        "Global  forward      2  all_reduce  tp: 0, ..., 8 (9 ranks)     4 KiB      4 KiB",
        "Global  forward      1  barrier     tp: 0, ..., 8 (9 ranks)       0 B        0 B",
    ]
