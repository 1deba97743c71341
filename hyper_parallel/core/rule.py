# SPDX-License-Identifier: Apache-2.0
"""The op-rule language: one line that says how an op may be cut, and its parser.

[Note: op rules]

    rule     = term { "+" term } "->" result { "," result }
    term     = operand { "," operand }    "," multiplies, "+" adds
    operand  = { dim }
    dim      = name | "..." | whole | "1" | "(" name { name | whole } ")"
    name     = letter { letter | digit | "_" } [ "=" size ]
    whole    = "_" [ "=" size ]

* A name is a factor: running the op on chunks of it gives chunks of the results. All tensors that
  have the factor are cut together, the others are replicated.
* A factor that a result lacks is contracted: cut, that result is Partial (`reduce` says which).
* `_` is whole on every rank. `1` is a dim of size 1. `...` is any number of leading factors,
  aligned at the right, with broadcasting: a size-1 or missing dim lacks the factor.
* `(g f)` is one dim made of two factors, g outermost. Only the outermost can be cut.
* `name=size` gives a size that the shapes alone do not tell: `(h=4 d) -> h d`.
* `linear`: the result is linear in each of these operands, and together in all terms, so a
  pending sum may pass. `index={"v": 1}`: factor v is addressed by the values of operand 1, or by
  a static argument (-1).
  `random`: values differ between shards. `local`: arguments that are global sizes.
  `empty=False`: the op has no answer for an empty piece, so no dim is cut in more than it has.

`factor.bind` puts a rule on shapes, `propagate` decides placements; all are pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hyper_parallel.core.placement import REDUCE_OPS
from hyper_parallel.errors import RuleError

__all__ = ["Dim", "OpRule", "Spec", "is_factor", "parse_rule"]

Dim = tuple[str, ...]
"""One dim as its factors, outermost first: `("k",)`, `("g", "f")`, `("...",)`, `("_",)`."""
Spec = tuple[Dim, ...]
"""The dims of one operand or result."""

_TOKEN = re.compile(r"\s*(->|\.\.\.|[+,()]|[A-Za-z]\w*(?:=\d+)?|_(?:=\d+)?(?!\w)|1(?!\w))", re.A)
_Token = tuple[str, int]


@dataclass(frozen=True, slots=True)
class OpRule:
    """One op's sharding contract; see [Note: op rules]. Make one with `parse_rule`."""

    text: str
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    terms: tuple[tuple[int, ...], ...]
    """Positions of the operands of each term."""
    reduce: str
    linear: tuple[int, ...]
    """Positions of the operands that the results are linear in."""
    index: tuple[tuple[str, int], ...]
    random: bool
    local: tuple[str, ...]
    empty: bool
    """Whether the op has an answer for an empty piece."""
    sizes: tuple[tuple[str, int], ...]
    """Sizes written in the text."""

    def __repr__(self) -> str:
        flags = [f"reduce={self.reduce!r}"] if self.reduce != "sum" else []
        flags += [f"linear={self.linear}"] if self.linear else []
        flags += [f"index={dict(self.index)}"] if self.index else []
        flags += ["random=True"] if self.random else []
        return f"OpRule({', '.join([repr(self.text), *flags])})"


def is_factor(name: str) -> bool:
    """Tell whether a name in a dim stands for a factor, not for `_` or `1`."""
    return name != "1" and not name.startswith("_")


def parse_rule(  # noqa: PLR0913  # each flag is a word of the language
    text: str,
    *,
    reduce: str = "sum",
    linear: bool | Sequence[int] = False,
    index: Mapping[str, int] | None = None,
    random: bool = False,
    local: Sequence[str] = (),
    empty: bool = True,
) -> OpRule:
    """Read a rule line; see [Note: op rules].

    Args:
        text: the rule, for example `"... k, n k + n -> ... n"`.
        reduce: the reduction that a cut contracted factor leaves pending.
        linear: True for all operands, or the positions of the linear ones.
        index: for a factor, the position of the operand whose values address it; -1 for a static
            argument.
        random: whether the op draws random numbers.
        local: names of arguments that are global sizes and must be rewritten per rank.
        empty: whether the op has an answer for an empty piece.

    Returns:
        The rule.

    Raises:
        RuleError: the text or a flag is malformed.

    Example:
        >>> parse_rule("... k, n k + n -> ... n", linear=True).terms
        ((0, 1), (2,))
    """
    tokens = _tokenize(text)
    sides = _split(tokens, "->")
    if len(sides) != 2:
        arrows = [at for token, at in tokens if token == "->"]
        at = arrows[1] if arrows else len(text)
        raise _malformed(text, "there must be exactly one '->'", at, "Write operands -> results")
    operands: list[Spec] = []
    terms: list[tuple[int, ...]] = []
    sizes: dict[str, int] = {}
    for term in _split(sides[0], "+"):
        specs = [_read_dims(text, part, sizes) for part in _split(term, ",")]
        terms.append(tuple(range(len(operands), len(operands) + len(specs))))
        operands += specs
    results = tuple(_read_dims(text, part, sizes) for part in _split(sides[1], ","))
    every = range(len(operands)) if linear is True else ()
    rule = OpRule(
        text=" ".join(text.split()),
        operands=tuple(operands),
        results=results,
        terms=tuple(terms),
        reduce=reduce,
        linear=tuple(every if isinstance(linear, bool) else linear),
        index=tuple(sorted((index or {}).items())),
        random=random,
        local=tuple(local),
        empty=empty,
        sizes=tuple(sorted(sizes.items())),
    )
    _check_names(rule, tokens)
    _check_flags(rule)
    return rule


