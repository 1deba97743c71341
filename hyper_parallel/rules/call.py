# SPDX-License-Identifier: Apache-2.0
"""Call: what a rule that depends on the call may see of it.

A function in a table takes a `Call` and returns a rule, never placements. Operands are listed in
the order of the op's own parameters: None stands for a python scalar where a tensor is allowed,
an operand that is absent (no bias) is left out, and a list of tensors is spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any, cast

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.errors import RuleError

__all__ = [
    "Argument",
    "Call",
    "Rule",
    "aligned",
    "alike",
    "along_dim",
    "letters",
    "over_dims",
    "reduced",
    "refuse",
    "spec",
]

Argument = bool | int | float | str | None | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Operand shapes and static arguments of one call; hashable.

    Example:
        >>> Call(((4, 6),), (("dim", -1),)).dim("dim")
        1
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    args: tuple[tuple[str, Argument], ...] = ()
    """Static arguments by torch's names; sequences as tuples."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first operand.

        Raises:
            RuleError: it is not a tensor.
        """
        return self.shape_of(0)

    def shape_of(self, operand: int) -> tuple[int, ...]:
        """Give an operand's shape.

        Raises:
            RuleError: it is absent, or not a tensor.
        """
        shape = self.shapes[operand] if operand < len(self.shapes) else None
        if shape is None:
            must = f"operand {operand} must be a tensor"
            raise RuleError("Call", must, "Pass a tensor", shapes=self.shapes)
        return shape

    def get(self, name: str, default: Argument = None) -> Argument:
        """Give a static argument, or `default` where the call leaves it out."""
        return dict(self.args).get(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """Give a static argument as a bool."""
        return bool(self.get(name, default))

    def number(self, name: str, default: int | None = None) -> int:
        """Give a static int argument.

        Raises:
            RuleError: it is missing and has no default, or it is not an int.
        """
        value = self.get(name, default)
        if not isinstance(value, int):
            fix = "Pass it as an int"
            raise RuleError("Call", f"{name} must be an int", fix, **{name: value})
        return value

    def numbers(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        """Give a static argument that is an int or a sequence of ints; `default` where left out.

        Raises:
            RuleError: it is something else.
        """
        value = self.get(name)
        if value is None or isinstance(value, bool):  # var(x, unbiased) has no dim
            return default
        values = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(entry, int) for entry in values):
            fix = "Pass ints"
            raise RuleError("Call", f"{name} must hold ints", fix, **{name: value})
        return cast("tuple[int, ...]", values)

    def dim(self, name: str, default: int | None = None, *, extra: int = 0) -> int:
        """Give a dim argument, made non-negative for the first operand's dims plus `extra`.

        Raises:
            RuleError: it is missing or out of range.
        """
        return self.normalize(self.number(name, default), extra=extra)

    def normalize(self, dim: int, *, extra: int = 0) -> int:
        """Make a dim of the first operand non-negative.

        Raises:
            RuleError: it is out of range.
        """
        ndim = max(len(self.shape) + extra, 1)  # torch takes 0 and -1 for a tensor of 0 dims
        if not -ndim <= dim < ndim:
            must = f"dim must be in [{-ndim}, {ndim})"
            raise RuleError("Call", must, "Pass a dim the tensor has", dim=dim)
        return dim % ndim

    def dims(self, name: str = "dim", default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Give dims of the first operand, made non-negative; all of them where left out or empty.

        Raises:
            RuleError: one is no int or out of range.
        """
        given = self.numbers(name, default)
        if not given:
            return tuple(range(len(self.shape)))
        return tuple(self.normalize(dim) for dim in given) if self.shape else ()


Rule = OpRule | Callable[[Call], OpRule]


def refuse(where: str, must: str, **found: object) -> RuleError:
    """Make the error of a call that a rule does not describe; it then runs on gathered operands."""
    return RuleError(where, must, "Move the operands first", **found)


def letters(count: int) -> list[str]:
    """Give `count` factor names.

    Example:
        >>> letters(3), letters(28)[-2:]
        (['a', 'b', 'c'], ['a1', 'b1'])
    """
    return [ascii_lowercase[i % 26] + (str(i // 26) if i >= 26 else "") for i in range(count)]


def spec(count: int, whole: tuple[int, ...] = ()) -> list[str]:
    """Name `count` dims in order, with `_` for those in `whole`.

    Example:
        >>> spec(3, (1,))
        ['a', '_', 'b']
    """
    names = iter(letters(count))
    return ["_" if dim in whole else next(names) for dim in range(count)]


def aligned(names: Sequence[str], shape: Sequence[int], full: Sequence[int]) -> str:
    """Name the dims of an operand that broadcasts to `full`; a broadcast dim is `1`.

    Example:
        >>> aligned(["m", "n"], (1, 4), (6, 4)), aligned(["m", "n"], (4,), (6, 4))
        ('1 n', 'n')
    """
    missing = len(full) - len(shape)
    sizes = zip(names[missing:], shape, full[missing:], strict=True)
    return " ".join("1" if size == 1 != whole else name for name, size, whole in sizes)


def reduced(names: Sequence[str], dims: Sequence[int], keepdim: bool) -> str:
    """Name the dims that are left when some are reduced.

    Example:
        >>> reduced(["a", "b"], (0,), True), reduced(["a", "b"], (0,), False)
        ('1 b', 'b')
    """
    kept = ["1" if dim in dims else name for dim, name in enumerate(names)]
    return " ".join(n for dim, n in enumerate(kept) if keepdim or dim not in dims)


def alike(dims: Sequence[str], operands: int = 1, results: int = 1, **flags: Any) -> OpRule:
    """Make the rule of an op whose operands and results all have these dims.

    Example:
        >>> alike(["a", "_"], 2)
        OpRule('a _, a _ -> a _')
    """
    text = " ".join(dims)
    return parse_rule(f"{', '.join([text] * operands)} -> {', '.join([text] * results)}", **flags)


def along_dim(
    call: Call, *, default: int | None = -1, operands: int = 1, results: int = 1, **flags: Any
) -> OpRule:
    """Make the rule of an op that works along one whole dim (`dim`) and keeps the shape."""
    names = spec(len(call.shape), (call.dim("dim", default),))
    return alike(names, operands, results, **flags)


def over_dims(call: Call, dims: Sequence[int], results: int = 1) -> OpRule:
    """Make the rule of an op that reduces whole dims."""
    names = spec(len(call.shape), tuple(dims))
    result = reduced(names, dims, call.flag("keepdim"))
    return parse_rule(f"{' '.join(names)} -> {', '.join([result] * results)}")
