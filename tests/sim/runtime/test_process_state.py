# SPDX-License-Identifier: Apache-2.0
"""What processes have for themselves and simulated ranks must, too: random states and modes."""

import contextvars
import random
import threading
import time
import warnings

import numpy as np
import pytest
import torch

from hyper_parallel.runtime import backend_for, baton, current_rank, init_device_mesh, simulate
from support.device import DEVICE

marker = contextvars.ContextVar("marker", default="unset")


def group():
    """Make the communicator over all simulated ranks."""
    return init_device_mesh("cpu", (backend_for("cpu").world_size,)).communicator(0)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    for now, before in zip(np.random.get_state(), states[2], strict=True):
        assert np.array_equal(now, before)
    assert torch.get_default_dtype() == torch.float32


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


class _SlowLock:
    """A lock whose owner is held up just after it lets go, as on a loaded machine."""

    def __init__(self):
        self.lock = threading.Lock()
        self.lock.acquire()
        self.acquire = self.lock.acquire

    def release(self):
        self.lock.release()
        time.sleep(0.02)


def test_random_states_are_own_however_slowly_threads_hand_over(monkeypatch):
    monkeypatch.setattr(baton, "_taken_lock", _SlowLock)

    def draw():
        comm = group()
        torch.manual_seed(current_rank())
        drawn = []
        for _ in range(3):
            comm.barrier()
            drawn.append(torch.rand(()).item())
        return drawn

    for rank, drawn in enumerate(simulate(2).run(draw)):
        alone = torch.Generator("cpu").manual_seed(rank)
        assert drawn == [torch.rand((), generator=alone, device="cpu").item() for _ in range(3)]


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

    assert simulate(2).run(modes) == [(True, torch.float32, DEVICE, "unset")] * 2
    token = marker.set("set")
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        found = simulate(2).run(modes)
    marker.reset(token)
    assert found == [(False, torch.bfloat16, DEVICE, "set")] * 2
    with torch.device("meta"):
        assert simulate(2).run(lambda: torch.empty(0).device.type) == ["meta", "meta"]
    with torch.inference_mode():
        assert simulate(2).run(lambda: torch.ones(1).is_inference()) == [True, True]
