# SPDX-License-Identifier: Apache-2.0
"""Ranks that disagree: deadlocks and mismatches are told to every rank, with who waits where."""

import inspect
import re

import pytest
import torch

from hyper_parallel.errors import BackendError
from hyper_parallel.runtime import DeviceMesh, current_rank, init_device_mesh, simulate
from support.device import DEVICE


def line_of(fn, text):
    """Name the one line of a function that holds a text, as an error does."""
    lines, start = inspect.getsourcelines(fn)
    (found,) = (start + i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{found}"


def told(outcomes):
    """Check that all ranks got a BackendError of the same text, and give that."""
    assert all(type(one) is BackendError for one in outcomes), outcomes
    (text,) = {str(one) for one in outcomes}
    return text


MUST = "simulate: every rank of a group must come to the group's collective, but got "
FIX = ". Make all ranks of each group call the same collectives in the same order."


def crossed():
    mesh = init_device_mesh(DEVICE, (2, 2))
    axes = (0, 1) if current_rank() in (0, 3) else (1, 0)
    mesh.communicator(axes[0]).all_reduce(torch.ones(2))  # crossed
    mesh.communicator(axes[1]).all_reduce(torch.ones(2))


def test_deadlock_of_crossed_groups():
    call = "waiting in all_reduce(op=sum, shape=(2,), dtype=float32) over ranks"
    at = f"at {line_of(crossed, '# crossed')}"
    assert told(simulate(4).outcomes(crossed)) == (
        f"{MUST}rank 0={call} (0, 2) {at}, rank 1={call} (0, 1) {at}, "
        f"rank 2={call} (2, 3) {at}, rank 3={call} (1, 3) {at}{FIX}"
    )


def test_deadlock_of_two_meshes_on_the_same_ranks():
    def meshes_crossed():
        one, other = (init_device_mesh(DEVICE, (2,)).communicator(0) for _ in range(2))
        first, second = (one, other) if current_rank() == 0 else (other, one)
        first.barrier()
        second.barrier()

    assert told(simulate(2).outcomes(meshes_crossed)).startswith(
        f"{MUST}ranks 0, 1=waiting in barrier() over ranks (0, 1) at "
    )


def returns_early():
    comm = init_device_mesh(DEVICE, (3,)).communicator(0)
    if current_rank() == 1:
        return "early"
    return comm.all_gather(torch.ones(1, dtype=torch.int64))  # waits


def test_deadlock_of_an_early_return():
    first, early, third = simulate(3).outcomes(returns_early)
    assert early == "early"
    assert told([first, third]) == (
        f"{MUST}ranks 0, 2=waiting in all_gather(shape=(1,), dtype=int64) over ranks (0, 1, 2) "
        f"at {line_of(returns_early, '# waits')}, rank 1=ended{FIX}"
    )
    with pytest.raises(BackendError, match=re.escape("rank 1=ended")) as caught:
        simulate(3).run(returns_early)
    assert caught.value.__notes__ == ["on rank 0 of 3"]


def only_some_make_the_mesh():
    if current_rank() != 2:
        DeviceMesh(DEVICE, [0, 1])  # makes


def test_deadlock_of_a_rank_that_does_not_make_the_mesh():
    outcomes = simulate(3).outcomes(only_some_make_the_mesh)
    assert told(outcomes[:2]) == (
        f"{MUST}ranks 0, 1=waiting in DeviceMesh(device_type={DEVICE}, shape=(2,), ranks=(0, 1), "
        f"names=None) over ranks (0, 1, 2) at {line_of(only_some_make_the_mesh, '# makes')}, "
        f"rank 2=ended{FIX}"
    )


def test_deadlock_of_a_group_in_another_order():
    def ordered():
        mesh = init_device_mesh(DEVICE, (2,))
        baton = mesh.communicator(0)._baton
        from hyper_parallel.runtime.calls import Call

        return baton.exchange((0, 1) if current_rank() == 0 else (1, 0), Call("meet"))

    text = told(simulate(2).outcomes(ordered))
    assert "rank 0=waiting in meet() over ranks (0, 1)" in text
    assert "rank 1=waiting in meet() over ranks (1, 0)" in text


def test_a_deadlock_may_be_caught_and_the_run_go_on():
    def caught():
        comm = init_device_mesh(DEVICE, (2,)).communicator(0)
        if current_rank() == 0:
            with pytest.raises(BackendError, match="rank 1=ended"):
                comm.barrier()
        return "on"

    assert simulate(2).run(caught) == ["on", "on"]


X = torch.ones(4, 2)


def odd_call(comm, *, case):
    """Call what the odd rank calls."""
    return {
        "collective": lambda: comm.all_gather(X.clone()),
        "op": lambda: comm.all_reduce(X.clone(), "max"),
        "shape": lambda: comm.all_reduce(torch.ones(2, 4)),
        "dtype": lambda: comm.all_reduce(X.int()),
    }[case]()


SAYS = {
    "collective": "all_gather(shape=(4, 2), dtype=float32)",
    "op": "all_reduce(op=max, shape=(4, 2), dtype=float32)",
    "shape": "all_reduce(op=sum, shape=(2, 4), dtype=float32)",
    "dtype": "all_reduce(op=sum, shape=(4, 2), dtype=int32)",
}


def mismatched(case):
    comm = DeviceMesh(DEVICE, [2, 0, 1]).communicator(0)
    if current_rank() == 1:
        return odd_call(comm, case=case)  # odd
    return comm.all_reduce(X.clone())  # common


@pytest.mark.parametrize("case", SAYS)
def test_mismatch_is_named_on_every_rank(case):
    odd = line_of(odd_call, f'"{case}":')
    assert told(simulate(3).outcomes(mismatched, case)) == (
        "simulate: every rank of the group (2, 0, 1) must make the same call, but got "
        "rank 2=all_reduce(op=sum, shape=(4, 2), dtype=float32) at "
        f"{line_of(mismatched, '# common')}, rank 1={SAYS[case]} at {odd}. "
        f"Make ranks 2 and 1 agree on the {case}."
    )


MISMATCHES = {
    "mesh": lambda r, comm: init_device_mesh(DEVICE, (2, 1) if r else (1, 2)),
    "src": lambda r, comm: comm.broadcast(X.clone(), src=r),
    "sizes": lambda r, comm: comm.all_gather_v(torch.ones(2, 2), [2, 2] if r else [2, 1]),
    "rest": lambda r, comm: comm.all_gather_v(torch.ones(2, 1 + r), [2, 2]),
    "count": lambda r, comm: comm.all_gather_ints([1] * (1 + r)),
    "barrier": lambda r, comm: comm.barrier() if r else comm.all_gather_ints([]),
    "rows": lambda r, comm: comm.reduce_scatter(torch.ones(2 + 2 * r, 1)),
    "rows_v": lambda r, comm: comm.reduce_scatter_v(torch.ones(3), [1, 2] if r else [2, 1]),
    "out": lambda r, comm: comm.scatter(torch.ones(1 + r), None if r else [X, X]),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch_of_every_collective_is_refused_on_both_ranks(case):
    def run():
        rank = current_rank()
        return MISMATCHES[case](rank, init_device_mesh(DEVICE, (2,)).communicator(0))

    assert "must make the same call" in told(simulate(2).outcomes(run))


CROSS_CHECKS = {
    "sizes": (
        lambda r, comm: comm.all_to_all_v(torch.ones(3), [1, 2], [1, 1] if r else [1, 2]),
        "all_to_all_v: rank 1 must expect from rank 0 what that rank sends, but got sent=2, "
        "expected=1",
    ),
    "nobody": (
        lambda r, comm: comm.scatter(torch.ones(1), None),
        "scatter: the rank at group index 0, and only it, must pass the pieces",
    ),
    "another": (
        lambda r, comm: comm.scatter(torch.ones(1), [torch.ones(1)] * 2),
        "scatter: the rank at group index 0, and only it, must pass the pieces",
    ),
    "pieces": (
        lambda r, comm: comm.scatter(torch.ones(1), None if r else [torch.ones(2)] * 2),
        "scatter: src must pass 2 pieces of out's shape and dtype, but got src=0, "
        "pieces=[(2,), (2,)], out=(1,)",
    ),
}


@pytest.mark.parametrize("case", CROSS_CHECKS)
def test_what_only_the_group_can_see_is_refused_on_both_ranks(case):
    call, text = CROSS_CHECKS[case]

    def run():
        return call(current_rank(), init_device_mesh(DEVICE, (2,)).communicator(0))

    assert text in told(simulate(2).outcomes(run))


def test_a_mismatch_may_be_caught_and_the_run_go_on():
    def caught():
        comm = init_device_mesh(DEVICE, (2,)).communicator(0)
        with pytest.raises(BackendError, match="agree on the shape"):
            comm.all_reduce(torch.ones(1 + current_rank()))
        return comm.all_reduce(torch.ones(1)).item()

    assert simulate(2).run(caught) == [2.0, 2.0]
