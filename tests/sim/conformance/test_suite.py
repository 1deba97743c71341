# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on simulated ranks: it passes, and it finds each kind of wrong backend."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from hyper_parallel import BackendError, HyperParallelError
from hyper_parallel.backends._torch import refusals, simulated
from hyper_parallel.backends._torch.simulated_collectives import (
    SimulatedCommunicator,
    SimulatedWork,
)
from hyper_parallel.backends.numpy import NumpyBackend
from hyper_parallel.cli import main
from hyper_parallel.conformance import (
    FAIL,
    PASS,
    REFUSED,
    all_checks,
    run_conformance,
    suite,
    table,
)
from hyper_parallel.conformance.worlds import run_on_ranks
from support import conformance_table
from support.stepwise import Stepwise, give_kernels


def run(*only, ranks=2):
    return run_conformance("cpu", world="simulated", ranks=ranks, only=only or None)


@pytest.mark.parametrize("ranks", [4, 1])
def test_simulated_ranks_conform(ranks):
    report = run(ranks=ranks)
    assert report.failures == ()
    assert len(report.results) == len(all_checks())
    assert {result.status for result in report.results} >= {PASS, REFUSED}
    alone = [result.detail for result in report.results if not result.status]
    absent = "the simulated backend has no such kernel"
    assert alone == (["it takes more than one rank"] * 10 if ranks == 1 else [absent] * 3)


def test_ids_are_unique():
    ids = [check.id for check in all_checks()]
    assert len(set(ids)) == len(ids)


REAL = SimulatedCommunicator


class Sorted(REAL):
    """Gathers by rank number, not in group order."""

    def all_gather(self, x, *, async_op=False):
        parts = super().all_gather(x).chunk(self.size)
        order = sorted(range(self.size), key=lambda i: self.ranks[i])
        result = torch.cat([parts[i] for i in order])
        return SimulatedWork(result) if async_op else result


class AlwaysSum(REAL):
    """Knows only sums."""

    def all_reduce(self, x, op="sum", *, async_op=False):
        return super().all_reduce(x, "sum" if op == "max" else op, async_op=async_op)


class Early(REAL):
    """Hands out an asynchronous result before it is there."""

    def reduce_scatter(self, x, op="sum", *, async_op=False):
        before = x.clone()
        result = super().reduce_scatter(x, op)
        return SimulatedWork(before[: len(result)]) if async_op else result


class Bytes(REAL):
    """Adds bools as bytes."""

    def all_reduce(self, x, op="sum", *, async_op=False):
        if x.dtype == torch.bool and op == "sum":
            super().all_reduce(x.view(torch.uint8), "sum")
            return SimulatedWork(x) if async_op else x
        return super().all_reduce(x, op, async_op=async_op)


class Upcast(REAL):
    """Answers in another dtype."""

    def reduce_scatter(self, x, op="sum", *, async_op=False):
        result = super().reduce_scatter(x, op)
        result = result.float() if x.dtype == torch.bfloat16 else result
        return SimulatedWork(result) if async_op else result


class Swapped(REAL):
    """Delivers the parts of an exchange in the wrong order."""

    def all_to_all_v(self, x, send_sizes, recv_sizes, *, even=False, async_op=False):
        parts = super().all_to_all_v(x, send_sizes, recv_sizes).split(list(recv_sizes))
        result = torch.cat(parts[::-1])
        return SimulatedWork(result) if async_op else result


class Older(REAL):
    """Lacks a parameter that the protocol has."""

    def all_gather_v(self, x, sizes):
        return super().all_gather_v(x, sizes)


class FirstOnly(REAL):
    """Broadcasts and scatters from the first rank, whoever is asked for."""

    def broadcast(self, x, src=0):
        return super().broadcast(x, 0)

    def scatter(self, out, pieces, src=0):
        result = super().scatter(out, pieces, src)
        return super().broadcast(result, 0)


class Truncated(REAL):
    """Loses the upper half of host integers, and pads nothing."""

    def all_gather_ints(self, values):
        wrap = (int(value) % 2**32 for value in values)
        return super().all_gather_ints(list(wrap))

    def all_gather_v(self, x, sizes, *, async_op=False):
        result = super().all_gather_v(x, sizes).flip(0)
        return SimulatedWork(result) if async_op else result

    def reduce_scatter_v(self, x, sizes, op="sum", *, async_op=False):
        result = super().reduce_scatter_v(x, sizes, op) * 1.5
        return SimulatedWork(result) if async_op else result


