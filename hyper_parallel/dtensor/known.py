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

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.decisions import Spec
from hyper_parallel.dtensor.local_op import needs_grad
from hyper_parallel.rules import rules_version

__all__ = ["KnownCall", "RawCall", "read_call"]

_VALUES = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.memory_format, torch.Size)
)
_GROUPS = frozenset((tuple, list))
_MAX_KNOWN = 4096
_MAX_VALUES = 64  # of a list: a longer one is not worth a key

# Where a tensor is in a call: at a position, under a name, or in a list there.
Place = int | str | tuple[int | str, int]


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A decision, by the DTensors of the call in the order in which they are written."""

    name: str
    spec: Spec
    moves: tuple[Layout | None, ...] | None
    """Where each tensor goes first; None: all stay."""
    pending: tuple[Layout | None, ...]
    """How each tensor's gradient lies, if not in the cotangent layout."""

    @classmethod
    def of(cls, name: str, spec: Spec, order: Sequence[int], tensors: Sequence[Any]) -> KnownCall:
        """Write down a decision whose operand `i` is tensor `order[i]` of the call."""
        moves: list[Layout | None] = [None] * len(order)
        pending = list(moves)
        for to, lies, i in zip(spec.inputs, spec.gradients, order, strict=True):
            moves[i] = None if to == tensors[i]._layout else to
            pending[i] = None if lies == to.cotangent else lies
        return cls(name, spec, tuple(moves) if any(moves) else None, tuple(pending))


class RawCall:
    """A call as its key, the DTensors in it, and where they are."""

    __slots__ = ("is_recorded", "key", "places", "tensors")

    def __init__(self, cls: type[Any], func: Any) -> None:
        self.key: Any = [cls, func, rules_version()]
        self.tensors: list[Any] = []
        self.places: list[Place] = []
        self.is_recorded = False

    def find(self) -> KnownCall | None:
        """Give what was remembered of such a call."""
        return self.tensors[0]._layout.mesh.decisions.get(self.key)

    def remember(self, known: KnownCall) -> None:
        """Keep a decision, on the mesh: what it keeps alive, groups included, dies with it."""
        calls = self.tensors[0]._layout.mesh.decisions
        if len(calls) >= _MAX_KNOWN:
            calls.clear()
        calls[self.key] = known

    def filled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Sequence[torch.Tensor]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Put local tensors in the places of the DTensors."""
        new_args: list[Any] = list(args)
        for place, part in zip(self.places, parts, strict=True):
            if type(place) is int:
                new_args[place] = part
            elif type(place) is str:
                kwargs = {**kwargs, place: part}
            else:
                at, i = place  # type: ignore[misc]
                if type(at) is str:
                    kwargs = {**kwargs, at: [*kwargs[at]]}
                    kwargs[at][i] = part
                else:
                    new_args[at] = group = list(new_args[at])
                    group[i] = part
        return new_args, kwargs


def read_call(
    cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RawCall | None:
    """Read a call; None if it has an argument of an unusual kind."""
    raw = RawCall(cls, func)
    for i, value in enumerate(args):
        if not _read(cls, value, i, raw):
            return None
    for name, value in kwargs.items():
        raw.key.append(name)
        if not _read(cls, value, name, raw):
            return None
    raw.is_recorded = needs_grad(raw.tensors)
    raw.key.append(raw.is_recorded)
    raw.key = tuple(raw.key)
    return raw


def _read(cls: type[Any], value: Any, place: Place, raw: RawCall) -> bool:
    """Add one argument to a call; False if it is of an unusual kind."""
    kind = type(value)
    if kind is cls:
        raw.key += (value._layout, value._local.dtype)
        raw.tensors.append(value)
        raw.places.append(place)
    elif kind in _VALUES:
        raw.key += (kind, value)
    elif kind is torch.Tensor:  # a replicated scalar
        raw.key += (kind, value.dtype)
        return not value.ndim and not value.requires_grad
    elif kind in _GROUPS and type(place) is not tuple and len(value) <= _MAX_VALUES:
        raw.key += (kind, len(value))
        return all([_read(cls, item, (place, i), raw) for i, item in enumerate(value)])  # type: ignore[arg-type]
    else:
        return False
    return True
