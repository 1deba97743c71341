# SPDX-License-Identifier: Apache-2.0
"""Calls decided before: from the raw arguments straight to the local op.

[Note: known calls] A call is known by all that its decision depends on: the function, the layout
and dtype of each DTensor, every other argument with its type (True, 1 and 1.0 are equal, and mean
different things), the names of keyword arguments, whether the op is recorded, and the version of
the rules. A call with an argument of another kind is looked up op by op, as at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.decisions import Spec
from hyper_parallel.dtensor.local_op import needs_grad
from hyper_parallel.rules import rules_version

__all__ = ["KnownCall", "read_call", "remember"]

_VALUES = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)
)
_GROUPS = frozenset((tuple, list, torch.Size))
_MAX_KNOWN = 4096
_MAX_VALUES = 64  # of a list: a longer one is not worth a key


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A decision, by the DTensors of the call in the order in which they are written."""

    name: str
    spec: Spec
    moves: tuple[Layout | None, ...] | None
    """Where each tensor goes first; None: all stay."""
    pending: tuple[Layout | None, ...]
    """How each tensor's gradient lies, if not in the cotangent layout."""
    places: tuple[int | str, ...] | None
    """The position or the name of each tensor; None: some are in lists."""
    is_view: bool
    """Whether results may be views of operands."""

    def filled(
        self,
        cls: type[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parts: Sequence[torch.Tensor],
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Put local tensors in the places of the DTensors."""
        places = self.places
        if places is None:
            flat, tree = tree_flatten((args, kwargs))
            found = iter(parts)
            return tree_unflatten([next(found) if type(x) is cls else x for x in flat], tree)
        if not kwargs and len(places) == len(args):
            return parts, kwargs
        new_args: list[Any] = list(args)
        for place, part in zip(places, parts, strict=True):
            if type(place) is int:
                new_args[place] = part
            else:
                kwargs = {**kwargs, place: part}  # type: ignore[dict-item]
        return new_args, kwargs


def read_call(
    cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Any]] | None:
    """Give a call's key and its DTensors; None if it has an argument of an unusual kind."""
    key: list[Any] = [func, rules_version()]
    tensors: list[Any] = []
    if not _read(cls, args, key, tensors):
        return None
    for name, value in kwargs.items():
        key.append(name)
        if not _read(cls, (value,), key, tensors):
            return None
    key.append(needs_grad(tensors))
    return (tuple(key), tensors) if tensors else None


def _read(cls: type[Any], values: Sequence[Any], key: list[Any], tensors: list[Any]) -> bool:
    """Add arguments to a call's key; False if one is of an unusual kind."""
    for value in values:
        kind = type(value)
        if kind is cls:
            key.append(value._layout)
            graph = value._graph
            key.append((value._local if graph is None else graph).dtype)
            tensors.append(value)
        elif kind in _VALUES:
            key.append(kind)
            key.append(value)
        elif kind is torch.Tensor:  # a replicated scalar
            if value.ndim or value.requires_grad:
                return False
            key += (kind, value.dtype)
        elif kind in _GROUPS and len(value) <= _MAX_VALUES:
            key += (kind, len(value))
            if not _read(cls, value, key, tensors):
                return False
        else:
            return False
    return True


def remember(  # noqa: PLR0913  # the call, and what was decided
    raw: tuple[Any, list[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    spec: Spec,
    order: Sequence[int],
    is_view: bool,
) -> None:
    """Keep a decision whose operand `i` is DTensor `order[i]` of the call.

    It is kept on the mesh: what it keeps alive, process groups included, dies with the mesh.
    """
    key, tensors = raw
    moves: list[Layout | None] = [None] * len(order)
    pending = list(moves)
    for to, lies, i in zip(spec.inputs, spec.gradients, order, strict=True):
        moves[i] = None if to == tensors[i]._layout else to
        pending[i] = None if lies == to.cotangent else lies
    cls = type(tensors[0])
    named = [*enumerate(args), *kwargs.items()]
    places = tuple(place for place, value in named if type(value) is cls)
    calls = tensors[0]._layout.mesh.decisions
    if len(calls) >= _MAX_KNOWN:
        calls.clear()
    calls[key] = KnownCall(
        name=name,
        spec=spec,
        moves=tuple(moves) if any(moves) else None,
        pending=tuple(pending),
        places=places if len(places) == len(tensors) else None,
        is_view=is_view,
    )
