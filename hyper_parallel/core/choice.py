# SPDX-License-Identifier: Apache-2.0
"""Choices: every way in which a bound rule allows one mesh axis to run the op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

from hyper_parallel.core.factor import BoundRule, Factor, Place
from hyper_parallel.core.interval import chunk_sizes
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard

__all__ = ["Choice", "cuts_of", "offers", "pieces"]

Cuts = tuple[tuple[int, int], ...]
"""The cuts of one dim, outermost first: number of pieces and block."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one mesh axis does to every operand and result."""

    kind: Literal["cut", "pass", "replicate"]
    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement, ...]
    name: str = ""
    """The factor that is cut, or the reduction that is passed."""
    block: int = 1
    """Steps of the factor that stay together."""
    is_even: bool = True
    divisors: tuple[int, ...] = ()
    """For each result, what a pending average divides its cotangent by; empty for nothing."""
    weighted: tuple[bool, ...] = ()
    """For each result, whether it is an average of uneven pieces; empty for none."""

    @property
    def gradients(self) -> tuple[Placement | None, ...]:
        """Where the operands' local gradients are; see [Note: choices] in propagate.py."""
        return tuple(None if p is None else self._gradient(p) for p in self.inputs)

    def _gradient(self, placement: Placement) -> Placement:
        if placement.is_shard():
            return placement
        if placement.is_partial() or self.kind == "replicate":
            return Replicate()
        return Partial("sum" if self.kind == "cut" else self.name)

    def __str__(self) -> str:
        if self.kind == "replicate":
            return "replicate"
        if self.kind == "pass":
            return f"pass {Partial(self.name)!r}"
        return f"cut {self.name}" + (f" in blocks of {self.block}" if self.block != 1 else "")


@lru_cache(maxsize=4096)
def pieces(size: int, cuts: Cuts) -> tuple[int, ...] | None:
    """Give the sizes that nested cuts leave, or None where a block does not divide.

    Example:
        >>> pieces(5, ((2, 1), (2, 1))), pieces(6, ((2, 2),)), pieces(5, ((2, 2),))
        ((2, 1, 1, 1), (4, 2), None)
    """
    held = [size]
    for count, block in cuts:
        if any(part % block for part in held):
            return None
        held = [piece for part in held for piece in chunk_sizes(part, count, block)]
    return tuple(held)


def cuts_of(placements: Sequence[Placement | None], mesh: Sequence[int], dim: int) -> Cuts:
    """List the cuts that the axes of a mesh make on one dim."""
    pairs = zip(mesh, placements, strict=False)
    return tuple((n, p.block) for n, p in pairs if isinstance(p, Shard) and p.dim == dim)


def offers(
    bound: BoundRule,
    mesh: tuple[int, ...],
    chosen: tuple[Choice, ...],
    blocks: Sequence[tuple[str, int]] = (),
) -> list[Choice]:
    """List the choices for the next mesh axis; see [Note: choices] in propagate.py.

    Args:
        bound: the rule on global shapes.
        mesh: the sizes of the mesh axes.
        chosen: the choices of the axes before.
        blocks: factors and blocks to cut them in, besides single steps.

    Returns:
        The choices: cuts in the order of the factors, passes, replicate.
    """
    found: list[Choice] = []
    for factor in bound.factors:
        wanted = [block for name, block in blocks if name == factor.name]
        for block in dict.fromkeys([1, *wanted]):
            cut = _cut(bound, factor, block, mesh, chosen)
            found += [] if cut is None else [cut]
    found += _passes(bound)
    whole = tuple(None if shape is None else Replicate() for shape in bound.shapes)
    found.append(Choice("replicate", whole, (Replicate(),) * len(bound.results)))
    return [choice for choice in found if _can_mix(choice, chosen)]


