# SPDX-License-Identifier: Apache-2.0
"""A rank that leaves, is late or calls something else: what the other processes are told, and when.

The cases run side by side, once; each test looks at one. The seconds are printed (pytest -s).
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import (
    BackendError,
    ColwiseParallel,
    DeviceMesh,
    RowwiseParallel,
    init_device_mesh,
    parallelize_module,
)
from support.forks import Ended, run_forked

TIMEOUT = 2  # of the process group, in seconds
# A roll call takes two seconds more; the rest is a busy machine.
SOON, IN_TIME = 2 + 4, TIMEOUT + 2 + 6
X = torch.ones(4, 2)


def start(world_size: int, check: bool) -> DeviceMesh:
    """Make a mesh of the whole world, and use its group once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",), check=check)
    mesh.communicator(0).barrier()
    return mesh


def told(call) -> tuple[float, str]:
    """Give the seconds until an error came, and its text."""
    since = time.monotonic()
    try:
        call()
    except BackendError as error:
        return time.monotonic() - since, str(error)
    return time.monotonic() - since, "no error"


def leaves(rank: int, world_size: int, which: int, check: bool):
    """Rank `which` ends without a word."""
    comm = start(world_size, check).communicator(0)
    if rank == which:
        os._exit(9)
    return told(lambda: comm.all_reduce(X.clone()))


def leaves_before_wait(rank: int):
    """Rank 1 ends; the others have started an asynchronous collective."""
    comm = start(3, False).communicator(0)
    if rank == 1:
        os._exit(9)
    return told(lambda: comm.all_gather(X, async_op=True).wait())


def never_comes(rank: int):
    """Rank 2 is busy elsewhere until long after the timeout."""
    comm = start(3, False).communicator(0)
    if rank == 2:
        time.sleep(TIMEOUT + 3)
        return "elsewhere"
    return told(lambda: comm.broadcast(X.clone(), 2))


def comes_late(rank: int):
    """Rank 1 comes when the others are already calling the roll."""
    comm = start(3, False).communicator(0)
    if rank == 1:
        time.sleep(TIMEOUT + 0.7)
    return told(lambda: comm.all_reduce(X.clone()))


def unlike(rank: int, case: str, check: bool):
    """Rank 2 calls something else."""
    comm = start(3, check).communicator(0)
    odd = rank == 2
    calls = {
        "collective": lambda: comm.all_gather(X) if odd else comm.barrier(),
        "op": lambda: comm.all_reduce(X.clone(), "max" if odd else "sum"),
        "shape": lambda: comm.all_reduce(torch.ones(8, 2) if odd else X.clone()),
        "dtype": lambda: comm.all_reduce(X.int() if odd else X.clone()),
        "src": lambda: comm.broadcast(X.clone(), 2 if odd else 0),
        "parts": lambda: comm.all_to_all_v(torch.ones(3), [1] * 3, [2, 1, 1] if odd else [1] * 3),
    }
    return told(calls[case])


def in_a_model(rank: int, backward: bool):
    """Rank 1 ends before the forward, or the backward, of a model."""
    mesh = start(2, False)
    model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))})
    plan = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    x = X.clone().requires_grad_()

    def forward() -> torch.Tensor:
        return model["mlp"](x).sum()

    loss = forward() if backward else None
    if rank == 1:
        os._exit(9)
    return told(forward if loss is None else loss.backward)


CASES = {
    "leaves": ("leaves", 4, [4, 1, False]),
    "store leaves": ("leaves", 3, [3, 0, False]),
    "leaves, checked": ("leaves", 3, [3, 2, True]),
    "leaves before wait": ("leaves_before_wait", 3, []),
    "never comes": ("never_comes", 3, []),
    "comes late": ("comes_late", 3, []),
    "forward": ("in_a_model", 2, [False]),
    "backward": ("in_a_model", 2, [True]),
    "plain collective": ("unlike", 3, ["collective", False]),
    "plain shape": ("unlike", 3, ["shape", False]),
    "plain op": ("unlike", 3, ["op", False]),
    **{c: ("unlike", 3, [c, True]) for c in ("collective", "op", "shape", "dtype", "src", "parts")},
}


@pytest.fixture(scope="module")
def ended() -> dict[str, list[Ended]]:
    """Run all cases; give how the ranks of each ended."""
    return dict(zip(CASES, run_forked(__file__, list(CASES.values())), strict=True))


def errors(case: str, ranks: list[Ended], within: float) -> dict[int, str]:
    """Give the errors by rank, having checked that they came in time."""
    found = {rank: one.result for rank, one in enumerate(ranks) if isinstance(one.result, list)}
    print(f"{case}: seconds until each rank had its error", {r: s for r, (s, _) in found.items()})
    assert all(seconds < within for seconds, _ in found.values())
    return {rank: text for rank, (_, text) in found.items()}


MUST = "every rank of the group must take part, with the same shape and dtype, but got group="


