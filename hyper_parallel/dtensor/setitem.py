# SPDX-License-Identifier: Apache-2.0
"""`x[index] = value`: through a view of the shards where there is one, else on the whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hyper_parallel.dtensor.decisions import gathered
from hyper_parallel.dtensor.moves import move
from hyper_parallel.dtensor.read import whole_of

__all__ = ["run"]


def run(cls: type[Any], target: Any, index: Any, value: Any) -> None:
    """Set what an index selects to a number, or a tensor that broadcasts to it.

    Communicates:
        What brings `value` to the layout of the selected part. An index with positions, or into a
        dim that is cut, works on the gathered whole, with a warning.

    Raises:
        RuleError: under `strict_rules`, where the whole would be gathered.
    """
    with torch.no_grad():
        is_number = not isinstance(value, torch.Tensor) or not value.ndim
        is_mask = isinstance(index, cls) and index.dtype == torch.bool  # type: ignore[attr-defined]
        if is_mask and is_number and index.shape == target.shape:
            target.masked_fill_(index, value)
            return
        entries = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(entry, (torch.Tensor, list)) for entry in entries):
            view = target[index]
            if not view._write_is_lost:
                _write(view, value)
                return
        _write_whole(cls, target, index, value)


def _write(view: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.ndim:
        extra = value.ndim - view.ndim  # leading size-1 dims, as torch allows
        value = value.reshape(value.shape[extra:]) if extra > 0 else value
        view.copy_(value.expand(view.shape).to(view.dtype))
    else:
        view.fill_(value)


def _write_whole(cls: type[Any], target: Any, index: Any, value: Any) -> None:
    """Gather, write, and keep this rank's part."""
    layout = target._layout
    gathered("__setitem__", [target])
    if layout.mesh.get_coordinate() is None:
        return
    whole = target.local_in(layout.replicated).clone()
    whole[tree_map(partial(whole_of, cls), index)] = whole_of(cls, value)
    target._local.copy_(move(whole, layout.replicated, layout))
