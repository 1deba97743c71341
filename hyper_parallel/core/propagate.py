# SPDX-License-Identifier: Apache-2.0
"""Propagate: from a bound rule and operand placements to one decision, forward and backward.

[Note: choices] Mesh axes are decided from first to last; a dim that several axes cut nests from
left to right. On one axis a rule offers, in this order:

* cut a factor: Shard wherever it occurs, Replicate elsewhere; a result that lacks it is Partial.
  Summed into a result by a term that lacks it (a bias), the term must be Partial itself, so that
  it is added once. Uneven cuts are fine on plain dims (all pieces are torch.chunk's); the average
  of an uneven piece is weighted by its share, which makes a pending sum. A dim `(g f)` is cut in
  blocks of f where plain chunks would cut through f.
* pass a pending sum or avg: one linear operand of each term is Partial, and so are the results.
* replicate everything.

A cut is considered if an operand has it, or if some operand is cut and the new cut is even; a
pending reduction is passed if an operand has one. So nothing is sharded that was not. The cheapest
choice in bytes moved wins; among equals the one that leaves the first operands where they are.

Gradients (of the local op, cotangents in the dual layout of the results): operand Shard -> Shard;
Partial -> Replicate; Replicate -> Replicate if nothing was cut or passed, else Partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from hyper_parallel.core.choice import Choice, cuts_of, offers, pieces
from hyper_parallel.core.factor import BoundRule, Shape
from hyper_parallel.core.placement import Partial, Placement, Shard
from hyper_parallel.errors import RuleError

__all__ = ["Decision", "Shift", "Weight", "choices", "propagate"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Shift:
    """Values that are positions in a cut dim: subtract the rank's start, mask what is outside.

    The start is that of the rank's part of dim `dim` of operand `source`, placed as decided. Where
    a position is outside, the local op must give zero, so that the pending sum is right.
    """

    values: int
    """Operand whose values are positions; -1 where a static argument is one."""
    source: int
    """Operand that they address."""
    dim: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A result that is an average of uneven pieces: each rank's is multiplied by its share.

    The share is what an axis leaves of dim `dim` of operand `source`, placed as decided.
    """

    result: int
    axis: int
    source: int
    dim: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Where operands must be, where results are, and where local gradients are."""

    inputs: tuple[Placements | None, ...]
    outputs: tuple[Placements, ...]
    gradients: tuple[Placements | None, ...]
    divisors: tuple[int, ...]
    """For each result, what its cotangent is divided by before the local backward (pending avg)."""
    shifts: tuple[Shift, ...]
    weights: tuple[Weight, ...]
    why: str


@dataclass(frozen=True, slots=True)
class _Question:
    bound: BoundRule
    given: tuple[Placements | None, ...]
    mesh: tuple[int, ...]
    itemsizes: tuple[int, ...]

    def tensors(self) -> list[tuple[int, Placements, Shape]]:
        """List the operands that are tensors: position, placements, shape."""
        pairs = enumerate(zip(self.given, self.bound.shapes, strict=True))
        return [(i, p, shape) for i, (p, shape) in pairs if p is not None and shape is not None]


def propagate(
    bound: BoundRule,
    placements: Sequence[Sequence[Placement] | None],
    mesh_shape: Sequence[int],
    *,
    itemsizes: Sequence[int] = (),
    needs_grad: bool = False,
) -> Decision:
    """Choose where an op runs; see [Note: choices]. A pure function; cache it by its arguments.

    Args:
        bound: the rule on global shapes.
        placements: for each operand one placement per mesh axis, dims not negative; None for an
            operand that is not a tensor.
        mesh_shape: the sizes of the mesh axes.
        itemsizes: bytes per element of each operand; 1 if left out.
        needs_grad: leave out choices whose backward is not the plain local one (pending max, min
            and product).

    Returns:
        The decision.

    Raises:
        RuleError: the placements do not fit the operands.

    Example:
        >>> from hyper_parallel.core import Replicate
        >>> from hyper_parallel.core.factor import bind
        >>> from hyper_parallel.core.rule import parse_rule
        >>> bound = bind(parse_rule("m k, k n -> m n", linear=True), [(8, 4), (4, 6)])
        >>> decision = propagate(bound, [(Shard(1),), (Replicate(),)], (2,))
        >>> decision.inputs, decision.outputs, decision.gradients
        (((S(1),), (S(0),)), ((P(sum),),), ((S(1),), (S(0),)))
    """
    given = tuple(None if p is None else tuple(p) for p in placements)
    ask = _Question(bound, given, tuple(mesh_shape), tuple(itemsizes) or (1,) * len(given))
    _check(ask)
    chosen: tuple[Choice, ...] = ()
    for _ in ask.mesh:
        considered = _considered(ask, chosen, needs_grad)
        prices = [_price(ask, (*chosen, choice)) for choice in considered]
        best = considered[prices.index(min(prices))]
        chosen = (*chosen, _as_written(ask, (*chosen, best)))
    return _assemble(bound, chosen)


def choices(bound: BoundRule, axis_size: int) -> tuple[Decision, ...]:
    """List everything a rule offers on one mesh axis of a size, for checking rules.

    Example:
        >>> from hyper_parallel.core.factor import bind
        >>> from hyper_parallel.core.rule import parse_rule
        >>> bound = bind(parse_rule("a b -> a"), [(4, 4)])
        >>> [decision.why for decision in choices(bound, 2)]
        ['cut a', 'cut b', 'replicate']
    """
    found = offers(bound, (axis_size,), ())
    return tuple(_assemble(bound, (choice,)) for choice in found)


def _check(ask: _Question) -> None:
    where = f"rule {ask.bound.rule.text!r}"
    if len(ask.given) != len(ask.bound.shapes):
        must = f"placements must have one entry per operand ({len(ask.bound.shapes)})"
        raise RuleError(where, must, "Pass None for a scalar", placements=ask.given)
    for position, (placements, shape) in enumerate(zip(ask.given, ask.bound.shapes, strict=True)):
        if (placements is None) != (shape is None):
            must = f"operand {position} must have both a shape and placements, or neither"
            raise RuleError(where, must, "Pass both", shape=shape, placements=placements)
    for position, placements, shape in ask.tensors():
        dims = [p.dim for p in placements if isinstance(p, Shard)]
        if len(placements) != len(ask.mesh) or any(not 0 <= dim < len(shape) for dim in dims):
            must = f"operand {position} must have {len(ask.mesh)} placements on dims of its shape"
            fix = "Use a Layout's placements"
            raise RuleError(where, must, fix, placements=placements, shape=shape)


def _considered(ask: _Question, chosen: tuple[Choice, ...], needs_grad: bool) -> list[Choice]:
    """Keep the offers that some operand's placement on the next axis suggests, best hints first."""
    axis = len(chosen)
    here = [(operand, placements[axis]) for operand, placements, _ in ask.tensors()]
    cuts = [
        (factor.name, max(placement.block // max(place.span, 1), 1))
        for operand, placement in here
        if isinstance(placement, Shard)
        for factor in ask.bound.factors
        if (place := factor.operands[operand]) is not None
        and place.outermost
        and place.dim == placement.dim
    ]
    is_any_cut = any(isinstance(placement, Shard) for _, placement in here)
    pending = {placement.reduce_op for _, placement in here if isinstance(placement, Partial)}
    kept: list[Choice] = []
    others: list[Choice] = []
    for choice in offers(ask.bound, ask.mesh, chosen, cuts):
        is_new = choice.kind == "cut" and (choice.name, choice.block) not in cuts
        if is_new:
            is_kept = is_any_cut and choice.is_even and choice.block == 1
        else:
            is_kept = choice.kind != "pass" or choice.name in pending
        if is_kept and not (needs_grad and any(map(_needs_more_backward, choice.outputs))):
            (others if is_new else kept).append(choice)
    return [*kept[:-1], *others, kept[-1]]


def _needs_more_backward(placement: Placement) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg")


def _price(ask: _Question, chosen: tuple[Choice, ...]) -> tuple[Fraction, tuple[bool, ...]]:
    """Price the last of `chosen`: bytes that each rank sends, then which operands change."""
    axis = len(chosen) - 1
    total = Fraction(0)
    changed: list[bool] = []
    for operand, placements, shape in ask.tensors():
        decided = tuple(choice.inputs[operand] for choice in chosen)
        is_same = _is_same(shape, ask.mesh, placements[: axis + 1], decided)
        changed.append(not is_same)
        if not is_same:
            others = zip(ask.mesh, (*decided[:-1], None, *placements[axis + 1 :]), strict=True)
            num_pieces = prod(n for n, p in others if isinstance(p, Shard))
            share = _sent_share(placements[axis], decided[-1], ask.mesh[axis])
            total += share * ask.itemsizes[operand] * prod(shape) / num_pieces
    return total, tuple(changed)


def _is_same(
    shape: Shape, mesh: tuple[int, ...], given: Placements, decided: Sequence[Placement | None]
) -> bool:
    """Tell whether the last placement needs no move, comparing pieces, not how they are written."""
    src, dst = given[-1], decided[-1]
    if not (isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim):
        return src == dst
    axes = [[p is not None and p.is_shard(src.dim) for p in side] for side in (given, decided)]
    held = [pieces(shape[src.dim], cuts_of(side, mesh, src.dim)) for side in (given, decided)]
    return axes[0] == axes[1] and held[0] == held[1]


def _sent_share(src: Placement, dst: Placement | None, count: int) -> Fraction:
    """Give the share of a tensor that each of `count` ranks sends to move it (ring algorithms).

    Shard -> Partial is local, but it turns a later reduce-scatter into an all-reduce: it is priced
    as that all-reduce.
    """
    if src.is_replicate() or dst is None:
        return Fraction(0)
    step = Fraction(count - 1, count)
    if src.is_shard():
        return step / count if dst.is_shard() else step if dst.is_replicate() else 2 * step
    return step if dst.is_shard() else 2 * step


def _as_written(ask: _Question, chosen: tuple[Choice, ...]) -> Choice:
    """Give the last choice with inputs as the operands write them where the pieces are the same."""
    inputs = list(chosen[-1].inputs)
    for operand, placements, shape in ask.tensors():
        here = placements[: len(chosen)]
        if _is_same(shape, ask.mesh, here, [choice.inputs[operand] for choice in chosen]):
            inputs[operand] = here[-1]
    return replace(chosen[-1], inputs=tuple(inputs))


def _assemble(bound: BoundRule, chosen: tuple[Choice, ...]) -> Decision:
    def column(rows: Sequence[Sequence[Placement | None]], position: int) -> Placements:
        return tuple(p for row in rows if (p := row[position]) is not None)

    inputs, outputs = [c.inputs for c in chosen], [c.outputs for c in chosen]
    gradients = [c.gradients for c in chosen]
    is_tensor = [shape is not None for shape in bound.shapes]
    num_results = range(len(bound.results))
    notes = [str(c) if len(chosen) == 1 else f"axis {i}: {c}" for i, c in enumerate(chosen)]
    return Decision(
        inputs=tuple(column(inputs, i) if it else None for i, it in enumerate(is_tensor)),
        outputs=tuple(column(outputs, i) for i in num_results),
        gradients=tuple(column(gradients, i) if it else None for i, it in enumerate(is_tensor)),
        divisors=tuple(prod(c.divisors[i] for c in chosen if c.divisors) for i in num_results),
        shifts=_shifts(bound, {c.name for c in chosen if c.kind == "cut"}),
        weights=_weights(bound, chosen),
        why="; ".join(notes),
    )


def _shifts(bound: BoundRule, cut: set[str]) -> tuple[Shift, ...]:
    return tuple(
        Shift(values, source, place.dim)
        for name, values in bound.rule.index
        for factor in bound.factors
        if factor.name == name and name in cut
        for source, place in enumerate(factor.operands)
        if place is not None
    )


def _weights(bound: BoundRule, chosen: tuple[Choice, ...]) -> tuple[Weight, ...]:
    found: list[Weight] = []
    for axis, choice in enumerate(chosen):
        if any(choice.weighted):
            factor = next(f for f in bound.factors if f.name == choice.name)
            places = ((i, p) for i, p in enumerate(factor.operands) if p is not None)
            source, place = next(places)
            numbers = (i for i, it in enumerate(choice.weighted) if it)
            found += [Weight(result, axis, source, place.dim) for result in numbers]
    return tuple(found)