def _tokenize(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            position += len(text[position:]) - len(text[position:].lstrip())
            must = "a dim must be a name, '...', '_', '1' or '(name name)'"
            raise _malformed(text, must, position, "Rewrite this part of the rule")
        tokens.append((match.group(1), match.start(1)))
        position = match.end()
    return tokens


def _split(tokens: list[_Token], separator: str) -> list[list[_Token]]:
    parts: list[list[_Token]] = [[]]
    for token in tokens:
        if token[0] == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _read_dims(text: str, tokens: list[_Token], sizes: dict[str, int]) -> Spec:
    dims: list[Dim] = []
    inside: list[str] | None = None
    for token, at in tokens:
        if token in ("+", "("):
            if token == "+" or inside is not None:
                must = "results take no '+' and parentheses do not nest"
                raise _malformed(text, must, at, f"Remove {token!r}")
            inside = []
        elif token == ")":
            if inside is None or len(inside) < 2:
                must = "'(' and ')' must hold at least two names"
                raise _malformed(text, must, at, "Write '(outer inner)'")
            dims.append(tuple(inside))
            inside = None
        elif inside is None:
            dims.append((_read_name(text, token, at, sizes),))
        else:
            if token in ("...", "1") or (token[0] == "_" and not inside):
                must = "parentheses must hold names, the first one cuttable"
                raise _malformed(text, must, at, f"Take {token!r} out")
            inside.append(_read_name(text, token, at, sizes))
    if inside is not None:
        at = tokens[-1][1]
        raise _malformed(text, "every '(' must be closed", at, "Write '(outer inner)'")
    return tuple(dims)


def _read_name(text: str, token: str, at: int, sizes: dict[str, int]) -> str:
    name, _, size = token.partition("=")
    name = token if name == "_" else name
    if size and sizes.setdefault(name, int(size)) != int(size):
        must = f"factor {name} must have one size ({sizes[name]})"
        raise _malformed(text, must, at, "Give the size once")
    return name


def _check_names(rule: OpRule, tokens: list[_Token]) -> None:
    known = {name for spec in rule.operands for dim in spec for name in dim}
    first_result = next(at for token, at in tokens if token == "->")
    for side, specs in (("operand", rule.operands), ("result", rule.results)):
        for position, spec in enumerate(specs):
            names = [name for dim in spec for name in dim if is_factor(name)]
            for name in sorted({name for name in names if names.count(name) > 1}):
                must = f"{name!r} must occur once in {side} {position} (a diagonal is not a cut)"
                raise _malformed(rule.text, must, 0, "Use another name, or '_'")
    for spec in rule.results:
        for name in (name for dim in spec for name in dim):
            if name not in known and is_factor(name):
                must = f"result factor {name!r} must occur in an operand"
                raise _malformed(rule.text, must, first_result, "Write '_' for a dim that is new")


def _check_flags(rule: OpRule) -> None:
    count = len(rule.operands)
    plain = {name for spec in rule.operands for dim in spec if len(dim) == 1 for name in dim}
    if rule.reduce not in REDUCE_OPS:
        fix = f"Use one of {', '.join(REDUCE_OPS)}"
        raise _wrong(rule.text, "reduce must be a reduction", fix, reduce=rule.reduce)
    if rule.linear and rule.reduce not in ("sum", "avg"):
        must = "a linear rule must reduce by sum or avg"
        raise _wrong(rule.text, must, "Drop linear", reduce=rule.reduce)
    if any(not 0 <= position < count for position in rule.linear):
        must = f"linear must hold operand positions below {count}"
        raise _wrong(rule.text, must, "Count operands from 0", linear=rule.linear)
    for name, position in rule.index:
        if name not in plain or not name[0].isalpha() or not -1 <= position < count:
            must = f"index must map a plain factor to -1 or an operand position below {count}"
            raise _wrong(rule.text, must, "Correct index", index=dict(rule.index))


def _malformed(text: str, must: str, at: int, fix: str) -> RuleError:
    return _wrong(text, must, fix, column=at, rest=text[at:])


def _wrong(text: str, must: str, fix: str, **got: object) -> RuleError:
    return RuleError(f"rule {text!r}", must, fix, **got)
