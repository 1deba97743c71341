# SPDX-License-Identifier: Apache-2.0
"""implicit_replication: plain tensors among DTensors count as replicated, within a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hyper_parallel.core import Layout, Replicate
from hyper_parallel.dtensor.edges import declared
from hyper_parallel.dtensor.read import is_torch_dtensor
from hyper_parallel.errors import LayoutError

__all__ = ["counts_as_replicated", "implicit_replication", "plain_operand", "replicated"]

_state = threading.local()


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Within the block, plain tensors that meet DTensors count as replicated.

    It is for tensors that every rank has alike: masks, position tables, buffers. Whether it does is
    not checked. Outside of the block such a tensor is an error, unless it has no dims. A plain
    tensor never takes the result of an in-place op on DTensors.

    Communicates:
        Nothing. Backward: the gradient of a plain tensor is reduced, as that of a replicated one.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, distribute_tensor, implicit_replication
        >>> from hyper_parallel import init_device_mesh, simulate
        >>> @simulate(2)
        ... def masked():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        ...     with implicit_replication():
        ...         return (x * torch.tensor([1.0, 0.0, 0.0, 1.0])).tolist()
        >>> masked()[0]
        [1.0, 0.0, 0.0, 1.0]
    """
    before = getattr(_state, "is_on", False)
    _state.is_on = True
    try:
        yield
    finally:
        _state.is_on = before


def counts_as_replicated(cls: type[Any], value: Any) -> bool:
    """Tell whether a value is a plain tensor that counts as replicated here."""
    return (
        isinstance(value, torch.Tensor)
        and getattr(_state, "is_on", False)
        and not isinstance(value, cls)
        and not is_torch_dtensor(value)
    )


def replicated(cls: type[Any], value: torch.Tensor, mesh: Any) -> Any:
    """Make a replicated DTensor of a plain tensor, which gets the whole gradient."""
    layout = Layout(mesh, (Replicate(),) * mesh.ndim, tuple(value.shape))
    return declared(cls, value, layout)


def plain_operand(where: str, value: torch.Tensor, **found: Any) -> LayoutError:
    """Give the error of a tensor that is not ours among DTensors."""
    must = "every tensor operand must be a DTensor"
    do = (
        "Say where the plain tensor is with DTensor.from_local or distribute_tensor, take the"
        " DTensor's part with to_local(), or, if every rank has the same, work inside"
        " hyper_parallel's `with implicit_replication():`"
    )
    if is_torch_dtensor(value):
        must += " of hyper_parallel"
        do = "Convert torch's with from_torch of hyper_parallel.dtensor.interop"
    elif where.endswith("'cross_entropy'"):
        do += "; losses on cut logits take plain targets inside `with loss_parallel():`"
    return LayoutError(where, must, do, **found, shape=tuple(value.shape))
