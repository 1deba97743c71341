# SPDX-License-Identifier: Apache-2.0
"""Bind an op rule to shapes: which factors there are, their sizes, and where each one occurs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hyper_parallel.core.rule import Dim, OpRule, Spec, is_factor
from hyper_parallel.errors import RuleError

__all__ = ["BoundRule", "Factor", "Place", "Shape", "bind"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a factor sits in one tensor."""

    dim: int
    span: int
    """Elements of the dim that one step of the factor covers: 1 for a plain dim."""
    outermost: bool
    """Whether no factor of the dim is outside this one; only then a Shard can cut it."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor on concrete shapes."""

    name: str
    size: int
    operands: tuple[Place | None, ...]
    """Its place in each operand, None where the operand lacks it."""
    results: tuple[Place | None, ...]
    is_broadcast: bool
    """Whether it came from `...`, where an operand may lack it by broadcasting."""

    @property
    def is_cuttable(self) -> bool:
        """Whether a Shard can cut it in every tensor that has it."""
        return all(place is None or place.outermost for place in self.operands + self.results)

    @property
    def is_contracted(self) -> bool:
        """Whether some result lacks it."""
        return None in self.results


@dataclass(frozen=True, slots=True)
class BoundRule:
    """A rule on concrete operand shapes."""

    rule: OpRule
    shapes: tuple[Shape | None, ...]
    """Operand shapes; None for an operand that is not a tensor."""
    results: tuple[tuple[int | None, ...], ...]
    """Result shapes; None for a size that the rule leaves to the op (`_`)."""
    factors: tuple[Factor, ...]
    """In order of first occurrence, operands first."""


def bind(rule: OpRule, shapes: Sequence[Sequence[int] | None]) -> BoundRule:
    """Put a rule on operand shapes.

    Args:
        rule: the rule.
        shapes: the global shape of each operand; None for a python scalar. An operand that is
            absent (no bias) is left out here and in the rule.

    Returns:
        The bound rule.

    Raises:
        RuleError: the number of operands or dims does not fit, or a factor has two sizes.

    Example:
        >>> from hyper_parallel.core.rule import parse_rule
        >>> bound = bind(parse_rule("... k, n k -> ... n", linear=True), [(8, 4, 6), (10, 6)])
        >>> bound.results, [(f.name, f.size) for f in bound.factors]
        (((8, 4, 10),), [('...1', 8), ('...0', 4), ('k', 6), ('n', 10)])
    """
    where = f"rule {rule.text!r}"
    if len(shapes) != len(rule.operands):
        must = f"there must be {len(rule.operands)} operands"
        fix = "Pass one shape per operand, None for a python scalar, and leave absent operands out"
        raise RuleError(where, must, fix, shapes=tuple(shapes))
    fixed = tuple(None if shape is None else tuple(shape) for shape in shapes)
    specs = [_expand(where, rule, position, fixed) for position in range(len(fixed))]
    width = max((_width(spec) for spec in specs if spec is not None), default=0)
    results = [_with_ellipsis(spec, width) for spec in rule.results]
    sizes = _broadcast_sizes(where, specs, fixed) | dict(rule.sizes)
    _solve_sizes(where, specs, fixed, sizes)
    names = [name for spec in specs if spec is not None for dim in spec for name in dim]
    ordered = [name for name in dict.fromkeys(names) if is_factor(name)]
    held = {name for spec in results for dim in spec for name in dim if is_factor(name)}
    missing = held.difference(ordered)
    if missing:
        must = f"result factor {min(missing)!r} must occur in an operand that is a tensor"
        raise RuleError(where, must, "Pass that operand", shapes=fixed)
    factors = tuple(
        Factor(
            name=name,
            size=sizes[name],
            operands=tuple(
                None if spec is None else _place(spec, shape, name, sizes)
                for spec, shape in zip(specs, fixed, strict=True)
            ),
            results=tuple(_place(spec, None, name, sizes) for spec in results),
            is_broadcast=name.startswith("..."),
        )
        for name in ordered
    )
    result_shapes = tuple(tuple(_size(dim, sizes) for dim in spec) for spec in results)
    return BoundRule(rule, fixed, result_shapes, factors)


