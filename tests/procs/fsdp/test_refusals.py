# SPDX-License-Identifier: Apache-2.0
"""What fully_shard refuses: on every rank alike, before a collective starts, with a way out."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    HyperParallelError,
    LayoutError,
    Partial,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from support.device import DEVICE


def parallel_mlp(mesh, hidden=8):
    net = nn.Sequential(nn.Linear(6, hidden), nn.GELU(), nn.Linear(hidden, 6))
    return parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def joint_mesh():
    return init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))


def no_mesh():
    fully_shard(nn.Linear(2, 2))


def no_mesh_inside_with():
    with joint_mesh():
        fully_shard(nn.Linear(2, 2))


def another_world():
    other = DeviceMesh(DEVICE, [[0, 3], [2, 1]], mesh_dim_names=("dp", "tp"))
    fully_shard(parallel_mlp(joint_mesh()), mesh=other["dp"])


def all_ranks():
    every = init_device_mesh(DEVICE, (4,), mesh_dim_names=("dp",))
    fully_shard(parallel_mlp(joint_mesh()), mesh=every)


def the_whole_mesh():
    mesh = joint_mesh()
    fully_shard(parallel_mlp(mesh), mesh=mesh)


def the_same_axis():
    mesh = joint_mesh()
    fully_shard(parallel_mlp(mesh), mesh=mesh["tp"])


def blocks():
    mesh = joint_mesh()
    net = nn.Linear(2, 12)
    cut = distribute_tensor(net.weight.data, mesh["tp"], [Shard(0, block=4)])
    net.weight = nn.Parameter(cut)
    fully_shard(net, mesh=mesh["dp"])


def pending():
    mesh = joint_mesh()
    net = nn.Linear(2, 4)
    net.weight = nn.Parameter(distribute_tensor(net.weight.data, mesh["tp"], [Partial()]))
    fully_shard(net, mesh=mesh["dp"])


def empty_part():
    mesh = joint_mesh()
    fully_shard(parallel_mlp(mesh, hidden=1), mesh=mesh["dp"])


def uneven_placement():
    mesh = joint_mesh()
    net = parallel_mlp(mesh, hidden=5)
    fully_shard(net, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(p.ndim - 1))


def tied_over_calls():
    mesh = joint_mesh()
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    net[1].weight = net[0].weight
    parallelize_module(net, mesh["tp"], {"*": ColwiseParallel()})
    fully_shard(net[0], mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])


def tied_plain_over_calls():
    mesh = joint_mesh()
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    net[1].weight = net[0].weight
    fully_shard(net[0], mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])


def wrong_order(style):
    mesh = joint_mesh()
    net = fully_shard(nn.Sequential(nn.Linear(6, 6)), mesh=mesh["dp"])
    parallelize_module(net, mesh["tp"], {"0": style})


def column_too_late():
    wrong_order(ColwiseParallel())


def sequence_too_late():
    wrong_order(SequenceParallel())


REFUSED = {
    no_mesh: r"fully_shard: mesh must be given, but got mesh=None\. Pass .*mesh\['dp'\]",
    no_mesh_inside_with: r"fully_shard: mesh must be given",
    another_world: r"sibling of the mesh of parameter '0\.weight'.*ranks \[.*init_device_mesh",
    all_ranks: r"sibling of the mesh of parameter '0\.weight'.*dp=4",
    the_whole_mesh: r"sibling of the mesh of parameter '0\.weight', on other axes",
    the_same_axis: r"sibling of the mesh of parameter '0\.weight', on other axes",
    blocks: r"parameter 'weight': .*torch must know the placement.*S\(0, block=4\)",
    pending: r"parameter 'weight' must not be a pending reduction.*P\(sum\)",
    empty_part: r"parameter '2\.weight' may be empty in another dim than 0.*"
    r"\[\(6, 1\), \(6, 0\)\]\. Use fewer tensor-parallel ranks",
    uneven_placement: r"parameter '2\.weight' must divide by 2 in dim 1.*\[\(6, 3\), \(6, 2\)\]",
    tied_over_calls: r"parameter '1\.weight' must not be tied to one that an earlier call sharded",
    tied_plain_over_calls: r"parameter '1\.weight' must not be tied to one",
    column_too_late: r"ColwiseParallel on '0': .*Parallelize the module before fully_shard",
    sequence_too_late: r"SequenceParallel on '0': .*Parallelize the module before fully_shard",
}


def text_of_error(name):
    case = {fn.__name__: fn for fn in REFUSED}[name]
    try:
        case()
    except HyperParallelError as error:
        return type(error).__name__, str(error)
    return "nothing", "was refused"


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_refused_on_every_rank_alike(procs4, case):
    answers = procs4.run(text_of_error, case.__name__)
    for kind, text in answers:
        assert kind in ("LayoutError", "PlanError"), text
        assert re.search(REFUSED[case], text), text
        assert text.isascii()


def half_done():
    """Torch refuses an argument: the parameters are ours again."""
    mesh = joint_mesh()
    net = parallel_mlp(mesh)
    before = list(net.parameters())
    try:
        fully_shard(net, mesh=mesh["dp"], no_such_argument=1)
    except TypeError as error:
        return str(error), all(p is q for p, q in zip(before, net.parameters(), strict=True))
    return "accepted", False


def test_a_refusal_by_torch_leaves_the_module_as_it_was(procs4):
    for text, same in procs4.run(half_done):
        assert "no_such_argument" in text
        assert same


def wrapped_by_torch():
    """Wrap a module with our parameters as torch's own do; give what each raises."""
    mesh = joint_mesh()
    found = []
    for wrap in (
        lambda net: fsdp.fully_shard(net, mesh=mesh["dp"].handle),
        lambda net: DistributedDataParallel(net, process_group=mesh["dp"].get_group()),
    ):
        try:
            wrap(parallel_mlp(mesh))(torch.ones(2, 6))
            found.append("nothing")
        except HyperParallelError as error:
            found.append(str(error).partition(":")[0])
    return found


def test_torchs_own_wrappers_end_in_an_error_of_ours(procs4):
    for found in procs4.run(wrapped_by_torch):
        assert found == ["DTensor op 'all_gather_copy_in'", "aten.cat"]


def test_simulated_ranks_are_refused():
    @simulate(2)
    def run():
        mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("dp",))
        with pytest.raises(LayoutError, match="needs a real world") as refused:
            fully_shard(nn.Linear(2, 2), mesh=mesh)
        return str(refused.value)

    assert all("DeviceMesh" in text for text in run())
