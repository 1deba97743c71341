# SPDX-License-Identifier: Apache-2.0
"""simulate: results, order, errors of one rank, nesting, and what is left behind."""

import functools
import os
import random
import signal
import sys
import threading
import time

import pytest
import torch

from hyper_parallel.errors import BackendError, LayoutError
from hyper_parallel.runtime import (
    backend_for,
    baton,
    current_rank,
    init_device_mesh,
    override_backend,
    simulate,
)


def group():
    """Make the communicator over all simulated ranks."""
    return init_device_mesh("cpu", (backend_for("cpu").world_size,)).communicator(0)


@pytest.fixture
def three():
    return 3


@pytest.fixture(autouse=True)
def nothing_left_behind():
    threads = threading.active_count()
    yield
    assert threading.active_count() == threads
    assert current_rank() is None


def test_run_gives_results_in_rank_order():
    assert simulate(3).run(lambda a, *, b: (current_rank(), a, b), 1, b=2) == [
        (0, 1, 2),
        (1, 1, 2),
        (2, 1, 2),
    ]


def test_decorator_keeps_signature_and_gives_none_for_nothing():
    @simulate(2)
    def run(a, b=1):
        """Say something."""
        return None if a is None else a + b

    assert run.__doc__ == "Say something."
    assert run(1) == [2, 2]
    assert run(None) is None


@pytest.mark.parametrize("factor", [1, 2])
@simulate(2)
def test_decorator_on_a_test_with_fixtures(three, factor, tmp_path):
    assert three * factor in (3, 6)
    assert tmp_path.is_dir()
    assert current_rank() in (0, 1)


class TestMethods:
    @simulate(2)
    def test_decorator_on_a_method(self, three):
        assert type(self) is TestMethods and three == 3


def test_ranks_run_in_rank_order_between_collectives():
    def course(log):
        comm = group()
        for step in range(3):
            log.append((step, current_rank()))
            comm.barrier()

    for _ in range(2):
        log: list[tuple[int, int]] = []
        simulate(4).run(course, log)
        assert log == [(step, rank) for step in range(3) for rank in range(4)]


def test_many_small_runs():
    def step():
        return group().all_reduce(torch.ones(2)).tolist()

    for _ in range(300):
        assert simulate(4).run(step) == [[4.0, 4.0]] * 4


def test_one_rank_and_many_ranks():
    assert simulate(1).run(lambda: group().all_reduce(torch.ones(1)).item()) == [1.0]
    assert set(simulate(64).run(lambda: group().all_reduce(torch.ones(1)).item())) == {64.0}


def fails_on(rank, error):
    comm = group()
    if current_rank() == rank:
        raise error
    try:
        comm.all_reduce(torch.ones(1))
    except Exception:
        pytest.fail("a released rank must not see an ordinary exception")


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_an_error_in_one_rank_releases_the_others(rank):
    error = ValueError("mine")
    started = time.perf_counter()
    with pytest.raises(ValueError, match="mine") as caught:
        simulate(4).run(fails_on, rank, error)
    assert caught.value is error
    assert f"on rank {rank} of 4" in error.__notes__
    assert time.perf_counter() - started < 1


def test_a_skip_in_one_rank_skips():
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        simulate(2).run(lambda: pytest.skip("no such device"))


def test_the_lowest_of_equal_errors_is_raised():
    def all_fail():
        comm = group()
        if current_rank() < 2:
            comm.barrier()
        raise ValueError("same")

    def fail_by_turns():
        comm = group()
        if current_rank() == 2:
            raise KeyError("first")
        comm.barrier()

    with pytest.raises(ValueError, match="same") as caught:
        simulate(3).run(all_fail)
    assert caught.value.__notes__ == ["on rank 2 of 3"]
    with pytest.raises(ValueError, match="same") as caught:
        simulate(3).run(lambda: (_ for _ in ()).throw(ValueError("same")))
    assert caught.value.__notes__ == ["on rank 0 of 3"]
    with pytest.raises(KeyError, match="first"):
        simulate(3).run(fail_by_turns)


def test_outcomes_gives_each_rank_its_own():
    def refused():
        group()
        raise LayoutError(f"rank {current_rank()}")

    assert [str(one) for one in simulate(2).outcomes(refused)] == ["rank 0", "rank 1"]
    assert simulate(2).outcomes(lambda: current_rank()) == [0, 1]


