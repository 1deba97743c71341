# SPDX-License-Identifier: Apache-2.0
"""Calls decided before: from the raw arguments straight to the local op.

[Note: known calls] A call is known by all that its decision depends on: the function, the layout
and dtype of each DTensor, every other argument with its type (True, 1 and 1.0 are equal, and mean
different things), the names of keyword arguments, whether the op is recorded, and the version of
the rules. A call with an argument of another kind is looked up op by op, as at first. A layout
stands in the key by its id, which is quick to compare: the decision keeps the layout, so that no
other one has that id, and of equal layouts there is one object (`DTensor.__new__`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.decisions import Spec
from hyper_parallel.dtensor.local_op import graph_parts, needs_grad, redistributed
from hyper_parallel.dtensor.views import mark_views
from hyper_parallel.dtensor.wrapping import wrap, wrap_results
from hyper_parallel.rules import rules_version

__all__ = ["KnownCall", "RawCall", "read_call", "remember"]

RawCall = tuple[Any, list[Any]]
"""A call's key, and its DTensors in the order in which they are written."""

_VALUES = frozenset((int, float, bool, complex, str, type(None), type(Ellipsis)))
_VALUES |= {torch.dtype, torch.device, torch.memory_format}
_BOUNDS = frozenset((int, type(None)))
_bounds = attrgetter("start", "stop", "step")
_GROUPS = frozenset((tuple, list, torch.Size))
_NAMED = object()  # stands in a key before the keyword arguments
_MAX_KNOWN = 4096
_MAX_VALUES = 64  # of a list: a longer one is not worth a key
_Plain = torch.Tensor


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A decision, by the DTensors of the call in the order in which they are written."""

    name: str
    spec: Spec
    layouts: tuple[Layout, ...]
    """Where the tensors lie: kept, since the key has their ids."""
    moves: tuple[Layout | None, ...] | None
    """Where each tensor goes first; None: all stay."""
    pending: tuple[Layout | None, ...] | None
    """How each tensor's gradient lies, if not in the cotangent layout; None: all do."""
    places: tuple[int | str, ...] | None
    """The position or the name of each tensor; None: some are in lists."""
    are_first: bool
    """Whether the tensors are the first arguments."""
    result: Layout | None
    """Where the only result lies; None: there are several, or more is to be done."""
    is_view: bool
    """Whether results may be views of operands."""

    @classmethod
    def of(  # noqa: PLR0913  # the call, and what was decided
        cls,
        tensors: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        spec: Spec,
        order: Sequence[int],
        is_view: bool,
    ) -> KnownCall:
        """Write down a decision whose operand `i` is `tensors[order[i]]`."""
        moves: list[Layout | None] = [None] * len(tensors)
        pending = list(moves)
        for to, lies, i in zip(spec.inputs, spec.gradients, order, strict=True):
            moves[i] = None if to == tensors[i]._layout else to
            pending[i] = None if lies == to.cotangent else lies
        kind = type(tensors[0])
        named = [*enumerate(args), *kwargs.items()]
        places = tuple(place for place, value in named if type(value) is kind)
        is_simple = not spec.has_empty and all(divisor == 1 for divisor in spec.divisors)
        return cls(
            name=name,
            spec=spec,
            layouts=tuple(t._layout for t in tensors),
            moves=tuple(moves) if any(moves) else None,
            pending=tuple(pending) if any(pending) else None,
            places=places if len(places) == len(tensors) else None,
            are_first=places == tuple(range(len(tensors))),
            result=spec.outputs[0] if spec.outputs and is_simple else None,
            is_view=is_view,
        )

    def moved(self, tensors: list[Any]) -> list[Any]:
        """Move the DTensors to where the op needs them.

        Communicates:
            Forward and backward: what the moves do.
        """
        if self.moves is None:
            return tensors
        moved = list(tensors)
        for i, layout in enumerate(self.moves):
            if layout is not None:
                moved[i] = now = redistributed(tensors[i], layout)
                now._write_is_lost = True  # to a view of it; see [Note: lost writes] in views.py
                now._is_scattered = tensors[i]._is_scattered
        return moved

    def run(  # the call, as it was given
        self,
        cls: type[Any],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Any],
        is_recorded: bool,
    ) -> Any:
        """Run the op on the local tensors of DTensors that are in place, and wrap its results.

        Communicates:
            Forward: what the local form does. Backward: a gradient that lies elsewhere is moved.
        """
        spec = self.spec
        parts = graph_parts(tensors, self.pending) if is_recorded else [t._local for t in tensors]
        if self.are_first:
            local_args: Sequence[Any] = [*parts, *args[len(parts) :]]
        else:
            local_args, kwargs = self.filled(args, kwargs, parts)
        if spec.local is None:
            result = func(*local_args, **kwargs)
        else:
            result = spec.local.run(func, tuple(local_args), kwargs)
        if self.result is not None and type(result) is _Plain:
            result = wrap(cls, result, self.result)
        else:
            result = wrap_results(cls, result, spec, parts if is_recorded else ())
        if self.is_view or tensors[0]._is_scattered or spec.outputs is None:
            return mark_views(cls, self.name, spec, tensors, result, is_view=self.is_view)
        return result

    def filled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Sequence[torch.Tensor]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Put plain tensors in the places of the DTensors."""
        if self.places is None:
            flat, tree = tree_flatten((args, kwargs))
            found = iter(parts)
            return tree_unflatten([next(found) if hasattr(x, "_layout") else x for x in flat], tree)
        local_args, kwargs = list(args), dict(kwargs)
        for place, part in zip(self.places, parts, strict=True):
            if isinstance(place, int):
                local_args[place] = part
            else:
                kwargs[place] = part
        return local_args, kwargs


def read_call(
    cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RawCall | None:
    """Give a call's key and its DTensors; None if it has an argument of an unusual kind.

    The last entry of the key tells whether the op is recorded.
    """
    key: list[Any] = [func, rules_version()]
    tensors: list[Any] = []
    if not _read(cls, args, key, tensors):
        return None
    if kwargs:
        key.append(_NAMED)
        if not _read(cls, [x for item in kwargs.items() for x in item], key, tensors):
            return None
    if not tensors:
        return None
    key.append(needs_grad(tensors))
    return tuple(key), tensors


def _read(cls: type[Any], values: Iterable[Any], key: list[Any], tensors: list[Any]) -> bool:
    """Add arguments to a call's key; False if one is of an unusual kind."""
    for value in values:
        kind = type(value)
        if kind is cls:
            graph = value._graph
            key += (id(value._layout), (value._local if graph is None else graph).dtype)
            tensors.append(value)
        elif kind in _VALUES:
            key += (kind, value)
        elif kind is _Plain:  # a replicated scalar
            if value.ndim or value.requires_grad:
                return False
            key += (kind, value.dtype)
        elif kind in _GROUPS and len(value) <= _MAX_VALUES:
            key += (kind, len(value))
            if not _read(cls, value, key, tensors):
                return False
        elif kind is slice and all(type(x) in _BOUNDS for x in _bounds(value)):
            key += (kind, *_bounds(value))
        else:
            return False
    return True


def remember(raw: RawCall, known: KnownCall) -> None:
    """Keep a decision on the mesh: what it keeps alive, process groups included, dies with it."""
    key, tensors = raw
    calls = tensors[0]._layout.mesh.decisions
    if len(calls) >= _MAX_KNOWN:
        calls.clear()
    calls[key] = known
