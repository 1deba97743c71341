# SPDX-License-Identifier: Apache-2.0
"""Checked mode where calls agree, how it is switched, and which module a fault is in."""

import pytest
import torch
from torch import nn

from hyper_parallel import (
    BackendError,
    ColwiseParallel,
    RowwiseParallel,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.runtime import current_rank, simulate
from hyper_parallel.runtime.calls import Call, Said
from hyper_parallel.runtime.checked import CheckedCommunicator, wants_checks


def every_call(comm):
    """Make each call once; rank, sizes and values depend on the group index."""
    i = comm.rank
    x = torch.arange(4.0).view(2, 2) + i
    sizes, ones = (1, 2), [1, 1]
    pieces = [x, x + 5] if i == 1 else None
    return [
        comm.all_reduce(x.clone(), "max"),
        comm.all_reduce(x.clone(), async_op=True).wait(),
        comm.all_gather(x),
        comm.all_gather(x, async_op=True).wait(),
        comm.all_gather_v(x[: sizes[i]], sizes),
        comm.reduce_scatter(x.clone(), op="min"),
        comm.reduce_scatter(x.clone(), async_op=True).wait(),
        comm.reduce_scatter_v(torch.ones(3, 2), sizes),
        comm.all_to_all_v(torch.ones(3) + i, [1, 2] if i else [2, 1], [1, 2] if i else [2, 1]),
        comm.all_to_all_v(x.view(-1)[:2], ones, recv_sizes=ones),
        comm.broadcast(x.clone(), src=1),
        comm.scatter(torch.empty(2, 2), pieces, 1),
        comm.all_gather_ints([i, 7]),
        comm.barrier(),
    ]


def test_calls_that_agree_give_what_they_give_unchecked():
    def run():
        comm = init_device_mesh("cpu", (2,)).communicator(0)
        checked, plain = every_call(CheckedCommunicator(comm)), every_call(comm)
        same = [
            torch.equal(a, b) for a, b in zip(checked, plain, strict=True) if torch.is_tensor(a)
        ]
        return [*same, checked[-2:] == plain[-2:]]

    assert simulate(2).run(run) == [[True] * 13] * 2


def test_a_difference_is_raised_before_anything_is_changed():
    def run():
        comm = CheckedCommunicator(init_device_mesh("cpu", (2,)).communicator(0))
        x = torch.ones(2)
        with pytest.raises(BackendError, match="agree on the op") as caught:
            comm.all_reduce(x, "max" if current_rank() else "sum")
        assert x.tolist() == [1.0, 1.0]
        assert comm.all_reduce(x).tolist() == [2.0, 2.0]
        return str(caught.value)

    first, second = simulate(2).run(run)
    assert first == second
    assert first.startswith("all_reduce: every rank of the group (0, 1) must make the same call")


def test_sizes_of_another_length_are_a_difference():
    def run():
        comm = CheckedCommunicator(init_device_mesh("cpu", (2,)).communicator(0))
        sizes = [1, 1, 0] if current_rank() else [1, 1]
        comm.all_to_all_v(torch.ones(2), sizes, [1, 1])

    texts = {str(one) for one in simulate(2).outcomes(run)}
    assert len(texts) == 1
    assert "all_to_all_v(parts=(3, 2), dtype=float32)" in texts.pop()


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_variable_is_read_where_no_argument_is_given(monkeypatch, value, on):
    monkeypatch.delenv("HYPER_PARALLEL_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("HYPER_PARALLEL_CHECK", value)
    assert wants_checks(None) is on
    assert wants_checks(False) is False
    assert wants_checks(True) is True


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv("HYPER_PARALLEL_CHECK", "yes")
    text = "HYPER_PARALLEL_CHECK must be 0 or 1, but got HYPER_PARALLEL_CHECK='yes'"
    with pytest.raises(BackendError, match=text):
        simulate(1).run(init_device_mesh, "cpu", (1,))


def test_simulated_ranks_check_by_themselves():
    def run():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"), check=True)
        return [type(m.communicator(0)) is CheckedCommunicator for m in (mesh, mesh["tp"])]

    assert simulate(2).run(run) == [[False, False]] * 2


def test_a_call_is_told_as_it_was_made():
    call = Call.of("all_reduce", op="sum", shape=(4, 2))
    said = Said.unpacked(Said(call, "train.py:7", "module 'mlp'").packed())
    assert str(said) == "all_reduce(op=sum, shape=(4, 2)) at train.py:7 in module 'mlp'"


def model_of(mesh):
    model = nn.Sequential(nn.Linear(2, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    plan = {"0": ColwiseParallel(), "1.1": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


@pytest.mark.parametrize("backward", [False, True])
def test_a_deadlock_names_the_module(backward):
    def run():
        model = model_of(init_device_mesh("cpu", (2,)))
        x = torch.ones(3, 2, requires_grad=True)
        if backward:
            loss = model(x).sum()
            return loss.backward() if current_rank() else "left"
        return model(x) if current_rank() else "left"

    left, error = simulate(2).outcomes(run)
    assert left == "left"
    where = "ColwiseParallel on '0'" if backward else "RowwiseParallel on '1.1'"
    assert f" in {where}" in str(error)
    assert "waiting in all_reduce(op=sum, shape=(3, 2), dtype=float32) over ranks (0, 1)" in str(
        error
    )


def test_a_rank_that_fails_is_named_with_the_module_of_those_that_waited():
    class Head(nn.Module):
        def __init__(self, comm):
            super().__init__()
            self.comm = comm

        def forward(self, x):
            return self.comm.all_reduce(x)

    def run():
        model = nn.ModuleDict({"head": Head(init_device_mesh("cpu", (2,)).communicator(0))})
        if current_rank() == 1:
            raise ValueError("no data")
        outer = nn.Module()
        outer.inner = model
        outer.forward = lambda x: model["head"](x)
        return outer(torch.ones(2))

    error, failed = simulate(2).outcomes(run)
    assert str(failed) == "no data"
    assert "rank 1=ValueError('no data')" in str(error)
    assert "in module 'inner.head'" in str(error)
