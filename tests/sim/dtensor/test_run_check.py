# SPDX-License-Identifier: Apache-2.0
"""DTensor.from_local(run_check=True): all ranks accept, or all refuse with one text."""

from __future__ import annotations

import re

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, init_device_mesh, simulate
from hyper_parallel.dtensor import declare
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh, current_rank
from support.dtensors import line, seeded

R, S0, P = Replicate(), Shard(0), Partial()
NAN = float("nan")


def refused(size, fn, outside=()):
    """Run on every rank; give the one text with which all refuse but those outside the mesh."""
    outcomes = simulate(size).outcomes(fn)
    inside = [error for rank, error in enumerate(outcomes) if rank not in outside]
    assert all(isinstance(error, LayoutError) for error in inside), inside
    assert not any(isinstance(outcomes[rank], Exception) for rank in outside)
    texts = {re.sub(r"\s*on rank \d+ of \d+$", "", str(error)) for error in inside}
    assert len(texts) == 1, texts
    return texts.pop()


def checked(local, mesh, *placements, **how):
    return DTensor.from_local(local, mesh, placements, run_check=True, **how)


def test_local_sizes_that_are_not_chunk_sizes_are_refused_everywhere():
    def declare_sizes():
        local = torch.full((2, 2 + current_rank()), float(current_rank()))
        return checked(local, line(4), Shard(1), shape=torch.Size([2, 14]), stride=(14, 1))

    text = refused(4, declare_sizes)
    assert "the local shape on rank 0 must be (2, 4)" in text
    assert "but got local_shape=(2, 2)" in text
    assert "shards must have torch.chunk's sizes" in text


def test_sizes_that_differ_without_shape_are_refused_by_the_first_ranks_size():
    text = refused(4, lambda: checked(torch.ones(2 + (current_rank() == 2), 3), line(4), S0))
    assert "the local shape on rank 2 must be (2, 3)" in text
    assert "local_shape=(3, 3)" in text
    assert "Pass shape= with the global shape" in text


@pytest.mark.parametrize("odd", [0, 3])
def test_a_misfit_in_one_row_of_a_mesh_is_refused_in_all(odd):
    def misfit():
        mesh = init_device_mesh("cpu", (2, 2))
        return checked(torch.ones(2 + (current_rank() == odd), 2), mesh, R, Shard(1), shape=(2, 4))

    assert f"the local shape on rank {odd} must be (2, 2)" in refused(4, misfit)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


AVG = Partial("avg")
# What the other ranks declare, what rank 1 declares, and what the error says.
DIFFERENCES = {
    "ndim": ((ones(2), S0, {}), (ones(2, 3), S0, {}), "ndim on rank 1 must be as on rank 0"),
    "dtype": (
        (ones(2), S0, {}),
        (ones(2, dtype=torch.int64), S0, {}),
        "but got value=torch.int64, expected=torch.float32",
    ),
    "average": ((ones(2), AVG, {}), (ones(2, dtype=torch.int8), AVG, {}), "value=torch.int8"),
    "shape": ((ones(2), S0, {"shape": (6,)}), (ones(2), S0, {"shape": (5,)}), "value=(5,)"),
    "no shape": ((ones(2), S0, {"shape": (6,)}), (ones(2), S0, {}), "len(shape), or -1 on rank 1"),
    "placements": ((ones(2), S0, {}), (ones(2), P, {}), "placements (a digest) on rank 1"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_rank_that_declares_otherwise_is_refused_everywhere(name):
    others, odd, text = DIFFERENCES[name]

    def declare_it():
        local, placement, how = odd if current_rank() == 1 else others
        return checked(local, line(3), placement, **how)

    assert text in refused(3, declare_it)


def test_an_average_of_integers_is_refused_after_all_were_asked():
    text = refused(2, lambda: checked(torch.ones(2, dtype=torch.int64), line(2), Partial("avg")))
    assert "Partial('avg') needs a floating point tensor" in text


DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_that_differ_are_refused_everywhere(dtype):
    def differ():
        local = torch.zeros(3, 2).to(dtype)
        if current_rank() == 2:
            local[2, 1] = 1
        return checked(local.T, line(3), R)

    text = refused(3, differ)
    assert "the values (a fingerprint) on rank 2 must be rank 0's, but got value='0x" in text
    assert "distribute_tensor makes them from the data of one rank" in text


@simulate(2)
def test_nans_are_alike_and_so_are_zeros():
    odd = current_rank()
    other_nan = torch.tensor([0x7FC00001 if odd else 0x7FC00000], dtype=torch.int32)
    values = torch.cat([torch.tensor([-0.0 if odd else 0.0, 1.0]), other_nan.view(torch.float32)])
    for dtype in (torch.float32, torch.float16, torch.float64, torch.complex64):
        assert checked(values.to(dtype), line(2), R).shape == (3,)
    assert checked(torch.tensor(NAN, requires_grad=True), line(2), R).requires_grad
    assert checked(torch.ones(0, 3), line(2), R).shape == (0, 3)
    assert checked(torch.ones(2, device="meta"), line(2), R).shape == (2,)


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_copies_on_one_axis_of_two_are_compared_along_it(odd):
    def differ():
        mesh = init_device_mesh("cpu", (2, 2))
        local = seeded(2, 3, seed=mesh.get_coordinate()[1]) + (current_rank() == odd)
        return checked(local, mesh, R, S0)

    owner = odd % 2
    text = refused(4, differ)
    ranks = (odd, owner) if odd > 1 else (3, 1)  # rank 1 is the one that its copy is compared with
    assert "on rank {} must be rank {}'s".format(*ranks) in text


@simulate(4)
def test_contributions_and_shards_are_not_compared():
    mesh, rank = init_device_mesh("cpu", (2, 2)), current_rank()
    assert checked(torch.full((2,), float(rank)), mesh, P, S0).shape == (4,)
    column = torch.full((2,), float(mesh.get_coordinate()[0]))
    assert checked(column, mesh, P, R).shape == (2,)


@pytest.mark.parametrize("odd", [None, 3])
def test_only_the_ranks_of_the_mesh_compare(odd):
    def declare_copy():
        mesh = DeviceMesh("cpu", [3, 1])
        return checked(torch.ones(2) * (2 if current_rank() == odd else 1), mesh, R).shape

    if odd is None:
        assert simulate(4).run(declare_copy) == [(2,)] * 4
    else:
        assert "on rank 1 must be rank 3's" in refused(4, declare_copy, outside=(0, 2))


def test_values_are_compared_in_pieces(monkeypatch):
    monkeypatch.setattr(declare, "_CHUNK", 2)

    def differ():
        local = torch.zeros(7)
        local[6] = current_rank()
        return checked(local, line(2), R)

    assert "a fingerprint" in refused(2, differ)