def _expand(
    where: str, rule: OpRule, position: int, shapes: tuple[Shape | None, ...]
) -> Spec | None:
    """Replace `...` in an operand by one factor per dim, numbered from the right."""
    shape, spec = shapes[position], rule.operands[position]
    if shape is None:
        return None
    width = len(shape) - len(spec) + 1 if ("...",) in spec else 0
    expanded = _with_ellipsis(spec, width)
    if width < 0 or len(expanded) != len(shape):
        must = f"operand {position} must have {len(spec) - (('...',) in spec)} dims"
        must += " or more" if ("...",) in spec else ""
        raise RuleError(where, must, "Use the rule for these shapes", shapes=shapes)
    for dim, size in zip(expanded, shape, strict=True):
        if dim == ("1",) and size != 1:
            must = f"operand {position} must have size 1 where the rule says 1"
            raise RuleError(where, must, "Use the rule for these shapes", shapes=shapes)
    return expanded


def _with_ellipsis(spec: Spec, width: int) -> Spec:
    dims: list[Dim] = []
    for dim in spec:
        if dim == ("...",):
            dims += [(f"...{k}",) for k in range(width - 1, -1, -1)]
        else:
            dims.append(dim)
    return tuple(dims)


def _width(spec: Spec) -> int:
    return sum(dim[0].startswith("...") for dim in spec)


def _broadcast_sizes(
    where: str, specs: list[Spec | None], shapes: tuple[Shape | None, ...]
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for spec, shape in zip(specs, shapes, strict=True):
        for dim, size in zip(spec or (), shape or (), strict=True):
            if dim[0].startswith("..."):
                known = sizes.setdefault(dim[0], size)
                if size != known and 1 not in (size, known):
                    must = f"dim {dim[0][3:]} from the right of '...' must broadcast"
                    fix = "Make the sizes equal, or 1"
                    raise RuleError(where, must, fix, shapes=shapes)
                sizes[dim[0]] = size if known == 1 else known
    return sizes


def _solve_sizes(
    where: str,
    specs: list[Spec | None],
    shapes: tuple[Shape | None, ...],
    sizes: dict[str, int],
) -> None:
    """Complete `sizes` from plain dims first, then from compound ones with one unknown."""
    todo = [
        (position, dim, size)
        for position, (spec, shape) in enumerate(zip(specs, shapes, strict=True))
        for dim, size in zip(spec or (), shape or (), strict=True)
        if is_factor(dim[0]) and not dim[0].startswith("...")
    ]
    todo.sort(key=lambda entry: len(entry[1]))
    for _ in range(len(todo) + 1):
        waiting: list[tuple[int, Dim, int]] = []
        for position, dim, size in todo:
            unknown = [name for name in dim if name not in sizes]
            known = prod(sizes[name] for name in dim if name in sizes)
            if len(unknown) > 1:
                waiting.append((position, dim, size))
            elif (unknown and size % max(known, 1)) or (not unknown and size != known):
                must = f"dim {' '.join(dim)!r} of operand {position} must fit the other sizes"
                raise RuleError(where, must, "Make the sizes agree", size=size, sizes=sizes)
            elif unknown and unknown[0] != "_":
                sizes[unknown[0]] = size // max(known, 1)
        todo = waiting
    if todo:
        must = f"the sizes in {' '.join(todo[0][1])!r} must be known"
        raise RuleError(where, must, "Write name=size in the rule", shapes=shapes)


def _place(spec: Spec, shape: Shape | None, name: str, sizes: dict[str, int]) -> Place | None:
    for position, dim in enumerate(spec):
        if name in dim:
            at = dim.index(name)
            if shape is not None and name.startswith("...") and shape[position] != sizes[name]:
                return None
            if shape is not None and len(dim) > 1:
                outside = prod(sizes[other] for other in dim[: at + 1])
                span = shape[position] // max(outside, 1)
            else:
                span = prod(sizes.get(other, 1) for other in dim[at + 1 :])
            return Place(position, span, at == 0)
    return None


def _size(dim: Dim, sizes: dict[str, int]) -> int | None:
    known = [1 if name == "1" else sizes.get(name) for name in dim]
    return None if None in known else prod(size for size in known if size is not None)
