# SPDX-License-Identifier: Apache-2.0
"""Decide an op on concrete layouts: where operands must be, where results and gradients are.

An op without a rule, or a call that its rule does not describe, runs on gathered operands;
data-dependent ops are refused.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.core import Layout, Replicate
from hyper_parallel.core.factor import BoundRule, bind
from hyper_parallel.core.propagate import Decision, Weight, propagate
from hyper_parallel.dtensor.local_forms import Addressed, Local, as_called, form_of
from hyper_parallel.dtensor.result_shapes import asked_shapes, told_shapes
from hyper_parallel.dtensor.signatures import BoundCall
from hyper_parallel.errors import RuleError
from hyper_parallel.rules import Call, find, names

__all__ = [
    "Spec",
    "decide",
    "gathered",
    "spec_of",
    "strict_rules",
]

_DATA_DEPENDENT = frozenset(
    "nonzero masked_select unique unique_consecutive argwhere bincount".split()
)
# These read a value out; gathering is what they ask for, so it is not worth a warning.
_READS = frozenset(
    "item tolist numpy __array__ __bool__ __float__ __int__ __index__ __format__ equal allclose"
    " isclose __contains__ cpu __str__".split()
)

_warned: set[str] = set()
# Why a call of an op did not fit its rule, for the warning.
_misfits: dict[str, str] = {}
_strict = threading.local()


@dataclass(frozen=True, slots=True)
class Spec:
    """A decision on concrete layouts: where operands must be, where results and gradients are."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...] | None  # None: results are whole, shapes as they come
    gradients: tuple[Layout, ...]
    divisors: tuple[int, ...] = ()
    local: Local | None = None  # None: the op runs on local tensors as it is called
    has_empty: bool = False  # whether some rank's part of an operand or result has no elements


@contextmanager
def strict_rules() -> Iterator[None]:
    """Within the block an op without a rule is an error, instead of a gather with a warning.

    What reads values out (item, tolist, equal, printing) gathers all the same.
    """
    before = getattr(_strict, "on", False)
    _strict.on = True
    try:
        yield
    finally:
        _strict.on = before


def decide(
    cls: type[Any],
    name: str,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    bound: BoundCall,
) -> Spec | None:
    """Decide a call of an op of the rule tables; None where no rule describes this form of it."""
    if name not in names():
        return None
    try:
        hash(bound.static)
    except TypeError:  # a tensor where the rule sees none
        return None
    # Scalars and 0-dim plain tensors are no operands of the rule.
    operands = [x if isinstance(x, cls) else None for x in bound.operands]
    told = told_shapes(name, operands, dict(bound.static))
    found = _decide(name, bound.static, operands, told or asked_shapes(name, func, args, kwargs))
    if found is None and told:
        asked_shapes(name, func, args, kwargs)  # refuses what torch refuses
    return found


def _decide(
    name: str,
    static: tuple[tuple[str, Any], ...],
    operands: list[Any],
    out_shapes: list[tuple[int, ...]] | None,
) -> Spec | None:
    layouts: list[Layout | None] = [None if t is None else t._layout for t in operands]
    bound = _bound_rule(name, tuple(x and x.shape for x in layouts), static)
    if bound is None:
        return None
    if out_shapes is None:  # torch cannot tell without data, but the rule may
        if any(None in shape for shape in bound.results):
            return None
        out_shapes = [tuple(size or 0 for size in shape) for shape in bound.results]
    if not _agree(bound, out_shapes):
        rule = [tuple(shape) for shape in bound.results]
        _misfits[name] = f" ({bound.rule.text!r} gives results of {rule}, the op of {out_shapes})"
        return None
    present = [(i, layout) for i, layout in enumerate(layouts) if layout is not None]
    is_cast = _casts_to_integer(static)
    decision = propagate(
        bound,
        [x and (x.cotangent if is_cast else x).placements for x in layouts],
        present[0][1].mesh.shape,
        itemsizes=[1 if t is None else t.dtype.itemsize for t in operands],
        needs_grad=torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in operands),
    )
    form = None
    if decision.shifts or bound.rule.local:
        form = form_of(name, static)
        if form is None:
            return None
    return spec_of(form, decision, present, out_shapes, is_random=bound.rule.random)


