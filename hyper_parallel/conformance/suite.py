# SPDX-License-Identifier: Apache-2.0
"""Run the suite: all checks, one after the other, on every rank of a world."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hyper_parallel.conformance.collectives import collective_checks
from hyper_parallel.conformance.fused import fused_checks
from hyper_parallel.conformance.here import EMULATED, FAIL, PASS, REFUSED, Check, Here
from hyper_parallel.conformance.moves import move_checks
from hyper_parallel.conformance.report import Report, Result
from hyper_parallel.conformance.training import training_checks
from hyper_parallel.conformance.worlds import Tell, in_a_world, run_on_ranks
from hyper_parallel.errors import HyperParallelError, near_names
from hyper_parallel.runtime import backend_for

__all__ = ["all_checks", "run_conformance"]

_RANKS = 2


def all_checks() -> list[Check]:
    """List every check of the suite, in the order they run."""
    return [*collective_checks(), *move_checks(), *fused_checks(), *training_checks()]


def run_conformance(
    backend: str = "cpu",
    *,
    world: str | None = None,
    ranks: int | None = None,
    only: Sequence[str] | None = None,
) -> Report:
    """Run the suite on a backend and give what came out.

    Args:
        backend: the device type, built in or an entry point of "hyper_parallel.backends".
        world: "here": this process is a rank, started by torchrun or the like, and so do all others
            call this; "processes": start them on this machine; "simulated": threads. Default:
            "here" under torchrun and where one process is all ranks, else "processes".
        ranks: how many; default 2, and "here" those that were started.
        only: ids or groups of the checks to run; default all.

    Returns:
        The results. A check that failed on any rank is a failure.

    Communicates:
        Everything that a backend can.

    Raises:
        BackendError: the backend cannot be used here, or a process died.
        HyperParallelError: `only` names no check.

    Example:
        >>> from hyper_parallel.conformance import run_conformance, table
        >>> report = run_conformance("cpu", world="simulated", only=["all_reduce", "exchange"])
        >>> for row in table([report]):
        ...     print(row)
        ('checks', 'cpu, 2 ranks, simulated')
        ('all_reduce', '47 pass, 18 refused by design')
        ('exchange', '2 pass')
    """
    if backend_for(backend).capabilities.all_ranks:
        world = "here"
    world = world or ("here" if in_a_world() else "processes")
    size = int(os.environ["WORLD_SIZE"]) if world == "here" and in_a_world() else ranks or _RANKS
    ids = [check.id for check in _chosen(only)]
    every = run_on_ranks(_run, backend, size, ids, world=world, ranks=size, device_type=backend)
    worst = [_worst(results) for results in zip(*every, strict=True)]
    return Report(backend, world, size, tuple(worst))


def _chosen(only: Sequence[str] | None) -> list[Check]:
    checks = all_checks()
    if only is None:
        return checks
    known = {name for check in checks for name in (check.id, check.group)}
    unknown = next((name for name in only if name not in known), None)
    if unknown is not None:
        near = near_names(unknown, sorted(known))
        raise HyperParallelError(
            "run_conformance",
            "only must name checks or groups of checks",
            f"Name one of {near}, say",
            only=unknown,
        )
    return [check for check in checks if check.id in only or check.group in only]


def _run(device_type: str, world_size: int, ids: list[str], tell: Tell) -> list[Result]:
    """Run checks on this rank; the ranks agree on each result before they go on."""
    here = Here(device_type, world_size)
    checks = {check.id: check for check in all_checks()}
    results: list[Result] = []
    for number, name in enumerate(ids):
        tell(name)
        result = _run_one(checks[name], here)
        results.append(result)
        bad = result.status == FAIL
        if here.capabilities.all_ranks:
            continue
        try:
            others = here.comm.all_gather_ints([number, int(bad)])
        except HyperParallelError as error:
            lost = f"the ranks lost each other in {name}: {error}"
            left = [checks[other] for other in ids[number:]]
            return [*results[:-1], *(Result(c.group, c.case, FAIL, lost) for c in left)]
        if not bad and any(failed for _, failed in others):
            results[-1] = Result(result.group, result.case, FAIL, "it failed on another rank")
    return results


def _run_one(check: Check, here: Here) -> Result:
    def result(status: str, detail: str = "") -> Result:
        return Result(check.group, check.case, status, detail)

    if check.needs_rank and here.capabilities.all_ranks:
        return result("", "one process is all ranks: there are no collectives")
    expected = check.expects(here)
    if expected not in (PASS, EMULATED, REFUSED):
        return result("", expected)
    try:
        check.run(here)
    except HyperParallelError as error:
        return result(REFUSED if expected == REFUSED else FAIL, str(error))
    except Exception as error:
        return result(FAIL, f"{type(error).__name__}: {error}")
    if expected == REFUSED:
        return result(FAIL, "it must be refused, as the capabilities say, and was not")
    return result(expected)


def _worst(results: Sequence[Result]) -> Result:
    """Give a failure that says why, if there is one; else the first."""
    failed = [one for one in results if one.status == FAIL]
    telling = [one for one in failed if one.detail != "it failed on another rank"]
    return next(iter([*telling, *failed, *results]))
