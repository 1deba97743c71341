# SPDX-License-Identifier: Apache-2.0
"""Errors of torch communicators: what they refuse before a collective starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hyper_parallel.errors import BackendError, describe
from hyper_parallel.runtime.interface import Communicator

__all__ = ["no_uneven", "refused", "wrong_pieces", "wrong_rows", "wrong_tensor"]


def wrong_tensor(where: str, x: torch.Tensor, device_type: str) -> BackendError | None:
    """Give the error of a tensor on the wrong device or not contiguous, or None."""
    if x.device.type != device_type:
        text = describe(
            where,
            f"the tensor must be on a {device_type} device",
            f"Move it with .to({device_type!r}), or make the mesh for its device type",
            device=str(x.device),
        )
        return BackendError(text)
    if not x.is_contiguous():
        text = describe(
            where,
            "the tensor must be contiguous",
            "Call .contiguous() first",
            shape=tuple(x.shape),
            stride=x.stride(),
        )
        return BackendError(text)
    return None


def wrong_rows(where: str, x: torch.Tensor, size: int) -> BackendError:
    """Give the error of a dim 0 that is missing or does not divide."""
    whole = f"dim 0 must divide by the group size {size}"
    must = whole if where == "reduce_scatter" else "the tensor must have a dim 0"
    text = describe(where, must, "Pad or reshape it first", shape=tuple(x.shape))
    return BackendError(text)


def refused(
    where: str, given: Mapping[str, Any], communicator: Communicator, device_type: str
) -> BackendError | None:
    """Say what is wrong with the arguments of a call, or None.

    Of a call over a real library only looked for once torch refused it, before it sent anything: a
    right call need not pay for it.
    """
    x, size, rank = given.get("x", given.get("out")), communicator.size, communicator.rank
    if x is None:
        return None
    no_rows = x.ndim == 0 and where not in ("all_reduce", "broadcast", "scatter")
    if no_rows or (where == "reduce_scatter" and x.shape[0] % size):
        return wrong_tensor(where, x, device_type) or wrong_rows(where, x, size)
    for name in ("sizes", "send_sizes", "recv_sizes"):
        if name not in given:
            continue
        sizes = given[name]
        own = sizes[rank : rank + 1] if where == "all_gather_v" else sizes
        adds_up = name == "recv_sizes" or sum(own) == x.shape[0]
        if len(sizes) != size or min(sizes) < 0 or not adds_up:
            text = describe(
                where,
                f"there must be one size for each of the {size} ranks, adding up to x",
                "Give dim 0 that many entries",
                sizes=tuple(sizes),
                rank=rank,
                x_rows=x.shape[0],
            )
            return BackendError(text)
    if not 0 <= given.get("src", 0) < size:
        must = f"src must be an index into the group {communicator.ranks}"
        return BackendError(where, must, "Pass one", src=given["src"])
    return wrong_tensor(where, x, device_type)


def no_uneven(where: str, device_type: str) -> BackendError:
    """Give the error of a call that needs the capability `uneven_gather`."""
    text = describe(
        where,
        "the backend must have the capability uneven_gather",
        "Pad the pieces to one size and use the even form, as the executor does",
        device_type=device_type,
    )
    return BackendError(text)


def wrong_pieces(pieces: Sequence[torch.Tensor] | None, src: int, index: int) -> BackendError:
    """Give the error of scatter's pieces missing at the source or given elsewhere."""
    text = describe(
        "scatter",
        f"the rank at group index {src}, and only it, must pass the pieces",
        "Pass None on the other ranks",
        pieces=None if pieces is None else f"{len(pieces)} tensors",
        index=index,
    )
    return BackendError(text)