@pytest.mark.parametrize(
    ("case", "call", "group", "missing"),
    [
        # With four ranks in a ring, rank 3 is no neighbour of rank 1: it learns by the roll call.
        ("leaves", "all_reduce(op=sum, shape=(4, 2), dtype=float32)", (0, 1, 2, 3), 1),
        ("store leaves", "all_reduce(op=sum, shape=(4, 2), dtype=float32)", (0, 1, 2), 0),
        ("leaves, checked", "all_reduce(op=sum, shape=(4, 2), dtype=float32)", (0, 1, 2), 2),
        ("leaves before wait", "all_gather(shape=(4, 2), dtype=float32)", (0, 1, 2), 1),
    ],
)
def test_a_rank_that_leaves_is_named_on_every_other(ended, case, call, group, missing):
    texts = errors(case, ended[case], SOON)
    assert sorted(texts) == [rank for rank in group if rank != missing]
    name = call.partition("(")[0]
    for rank, text in texts.items():
        assert text.startswith(f"{name}: {MUST}{group}, rank={rank}, missing=({missing},), call='")
        assert f"call='{call} at {__file__}:" in text
        assert f"Look for the first error of rank {missing}: it left" in text


def test_a_rank_that_never_comes_is_named_after_the_timeout(ended):
    texts = errors("never comes", ended["never comes"], IN_TIME)
    assert sorted(texts) == [0, 1]
    for rank, text in texts.items():
        assert text.startswith(f"broadcast: {MUST}(0, 1, 2), rank={rank}, missing=(2,), call='")
        assert text.endswith("rank 2: it left, or did not come to this call.")


def test_a_rank_that_comes_late_is_named_on_all(ended):
    texts = errors("comes late", ended["comes late"], IN_TIME)
    assert sorted(texts) == [0, 1, 2]
    for text in texts.values():
        assert "missing=()" in text
        assert "All ranks came, rank 1 " in text


@pytest.mark.parametrize(
    ("case", "where"),
    [("forward", "RowwiseParallel on 'mlp.2'"), ("backward", "ColwiseParallel on 'mlp.0'")],
)
def test_the_module_is_named(ended, case, where):
    texts = errors(case, ended[case], SOON)
    assert sorted(texts) == [0]
    assert "missing=(1,)" in texts[0]
    assert "test_faults.py:" in texts[0]
    assert f" in {where}" in texts[0]


SAYS = {
    "collective": ("barrier()", "all_gather(shape=(4, 2), dtype=float32)"),
    "op": (
        "all_reduce(op=sum, shape=(4, 2), dtype=float32)",
        "all_reduce(op=max, shape=(4, 2), dtype=float32)",
    ),
    "shape": (
        "all_reduce(op=sum, shape=(4, 2), dtype=float32)",
        "all_reduce(op=sum, shape=(8, 2), dtype=float32)",
    ),
    "dtype": (
        "all_reduce(op=sum, shape=(4, 2), dtype=float32)",
        "all_reduce(op=sum, shape=(4, 2), dtype=int32)",
    ),
    "src": (
        "broadcast(src=0, shape=(4, 2), dtype=float32)",
        "broadcast(src=2, shape=(4, 2), dtype=float32)",
    ),
}


@pytest.mark.parametrize("case", SAYS)
def test_unlike_calls_are_named_on_every_rank_in_checked_mode(ended, case):
    first, odd = SAYS[case]
    texts = errors(case, ended[case], SOON)
    assert sorted(texts) == [0, 1, 2]
    (text,) = set(texts.values())
    assert text.startswith(
        f"{first.partition('(')[0]}: every rank of the group (0, 1, 2) must make the same call,"
        f" but got rank 0={first} at {__file__}:"
    )
    assert f"rank 2={odd} at {__file__}:" in text
    assert text.endswith(f"Make ranks 0 and 2 agree on the {case}.")


def test_unlike_parts_of_an_all_to_all_are_named_in_checked_mode(ended):
    texts = errors("parts", ended["parts"], SOON)
    assert sorted(texts) == [0, 1, 2]
    assert set(texts.values()) == {
        "all_to_all_v: rank 2 must expect from rank 0 what that rank sends, but got sent=1,"
        " expected=2. Compute both sizes from the same layout."
    }


def test_another_collective_is_named_after_the_timeout_without_checked_mode(ended):
    texts = errors("plain collective", ended["plain collective"], IN_TIME)
    assert sorted(texts) == [0, 1, 2]
    assert all("agree on the collective" in text for text in texts.values())


def test_a_process_that_gloo_aborts_is_named_without_checked_mode(ended):
    """What docs/faults.md says of gloo: a bigger shape aborts processes that receive it."""
    case = ended["plain shape"]
    aborted = [rank for rank, one in enumerate(case) if one.status == -signal.SIGABRT]
    texts = errors("plain shape", case, IN_TIME)
    assert aborted
    assert all("missing=(" in text for text in texts.values())


def test_unlike_ops_pass_unseen_without_checked_mode(ended):
    """What docs/faults.md says of gloo, and why tests run in checked mode."""
    assert [one.result[1] for one in ended["plain op"]] == ["no error"] * 3