def test_outcomes_lets_independent_ranks_go_on():
    def half():
        mesh = init_device_mesh("cpu", (2, 2))
        if current_rank() == 0:
            raise ValueError("mine")
        return mesh.communicator(1).all_reduce(torch.ones(1)).item()

    first, second, third, fourth = simulate(4).outcomes(half)
    assert isinstance(first, ValueError)
    assert (third, fourth) == (2.0, 2.0)
    assert isinstance(second, BackendError) and second.__cause__ is first
    text = str(second)
    assert text.startswith(
        "simulate: a rank that others wait for must not fail, but got rank 0=ValueError('mine')."
        " Look at rank 0's error; this rank waited in all_reduce(op=sum, shape=(1,),"
        " dtype=float32) over ranks (0, 1) at "
    )


def test_simulations_do_not_nest():
    def nested():
        return simulate(2).run(lambda: 0)

    with pytest.raises(BackendError, match="only one simulation may run in a process at a time"):
        simulate(2).run(nested)

    def in_a_thread():
        refused = []

        def inner():
            with pytest.raises(BackendError, match="none inside another") as caught:
                simulate(2).outcomes(lambda: 0)
            refused.append(caught.value)

        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()
        assert refused

    simulate(1).run(in_a_thread)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, len])
def test_simulate_refuses_a_wrong_world_size(size):
    with pytest.raises(BackendError, match="world_size must be a positive int"):
        simulate(size)


def test_the_backend_is_simulated_inside_only():
    def inside():
        return backend_for("cuda").name, backend_for("cpu").name

    outer = object()
    with override_backend(outer):
        assert simulate(2, device_type="cpu").run(inside) == [("simulated", "simulated")] * 2
        assert backend_for("cpu") is outer


def test_a_mesh_is_of_no_use_after_its_run():
    mesh = simulate(1).run(lambda: init_device_mesh("cpu", (1,)))[0]
    with pytest.raises(BackendError, match="only while the simulated function runs"):
        mesh.communicator(0)
    comm = simulate(2).run(group)[0]
    with pytest.raises(BackendError, match="in the run that made the mesh"):
        comm.barrier()
    with pytest.raises(BackendError, match="in the run that made the mesh"):
        simulate(2).run(comm.barrier)


@pytest.mark.parametrize("computes", [False, True])
def test_an_interrupt_ends_all_ranks(computes):
    def endless():
        comm = group()
        comm.barrier()
        if current_rank() == 0:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            if not computes:
                comm.barrier()

    with pytest.raises(KeyboardInterrupt):
        simulate(3).run(endless)
    assert simulate(2).run(current_rank) == [0, 1]


def test_a_rank_that_cannot_be_interrupted_leaves_the_process_alone(monkeypatch):
    monkeypatch.setattr(baton, "_GRACE_S", 0.05)
    monkeypatch.setattr(baton, "_LAST_GRACE_S", 0.05)

    def stuck():
        if current_rank() == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return random.random()

    with pytest.raises(KeyboardInterrupt):
        simulate(2).run(stuck)
    random.seed(5)
    state = random.getstate()
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(10)
            assert not thread.is_alive()
    assert random.getstate() == state


class Widths:
    """A value that ranks agree on when it is first read."""

    def __init__(self):
        self.comm = group()

    @functools.cached_property
    def total(self):
        return sum(total for (total,) in self.comm.all_gather_ints([1]))


def read_total():
    return Widths().total


@pytest.mark.parametrize("stop_early", [True, False])
def test_a_collective_inside_a_cached_property_is_an_error_or_works(monkeypatch, stop_early):
    monkeypatch.setattr(baton, "_LOOK_EVERY_S", 0.05)
    if sys.version_info >= (3, 12):  # the property has no lock
        assert simulate(3).run(read_total) == [3] * 3
        return
    text = (
        "simulate: a rank must not communicate inside the cached_property 'total', but got"
        " rank inside=0, rank that waits for its lock=1. Compute the value before, or use"
        " Python 3.12, where such a property has no lock."
    )
    if stop_early:
        with pytest.raises(BackendError) as caught:
            simulate(3).run(read_total)
        assert str(caught.value) == text
    else:
        first, *others = simulate(3).outcomes(read_total)
        assert str(first) == text
        assert all("a rank that others wait for must not fail" in str(one) for one in others)
    assert simulate(2).run(current_rank) == [0, 1]
