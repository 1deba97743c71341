# SPDX-License-Identifier: Apache-2.0
"""DTensor.redistribute over gloo: against torch's own, with its options, and truly in flight."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from hyper_parallel import DTensor, Partial, Replicate, Shard, init_device_mesh
from support.device import DEVICE, DTYPE
from support.dtypes import outcomes, unexpected

PLACES = ("R", "S0", "S1", "P")
OPTIONS = [
    {},
    {"async_op": True},
    {"forward_dtype": torch.bfloat16},
    {"backward_dtype": torch.bfloat16, "async_op": True},
    {"forward_dtype": DTYPE, "backward_dtype": torch.float16},
]


def placement(api, name):
    if name.startswith("S"):
        return api.Shard(int(name[1]))
    return api.Replicate() if name == "R" else api.Partial()


def moved_by(api, mesh, src, dst, how):
    """Give the local value and the local gradient of one move of odd and of leaf tensors."""
    seed = torch.Generator("cpu").manual_seed(0 if src == "R" else dist.get_rank())
    shape = [4, 6]
    if src.startswith("S"):
        shape[int(src[1])] //= 2
    leaf = torch.randn(shape, generator=seed, device="cpu").to(DEVICE).requires_grad_()
    given = api.DTensor.from_local(leaf, mesh, [placement(api, src)])
    moved = given.redistribute(mesh, [placement(api, dst)], **how)
    local = moved.to_local()
    weight = torch.linspace(-1, 1, local.numel()).view(local.shape).to(local.dtype)
    (local * weight).sum().backward()
    value = local.detach()
    return (value.wait() if hasattr(value, "wait") else value), leaf.grad


def against_torch():
    import torch.distributed.tensor as theirs

    import hyper_parallel as ours

    mesh = init_device_mesh(DEVICE, (2,))
    differing = []
    for src, dst, how in itertools.product(PLACES, PLACES[:3], OPTIONS):
        mine = moved_by(ours, mesh, src, dst, how)
        other = moved_by(theirs, mesh.handle, src, dst, how)
        for what, a, b in zip(("value", "gradient"), mine, other, strict=True):
            if a.dtype != b.dtype or not torch.equal(a, b):
                differing.append((src, dst, how, what, a, b))
    return differing


def test_redistribute_equals_torchs(procs2):
    assert procs2.run(against_torch) == [[], []]


def while_the_source_changes():
    mesh = init_device_mesh(DEVICE, (2,))
    rank, wrong = mesh.get_rank(), []
    for name, dst in itertools.product(("S0", "S1", "P"), (Replicate(), Shard(0), Shard(1))):
        src = {"S0": Shard(0), "S1": Shard(1), "P": Partial()}[name]
        if src == dst:
            continue
        shape = [2048, 2048]
        if src != Partial():
            shape[src.dim] //= 2
        local = torch.full(shape, rank + 1.0)
        given = DTensor.from_local(local, mesh, [src])
        expected = given.redistribute(mesh, [dst]).to_local().clone()
        moved = given.redistribute(mesh, [dst], async_op=True)
        local.fill_(77)
        if not torch.equal(moved.to_local(), expected):
            wrong.append((src, dst))
    return wrong


def test_async_redistribute_sends_what_the_tensor_held(procs2):
    assert procs2.run(while_the_source_changes) == [[], []]


def reduce_scatter_leaves_its_operand():
    mesh = init_device_mesh(DEVICE, (2,))
    comm, x = mesh.communicator(0), torch.arange(8.0)
    comm.reduce_scatter(x)
    comm.all_to_all_v(x, [4, 4], [4, 4])
    return x.tolist()


def test_collectives_but_all_reduce_leave_their_operand_alone(procs2):
    assert procs2.run(reduce_scatter_leaves_its_operand) == [torch.arange(8.0).tolist()] * 2


def outcomes_of_dtypes():
    return outcomes(init_device_mesh(DEVICE, (2,)))


def test_every_dtype_moves_exactly_or_is_refused(procs2):
    first, second = procs2.run(outcomes_of_dtypes)
    assert first == second
    irreducible = () if torch.float64 == DTYPE else ("float64",)
    assert unexpected(first, complex_products=False, irreducible=irreducible) == {}
    moved = {key[0] for key, texts in first.items() if "P(sum)" in key[1] and texts == {"exact"}}
    assert not moved & set(irreducible)
