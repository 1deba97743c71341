# SPDX-License-Identifier: Apache-2.0
"""simulate: results, order, random states, modes, errors of one rank, and what is left behind."""

import contextvars
import random
import signal
import threading
import time
import warnings

import numpy as np
import pytest
import torch

from hyper_parallel.errors import BackendError, LayoutError
from hyper_parallel.runtime import (
    backend_for,
    current_rank,
    init_device_mesh,
    override_backend,
    simulate,
)

marker = contextvars.ContextVar("marker", default="unset")


def group():
    """Make the communicator over all simulated ranks."""
    return init_device_mesh("cpu", (backend_for("cpu").world_size(),)).communicator(0)


@pytest.fixture
def three():
    return 3


@pytest.fixture(autouse=True)
def nothing_left_behind():
    threads = threading.active_count()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    assert threading.active_count() == threads
    assert current_rank() is None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    for now, before in zip(np.random.get_state(), states[2], strict=True):
        assert np.array_equal(now, before)
    assert torch.get_default_dtype() == torch.float32


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


def draws():
    """Draw from each generator, with a switch in between."""
    comm = group()
    first = (torch.rand(2).tolist(), random.random(), np.random.random())
    comm.barrier()
    return first, (torch.rand(2).tolist(), random.random(), np.random.random())


def test_random_states_are_own_and_start_from_the_callers():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        alone = [(torch.rand(2).tolist(), random.random(), np.random.random()) for _ in range(2)]
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        assert simulate(3).run(draws) == [tuple(alone)] * 3
        assert simulate(3).run(draws) == [tuple(alone)] * 3
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def test_random_states_seeded_for_the_run_or_inside_each_rank():
    def seeded(own):
        comm = group()
        torch.manual_seed(current_rank() if own else 7)
        comm.barrier()
        return torch.nn.functional.dropout(torch.ones(64)).tolist()

    same = simulate(3).run(seeded, False)
    assert same[0] == same[1] == same[2]
    own = simulate(3).run(seeded, True)
    assert own[0] != own[1] != own[2]
    assert own == simulate(3).run(seeded, True)
    one, two = simulate(2, seed=3).run(draws), simulate(2, seed=3).run(draws)
    assert one == two and one[0] == one[1]
    assert one != simulate(2, seed=4).run(draws)


def test_an_odd_number_of_normal_draws_leaves_the_callers_spare():
    state = np.random.get_state()
    np.random.randn()
    expected = np.random.randn()
    np.random.set_state(state)
    np.random.randn()
    simulate(2).run(np.random.randn)
    assert np.random.randn() == expected
    np.random.set_state(state)


def test_default_dtype_and_warning_filters_are_own():
    def own():
        comm = group()
        rank = current_rank()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            comm.barrier()
            if rank == 1:
                torch.set_default_dtype(torch.float64)
                warnings.warn("only here", stacklevel=1)
            comm.barrier()
        warnings.simplefilter("ignore")
        return torch.ones(1).dtype, [str(one.message) for one in seen]

    filters = list(warnings.filters)
    assert simulate(3).run(own) == [
        (torch.float32, []),
        (torch.float64, ["only here"]),
        (torch.float32, []),
    ]
    assert list(warnings.filters) == filters


def test_ranks_start_with_the_callers_modes_and_context():
    def modes():
        group().barrier()
        x = torch.ones(2, 2, requires_grad=True)
        return (x @ x).requires_grad, (x @ x).dtype, torch.empty(0).device.type, marker.get()

    assert simulate(2).run(modes) == [(True, torch.float32, "cpu", "unset")] * 2
    token = marker.set("set")
    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        found = simulate(2).run(modes)
    marker.reset(token)
    assert found == [(False, torch.bfloat16, "meta", "set")] * 2
    with torch.inference_mode():
        assert simulate(2).run(lambda: torch.ones(1).is_inference()) == [True, True]


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
        found = []
        thread = threading.Thread(target=lambda: found.append(simulate(2).outcomes))
        thread.start()
        thread.join()
        with pytest.raises(BackendError, match="none inside another"):
            found[0](lambda: 0)

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
        assert simulate(2).run(inside) == [("simulated", "simulated")] * 2
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
        while True:
            if not computes:
                comm.barrier()

    def interrupt():
        time.sleep(0.2)
        signal.raise_signal(signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        simulate(3).run(endless)
    helper.join()
    assert simulate(2).run(current_rank) == [0, 1]