def _cut(
    bound: BoundRule,
    factor: Factor,
    block: int,
    mesh: tuple[int, ...],
    chosen: tuple[Choice, ...],
) -> Choice | None:
    rule, axis = bound.rule, len(chosen)
    before = [
        (mesh[i], c.block)
        for i, c in enumerate(chosen)
        if c.kind == "cut" and c.name == factor.name
    ]
    held = pieces(factor.size, (*before, (mesh[axis], block)))
    first_only = _first_rank_operands(bound, factor)
    if held is None or first_only is None or not _can_cut(bound, factor, held):
        return None

    def shard(place: Place, past: Sequence[Placement | None]) -> Shard:
        return _shard(place, held, block, cuts_of(past, mesh, place.dim), mesh[axis])

    inputs: list[Placement | None] = []
    for position, (shape, place) in enumerate(zip(bound.shapes, factor.operands, strict=True)):
        if shape is None:
            inputs.append(None)
        elif place is not None:
            inputs.append(shard(place, [c.inputs[position] for c in chosen]))
        else:
            inputs.append(Partial() if position in first_only else Replicate())
    is_even = len(set(held)) == 1
    # An average of uneven pieces is the sum of the pieces' averages, each times its share.
    weighted = tuple(
        place is None and rule.reduce == "avg" and not is_even for place in factor.results
    )
    outputs = tuple(
        Partial("sum" if weighted[i] else rule.reduce)
        if place is None
        else shard(place, [c.outputs[i] for c in chosen])
        for i, place in enumerate(factor.results)
    )
    return Choice(
        kind="cut",
        inputs=tuple(inputs),
        outputs=outputs,
        name=factor.name,
        block=block,
        is_even=is_even,
        divisors=tuple(mesh[axis] if p.is_partial("avg") else 1 for p in outputs),
        weighted=weighted,
    )


def _can_cut(bound: BoundRule, factor: Factor, held: tuple[int, ...]) -> bool:
    rule = bound.rule
    if not factor.is_cuttable:
        return False
    is_reduced = factor.is_contracted and rule.reduce != "sum"
    is_addressed = any(name == factor.name for name, _ in rule.index)
    is_grouped = any(p is not None and p.span != 1 for p in factor.operands + factor.results)
    # The op has no answer for an empty piece, or whole groups do not go round.
    return not (0 in held and (is_reduced or is_addressed or is_grouped or not rule.empty))


def _shard(place: Place, held: tuple[int, ...], block: int, cuts: Cuts, count: int) -> Shard:
    """Place a cut on a dim: in blocks only where plain chunks would cut through inner factors."""
    if place.span == 1:
        return Shard(place.dim, block)
    wanted = tuple(piece * place.span for piece in held)
    plain = pieces(sum(wanted), (*cuts, (count, 1)))
    return Shard(place.dim) if plain == wanted else Shard(place.dim, block * place.span)


def _first_rank_operands(bound: BoundRule, factor: Factor) -> frozenset[int] | None:
    """Find what must be kept on the first rank when a contracted factor is cut.

    Returns:
        One linear operand of each term that lacks the factor, or None if the cut is not possible.
    """
    rule = bound.rule
    if not factor.is_contracted or rule.reduce in ("avg", "max", "min"):
        return frozenset()
    found: set[int] = set()
    for term in rule.terms:
        if any(factor.operands[position] is not None for position in term):
            continue
        linear = _linear_tensors(bound, term)
        if not linear or rule.reduce != "sum" or factor.is_broadcast:
            return None
        if any(place is not None for place in factor.results):
            return None
        found.add(linear[0])
    return frozenset(found)


def _linear_tensors(bound: BoundRule, term: tuple[int, ...]) -> list[int]:
    return [i for i in term if i in bound.rule.linear and bound.shapes[i] is not None]


def _passes(bound: BoundRule) -> list[Choice]:
    options = [_linear_tensors(bound, term) for term in bound.rule.terms]
    found: list[Choice] = []
    for reduce_op, pending in product(("sum", "avg"), product(*options)):
        inputs = tuple(
            None if shape is None else Partial(reduce_op) if i in pending else Replicate()
            for i, shape in enumerate(bound.shapes)
        )
        outputs = (Partial(reduce_op),) * len(bound.results)
        found.append(Choice("pass", inputs, outputs, reduce_op))
    return found


def _can_mix(choice: Choice, chosen: tuple[Choice, ...]) -> bool:
    """Tell whether pending reductions of several axes commute (only sum and avg do)."""
    columns = zip(*(c.inputs + c.outputs for c in (*chosen, choice)), strict=True)
    for column in columns:
        pending = {p.reduce_op for p in column if isinstance(p, Partial)}
        if len(pending) > 1 and pending != {"sum", "avg"}:
            return False
    return True