WRONG = {
    Sorted: {"all_gather", "sub-groups", "redistribute[S(0) -> R]", "training step[MLP]"},
    AlwaysSum: {"all_reduce", "redistribute[P(max) -> R]"},
    Early: {"reduce_scatter"},
    Bytes: {"all_reduce"},
    Upcast: {"reduce_scatter"},
    Swapped: {"all_to_all", "sub-groups", "redistribute[S(0) -> S(1)]"},
    Older: {"interface", "uneven all_gather"},
    FirstOnly: {"broadcast", "scatter", "sub-groups"},
    Truncated: {"exchange", "uneven all_gather", "uneven reduce_scatter"},
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_communicator_fails_where_it_is_wrong(monkeypatch, kind):
    monkeypatch.setattr(simulated, "SimulatedCommunicator", kind)
    failures = run(*WRONG[kind], ranks=4).failures
    assert {one.group for one in failures} == {name.partition("[")[0] for name in WRONG[kind]}


class Unordered(Stepwise):
    """Gathers and spreads rows in another order."""

    def __call__(self, x, w):
        made = super().__call__(x, w)
        return made.flip(0) if isinstance(made, torch.Tensor) else (made[0], made[1].flip(0))


@pytest.mark.parametrize("kernel", [Stepwise, Unordered])
def test_fused_matmuls_are_checked_where_there_are_some(monkeypatch, kernel):
    give_kernels(monkeypatch, kernel)
    expected = FAIL if kernel is Unordered else PASS
    assert {one.status for one in run("fused matmul", ranks=3).results} == {expected}


def test_a_wrong_move_of_all_ranks_fails(monkeypatch):
    def unmoved(local_arrays, src, dst):
        return moved(local_arrays, src, dst if dst.is_replicated else src)

    moved = NumpyBackend.redistribute
    monkeypatch.setattr(NumpyBackend, "redistribute", staticmethod(unmoved))
    failures = run_conformance("numpy", ranks=3).failures
    assert {"S(0) -> S(1)", "R -> S(0)"} <= {one.case for one in failures}
    assert not {"S(0) -> R", "P(sum) -> R"} & {one.case for one in failures}


def test_what_is_not_refused_fails(monkeypatch):
    monkeypatch.setattr(refusals, "wrong_tensor", lambda *_: None)
    (failure,) = run("refusals").failures
    assert (failure.case, failure.detail) == (
        "not contiguous",
        "AssertionError: nothing was refused",
    )


@pytest.mark.parametrize("lie", ["too much", "too little"])
def test_capabilities_that_lie_fail(monkeypatch, lie):
    true = simulated.REDUCES
    pair = {("avg", "int64"), ("sum", "int64")}
    told = true | pair if lie == "too much" else true - pair
    made = simulated.SimulatedBackend.__init__

    def lying(self, *args):
        made(self, *args)
        self.capabilities = dataclasses.replace(self.capabilities, reduces=told)

    monkeypatch.setattr(simulated.SimulatedBackend, "__init__", lying)
    failures = run("all_reduce").failures
    assert [one.case for one in failures] == ["avg int64" if lie == "too much" else "sum int64"]


def test_a_capability_that_is_missing_makes_it_emulated(monkeypatch):
    made = simulated.SimulatedBackend.__init__

    def padding(self, *args):
        made(self, *args)
        self.capabilities = dataclasses.replace(
            self.capabilities, uneven_gather=False, native_avg=False, moves=frozenset({"float32"})
        )

    monkeypatch.setattr(simulated.SimulatedBackend, "__init__", padding)
    report = run("uneven all_gather", "all_reduce[avg float32]", "scatter", "redistribute[R -> R]")
    found = {(result.group, result.case): result.status for result in report.results}
    assert found["all_reduce", "avg float32"] == "emulated"
    assert found["uneven all_gather", "uneven float32"] == "emulated"
    assert found["scatter", "float32"] == found["redistribute", "R -> R"] == PASS
    assert found["scatter", "int8"] == "emulated"
    assert report.failures == ()


def test_the_table_counts_what_came_out_of_each_backend():
    alone = run("broadcast", "refusals", ranks=1)
    heading, *rows = table([alone, run_conformance("numpy", ranks=2, only=["broadcast"])])
    assert heading == ("checks", "cpu, 1 ranks, simulated", "numpy, 2 ranks, here")
    assert rows == [("broadcast", "13 pass", "-"), ("refusals", "4 pass", "-")]


@pytest.mark.parametrize("name", ["simulated", "numpy"])
def test_the_table_in_the_documents_is_what_comes_out(name):
    assert conformance_table.run(name).counts() == conformance_table.documented(name)


def test_the_notes_under_the_table_name_what_is_no_plain_pass():
    ops = [f"all_reduce[{op} {t}]" for t in ("float32", "int16", "uint16") for op in ("sum", "avg")]
    report = run(*ops, "all_to_all")
    *_, notes = conformance_table.markdown({"simulated": report})
    assert notes == "| simulated ranks | - | - | avg of int16; sum, avg of uint16 |"


def test_the_command_line_runs_the_suite(monkeypatch, capsys):
    chosen = [check for check in all_checks() if check.group in ("exchange", "broadcast")]
    monkeypatch.setattr(suite, "all_checks", lambda: chosen)
    options = ["--no-bandwidth", "--conformance", "--world", "simulated", "--ranks=3"]
    arguments = ["doctor", "--backend", "cpu", *options]
    assert main(arguments) == 0
    assert "cpu, 3 ranks, simulated" in capsys.readouterr().out
    monkeypatch.setattr(simulated, "SimulatedCommunicator", FirstOnly)
    assert main(arguments) == 1
    text = "PROBLEM cpu, 3 ranks, simulated: broadcast[float64] failed: AssertionError: "
    assert text in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["conformance"]
    assert {one["status"] for one in found["results"]} == {PASS, FAIL}


def test_a_check_that_does_not_exist_is_refused():
    with pytest.raises(HyperParallelError) as caught:
        run("all_re")
    assert str(caught.value).startswith(
        "run_conformance: only must name checks or groups of checks, but got only='all_re'. Name"
        " one of ['all_reduce', "
    )


def test_a_world_that_does_not_exist_is_refused():
    with pytest.raises(BackendError, match=r"world must be one of .* but got world='moon'"):
        run_on_ranks(print, world="moon", ranks=2, device_type="cpu")
