# SPDX-License-Identifier: Apache-2.0
"""Moves of DTensors, forward and backward, against an oracle of its own.

Two identities pin the gradients. `redistribute` is the identity on the logical value, so the
gradient of its operand is the logical cotangent. `from_local` maps every rank's contribution to the
logical value, so its gradient is the derivative of that reduction, which torch computes on all
contributions stacked in one process.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel import DTensor, Partial, Replicate, Shard, init_device_mesh, simulate
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh, current_rank
from support import oracle
from support.device import DEVICE, DTYPE
from support.dtensors import laid, line, part, same, seeded

OPS = ("sum", "avg", "max", "min", "product")
ONE_AXIS = [Replicate(), Shard(0), Shard(1), *(Partial(op) for op in OPS)]
TWO_AXES = [Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("avg")]
GRIDS = {
    "1": np.arange(1),
    "2": np.arange(2),
    "3": np.arange(3),
    "4": np.arange(4),
    "descending": np.array([2, 1, 0]),
    "2x2": np.arange(4).reshape(2, 2),
    "2x2 mixed": np.array([[3, 0], [1, 2]]),
}
SHAPES = [(4, 8), (5, 3), (0, 3)]  # even, uneven and empty shards


def attach(grid):
    return DeviceMesh(DEVICE, grid.tolist())


def as_torch(array):
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE, DTYPE)


def made(grid, placements, shape):
    """Give every rank's contribution and the value they are together."""
    held = oracle.contributions(grid, placements, shape, np.random.default_rng(0))
    whole = oracle.reconstruct(grid, placements, shape, held) if 0 not in shape else None
    return held, torch.zeros(shape).to(DTYPE) if whole is None else as_torch(whole)


def local_gradient(grid, placements, held, cotangent):
    """Differentiate (contributions -> value) . cotangent for this rank, in one process.

    Replicas all get the full gradient: the contributions of ranks that differ only along a
    Replicate axis are one leaf.
    """
    leaves = {}
    pieces = {}
    for c, rank in np.ndenumerate(grid):
        own = tuple(0 if p.is_replicate() else i for i, p in zip(c, placements, strict=True))
        leaves.setdefault(own, as_torch(held[int(rank)]).clone().requires_grad_())
        pieces[c] = leaves[own]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            pieces = reduced(pieces, axis, placement.reduce_op)
    total = 0.0
    for c in {
        tuple(i if p.is_shard() else 0 for i, p in zip(c, placements, strict=True)) for c in pieces
    }:
        where = np.ix_(*oracle.indices(grid, placements, cotangent.shape, int(grid[c])))
        total = total + (pieces[c] * cotangent[where]).sum()
    mine = tuple(int(i) for i in np.argwhere(grid == current_rank())[0])
    own = tuple(0 if p.is_replicate() else i for i, p in zip(mine, placements, strict=True))
    (found,) = torch.autograd.grad(total, [leaves[own]])
    return found


def reduced(pieces, axis, op):
    size = 1 + max(c[axis] for c in pieces)

    def one(c):
        stacked = torch.stack([pieces[(*c[:axis], i, *c[axis + 1 :])] for i in range(size)])
        if op == "sum":
            return stacked.sum(0)
        if op == "avg":
            return stacked.mean(0)
        if op == "product":
            return stacked.prod(0)
        return stacked.amax(0) if op == "max" else stacked.amin(0)  # ties share equally

    return {c: one(c) for c in pieces}


def check_move(grid, src, dst, shape):
    mesh = attach(grid)
    held, whole = made(grid, src, shape)
    mine = as_torch(held[current_rank()]).requires_grad_()
    source = DTensor.from_local(mine, mesh, src, shape=shape)
    moved = source.redistribute(mesh, dst)
    assert moved.placements == tuple(dst)
    assert tuple(moved.to_local(grad_placements=dst).shape) == oracle.local_shape(
        grid, dst, shape, current_rank()
    )
    same(moved, whole)
    cotangent = seeded(*shape, seed=1)
    back = laid(cotangent, mesh, *moved.layout.cotangent.placements)
    logical, local = torch.autograd.grad(moved, [source, mine], back)
    same(logical, cotangent)
    assert logical.placements == source.layout.cotangent.placements
    torch.testing.assert_close(local, local_gradient(grid, src, held, cotangent))


@pytest.mark.parametrize("name", [n for n in GRIDS if "x" not in n])
def test_move_of_every_pair_on_one_axis(name):
    grid = GRIDS[name]

    @simulate(grid.size)
    def run():
        for src, dst, shape in itertools.product(ONE_AXIS, ONE_AXIS, SHAPES):
            check_move(grid, [src], [dst], shape)

    run()


@pytest.mark.parametrize("name", [n for n in GRIDS if "x" in n])
def test_move_of_pairs_on_two_axes(name):
    grid = GRIDS[name]
    layouts = list(itertools.product(TWO_AXES, TWO_AXES))

    @simulate(grid.size)
    def run():
        for src, dst in itertools.islice(itertools.product(layouts, layouts), 0, None, 11):
            check_move(grid, src, dst, (5, 3))

    run()


