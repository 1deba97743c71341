# SPDX-License-Identifier: Apache-2.0
"""Checks of matmuls that a backend fuses with collectives, where it has such kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hyper_parallel.conformance.here import PASS, Check, Here, with_others
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.fused import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, find_fused

__all__ = ["fused_checks"]

_DTYPE = "float16"


def fused_checks() -> Iterator[Check]:
    """List the checks."""
    for kind in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE):
        yield Check("fused matmul", kind, partial(_exact, kind), partial(_served, kind))


def _numbers(seed: int, *shape: int) -> Any:
    """Give whole numbers, mostly 0, whose products and sums are exact in 16 bits."""
    return np.random.default_rng(seed).choice([-1.0, 0.0, 1.0], shape, p=[0.05, 0.9, 0.05])


def _kernel(kind: str, here: Here) -> Callable[[], Any] | str:
    mesh = DeviceMesh(here.device_type, list(range(here.world_size)))
    rows = 4 * here.world_size
    x, w = _numbers(mesh.get_local_rank(), rows, 512), _numbers(99, 512, 64)
    return find_fused(kind, mesh, here.arrays.make(x, _DTYPE), here.arrays.make(w, _DTYPE))


def _served(kind: str, here: Here) -> str:
    said = with_others(here)
    found = _kernel(kind, here) if said == PASS else said
    return found if isinstance(found, str) else PASS


def _exact(kind: str, here: Here) -> None:
    run = _kernel(kind, here)
    assert not isinstance(run, str), run
    rank, rows = here.backend.rank(), 4 * here.world_size
    every, w = [_numbers(i, rows, 512) for i in range(here.world_size)], _numbers(99, 512, 64)
    got = run()
    if kind == ALL_GATHER:
        got, gathered = got
        here.same(gathered, np.concatenate(every), _DTYPE, "what was gathered")
        want = np.concatenate(every) @ w
    else:
        want = np.sum(every, 0) @ w
        want = want[4 * rank : 4 * rank + 4] if kind == REDUCE_SCATTER else want
    here.same(got, want, _DTYPE, "product")