def spec_of(
    form: Callable[..., Any] | None,
    decision: Decision,
    present: list[tuple[int, Layout]],
    out_shapes: list[tuple[int, ...]],
    *,
    is_random: bool = False,
) -> Spec:
    """Write a decision down as layouts, with what this rank needs to know of its own part."""
    mesh: Any = present[0][1].mesh
    inputs = {i: layout.with_placements(decision.inputs[i] or ()) for i, layout in present}
    outputs = tuple(
        Layout.of(mesh, placements, shape)
        for placements, shape in zip(decision.outputs, out_shapes, strict=True)
    )
    local = None
    if (form or decision.weights or is_random) and mesh.get_coordinate() is not None:
        rank = mesh.get_rank()
        addressed = [
            Addressed(s.dim, layout.slices(rank)[s.dim].start, layout.shape[s.dim])
            for s in decision.shifts
            for layout in (inputs[s.source],)
        ]
        local = Local(
            form=form or as_called,
            whole=outputs[0].shape,
            shape=outputs[0].local_shape(rank),
            addressed=tuple(addressed),
            weights=_weights(decision.weights, inputs, len(outputs)),
            drawn=outputs[0] if is_random else None,
        )
    return Spec(
        inputs=tuple(inputs.values()),
        outputs=outputs,
        gradients=tuple(
            layout.with_placements(decision.gradients[i] or ()) for i, layout in present
        ),
        divisors=decision.divisors,
        local=local,
        has_empty=any(map(_has_empty, (*inputs.values(), *outputs))),
    )


def _has_empty(layout: Layout) -> bool:
    """Tell whether some rank's part has no elements: the last one's, as chunks are cut."""
    return 0 in layout.local_shape(layout.mesh.ranks[-1])


def _weights(
    weights: Sequence[Weight], inputs: dict[int, Layout], num_results: int
) -> tuple[float, ...]:
    """Give each result's share: what the axes leave of the dim that is averaged over."""
    if not weights:
        return ()
    shares = [1.0] * num_results
    for weight in weights:
        layout = inputs[weight.source]
        mesh: Any = layout.mesh

        def held(axes: int, of: Layout = layout, dim: int = weight.dim) -> int:
            cut = (*of.placements[:axes], *[Replicate()] * (of.mesh.ndim - axes))
            return of.with_placements(cut).local_shape(mesh.get_rank())[dim]  # noqa: B023

        shares[weight.result] *= held(weight.axis + 1) / max(held(weight.axis), 1)
    return tuple(shares)


def _bound_rule(
    name: str, shapes: tuple[Any, ...], static: tuple[tuple[str, Any], ...]
) -> BoundRule | None:
    """Bind the op's rule; None if the call has a form that the rule does not know."""
    try:
        return bind(find(name, Call(shapes, static)), shapes)
    except (RuleError, LookupError, TypeError, ValueError) as error:
        # Other than RuleError: a form of the call that the rule's function does not expect.
        _misfits[name] = f" ({error})" if isinstance(error, RuleError) else ""
        return None


def _agree(bound: BoundRule, out_shapes: list[tuple[int, ...]]) -> bool:
    """Tell whether the rule's results have the shapes that the op really gives."""
    return len(bound.results) == len(out_shapes) and all(
        len(rule) == len(real)
        and all(size in (None, have) for size, have in zip(rule, real, strict=True))
        for rule, real in zip(bound.results, out_shapes, strict=True)
    )


def _casts_to_integer(static: tuple[tuple[str, Any], ...]) -> bool:
    """Tell whether the op first casts to a dtype in which a sum of parts is not the sum."""
    dtype = dict(static).get("dtype")
    return isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex)


# ---------------------------------------------------------------------- without a rule


def gathered(name: str, tensors: Sequence[Any]) -> Spec:
    """Decide for an op without a rule: every operand is gathered, the result is replicated.

    Raises:
        RuleError: under `strict_rules`, or the shape of its result depends on data of which this
            rank has a part.
    """
    fix = f"register_op_rule({name!r}, '... -> ...')"
    is_moved = any(not t._layout.is_replicated for t in tensors)
    is_strict = getattr(_strict, "on", False) and name not in _READS
    if is_strict or (name in _DATA_DEPENDENT and is_moved):
        raise RuleError(
            f"DTensor op {name!r}",
            "the op must have a rule for this call",
            f"Teach it: {fix}, or run it on full_tensor() or to_local()",
            layouts=[t._layout for t in tensors],
        )
    if is_moved and name not in _warned and name not in _READS:
        _warned.add(name)
        has_rule = name in names()
        warnings.warn(
            f"DTensor op {name!r} has no sharding rule{' for this call' if has_rule else ''}: its"
            " operands are gathered on every rank."
            + (
                f" Move them first if that is too much.{_misfits.get(name, '')}"
                if has_rule
                else f" Teach it with {fix}."
            ),
            stacklevel=_frames_of_ours(),
        )
    whole = tuple(t._layout.replicated for t in tensors)
    return Spec(inputs=whole, outputs=None, gradients=whole)


def _frames_of_ours() -> int:
    """Count the frames between `gathered` and the user's line, torch's own included."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(
        ("hyper_parallel.", "torch.")
    ):
        level, frame = level + 1, frame.f_back
    return level