@given(st.data())
def test_move_chains_are_the_identity(data):
    grid = data.draw(st.sampled_from([GRIDS["3"], GRIDS["2x2"], GRIDS["2x2 mixed"]]))
    choices = st.lists(st.sampled_from(TWO_AXES), min_size=grid.ndim, max_size=grid.ndim)
    chain = data.draw(st.lists(choices, min_size=2, max_size=5))
    shape = data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))

    @simulate(grid.size)
    def run():
        mesh = attach(grid)
        held, whole = made(grid, chain[0], shape)
        mine = as_torch(held[current_rank()]).requires_grad_()
        tensor = DTensor.from_local(mine, mesh, chain[0], shape=shape)
        for placements in chain[1:]:
            tensor = tensor.redistribute(mesh, placements)
        same(tensor, whole)
        cotangent = seeded(*shape, seed=2)
        tensor.backward(laid(cotangent, mesh, *tensor.layout.cotangent.placements))
        torch.testing.assert_close(mine.grad, local_gradient(grid, chain[0], held, cotangent))

    run()


@simulate(2)
def test_to_local_hands_a_pending_gradient_on_between_nodes():
    mesh = line(2)
    tensor = laid(torch.ones(4), mesh, Replicate(), requires_grad=True)
    seen = []
    middle = tensor * 2
    middle.register_hook(lambda grad: seen.append(grad.full_tensor()))
    (middle.to_local(grad_placements=[Partial()]) * (1.0 + current_rank())).sum().backward()
    assert torch.equal(seen[0], torch.full((4,), 3.0))
    same(tensor.grad, torch.full((4,), 6.0))


@simulate(2)
def test_distribute_of_a_non_leaf_is_differentiable():
    from hyper_parallel import distribute_tensor

    mesh = line(2)
    base = seeded(5, 3).requires_grad_()
    placed = distribute_tensor(base * 2, mesh, [Shard(0)])
    torch.testing.assert_close(placed.to_local(), part(base.detach() * 2, mesh, [Shard(0)]))
    (placed * placed).sum().backward()
    torch.testing.assert_close(base.grad, 8 * base.detach())


@simulate(2)
def test_to_local_of_a_pending_extreme_over_one_rank_is_free():
    mesh = init_device_mesh(DEVICE, (1, 2))
    local = torch.tensor([1.0, float("nan")], requires_grad=True)
    tensor = DTensor.from_local(local, mesh, [Partial("max"), Shard(0)])
    (tensor.to_local() * 2).sum().backward()
    assert local.grad.tolist() == [2.0, 2.0]


@simulate(2)
def test_to_local_refuses_a_gradient_of_another_shape():
    tensor = laid(torch.ones(4), line(2), Replicate(), requires_grad=True)
    text = r"to_local: the gradient's local shape must be that of the value, \(4,\) on rank 0, but"
    with pytest.raises(LayoutError, match=text + r" got shape=\(2,\), grad_placements=\(S\(0\),\)"):
        tensor.to_local(grad_placements=[Shard(0)])
    with pytest.raises(LayoutError, match=r"DTensor.from_local: the gradient's local shape must"):
        DTensor.from_local(torch.ones(4), line(2), [Replicate()], grad_placements=[Shard(0)])


@simulate(2)
def test_redistribute_refuses_no_mesh():
    tensor = laid(torch.ones(4), line(2), Shard(0))
    with pytest.raises(LayoutError, match=r"DTensor.redistribute: device_mesh must be given"):
        tensor.redistribute(placements=[Replicate()])
    with pytest.raises(LayoutError, match=r"Pass the mesh first: redistribute\(device_mesh"):
        tensor.redistribute([Replicate()])


@simulate(2)
def test_redistribute_to_the_same_layout_is_the_same_tensor():
    mesh = line(2)
    tensor = laid(torch.ones(4), mesh, Shard(0))
    assert tensor.redistribute(mesh, [Shard(-1)]) is tensor


@simulate(4)
def test_rank_outside_the_mesh_takes_part_in_nothing():
    mesh = DeviceMesh(DEVICE, [1, 3])
    tensor = laid(seeded(4, 6), mesh, Shard(0), requires_grad=True)
    product = (tensor @ tensor.t()).relu()
    loss = product.sum()
    assert product.shape == (4, 4)
    loss.backward()
    if current_rank() in (1, 3):
        plain = seeded(4, 6).requires_grad_()
        (plain @ plain.t()).relu().sum().backward()
        same(tensor.grad, plain.grad)
    else:
        assert product.to_local().shape == (0,)
        with pytest.raises(LayoutError, match=r"only a rank of the mesh may ask for a value"):
            torch.equal(tensor, tensor)
    with torch.no_grad():
        tensor.add_(1)


@simulate(4)
def test_move_on_three_axes_nests_from_left_to_right():
    mesh = init_device_mesh(DEVICE, (2, 1, 2))
    whole = seeded(5, 3)
    tensor = laid(whole, mesh, Shard(0), Partial(), Shard(0), requires_grad=True)
    same(tensor, whole)
    (tensor.redistribute(mesh, [Replicate(), Replicate(), Shard(1)]) * 2).sum().backward()
    same(tensor.grad, torch.full((5, 3), 2.0).to(DTYPE))
