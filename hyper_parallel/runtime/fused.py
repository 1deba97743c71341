# SPDX-License-Identifier: Apache-2.0
"""find_fused: a matmul that communicates meanwhile, checked and watched as collectives are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.runtime.calls import Call
from hyper_parallel.runtime.checked import CheckedCommunicator
from hyper_parallel.runtime.interface import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from hyper_parallel.runtime.mesh import DeviceMesh
from hyper_parallel.runtime.watch import tell

__all__ = ["ALL_GATHER", "ALL_REDUCE", "REDUCE_SCATTER", "find_fused"]


def find_fused(kind: str, mesh: DeviceMesh, x: Any, w: Any) -> Callable[[], Any] | str:
    """Give the kernel for one call over the mesh's one axis, or say why there is none.

    Args:
        kind: one of the three.
        mesh: a mesh of one axis, with several ranks.
        x: [m, k], contiguous. The same shape and dtype on every rank, as for `w`.
        w: [k, n].

    Returns:
        What runs the kernel, or the reason in words; alike on every rank.

    Communicates:
        When it is called: as the kind says; in checked mode an exchange of fingerprints first.
    """
    comm = mesh.communicator(0)
    checked = comm if isinstance(comm, CheckedCommunicator) else None
    fused = mesh.backend.capabilities.fused
    kernel = None if fused is None else fused(kind, comm)
    if kernel is None:
        return f"the {mesh.backend.name} backend has no such kernel"
    refusal = kernel.refusal(x, w)
    if refusal is not None:
        return refusal

    def run() -> Any:
        if checked is not None:
            dtype = str(x.dtype).rpartition(".")[2]
            checked.compare(Call.of(kind, x=tuple(x.shape), w=tuple(w.shape), dtype=dtype))
        result = kernel(x, w)
        one, all_ = x.nbytes, comm.size * x.nbytes
        if kind != ALL_GATHER:
            one = all_ = math.prod((x.shape[0], w.shape[1])) * x.itemsize
        tell(kind, comm, one, all_ if kind != REDUCE_SCATTER else one // comm.size)
        return result

    return run
