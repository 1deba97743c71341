# SPDX-License-Identifier: Apache-2.0
"""Uneven pieces, nested on two axes: exact in any order of ranks, or refused on every rank."""

import itertools

import pytest
import torch

from hyper_parallel import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    simulate,
)
from hyper_parallel.errors import LayoutError
from support.dtensors import line, same, seeded

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
ORDERS = [[[0, 1], [2, 3]], [[3, 1], [0, 2]], [[2, 3], [1, 0]]]


def known_flat(ranks):
    """Make a mesh whose joint group is in use already."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    flat = mesh.flatten("all")
    rows = distribute_tensor(torch.arange(4.0), flat, [S0])
    same(rows.redistribute(flat, [R]), torch.arange(4.0))
    return mesh


@pytest.mark.parametrize("ranks", ORDERS, ids=str)
@simulate(4)
def test_nested_gather_loses_no_row(ranks):
    mesh = known_flat(ranks)
    whole = torch.arange(15.0).reshape(5, 3)
    nested = distribute_tensor(whole, mesh, [S0, S0])
    assert nested.redistribute(mesh, [R, R]).to_local()[:, 0].tolist() == [0, 3, 6, 9, 12]
    rows = nested.redistribute(mesh, [R, S0]).to_local()[:, 0].tolist()
    assert rows == ([9, 12] if mesh.get_local_rank("tp") else [0, 3, 6])
    pending = distribute_tensor(whole, mesh, [P, P]).redistribute(mesh, [S0, S0])
    assert torch.equal(pending.to_local(), nested.to_local())


@pytest.mark.parametrize("shape", [(5, 3), (3, 7), (1, 2), (9, 1)], ids=str)
@pytest.mark.parametrize("ranks", ORDERS, ids=str)
@simulate(4)
def test_moves_between_all_nestings_and_their_gradients(ranks, shape):
    mesh = known_flat(ranks)
    whole, weight = seeded(*shape), seeded(*shape, seed=1)
    ends = list(itertools.product((R, S0, S1, P), repeat=2))
    for src, dst in list(itertools.product(ends, repeat=2))[::9]:
        x = distribute_tensor(whole, mesh, src).requires_grad_()
        moved = x.redistribute(mesh, dst)
        same(moved, whole)
        (moved * distribute_tensor(weight, mesh, [R, R])).sum().backward()
        same(x.grad, weight)


@pytest.mark.parametrize(
    "sizes, total, odd",
    [((2, 3, 4, 5), 14, 0), ((4, 4, 3, 3), 14, 2), ((2, 1, 1, 1), 5, 1)],
    ids=str,
)
@simulate(4)
def test_pieces_that_are_no_chunks_are_refused_on_every_rank(sizes, total, odd):
    mesh = line(4)
    local = torch.full((2, sizes[mesh.get_local_rank()]), 1.0)
    text = rf"local shape on rank {odd} must be \(2, .*local_shape=\(2, {sizes[odd]}\)"
    with pytest.raises(LayoutError, match=text) as error:
        DTensor.from_local(
            local, mesh, [S1], run_check=True, shape=torch.Size([2, total]), stride=(total, 1)
        )
    assert isinstance(error.value, ValueError)
