# SPDX-License-Identifier: Apache-2.0
"""Binding of rules to shapes."""

from __future__ import annotations

import pytest

from hyper_parallel.core.factor import Place, bind
from hyper_parallel.core.rule import parse_rule
from hyper_parallel.errors import RuleError


def _factors(bound) -> dict[str, int]:
    return {factor.name: factor.size for factor in bound.factors}


def test_bind_ellipsis_aligns_right_and_broadcasts() -> None:
    bound = bind(parse_rule("... + ... -> ..."), [(4, 1, 8), (5, 8)])
    assert _factors(bound) == {"...2": 4, "...1": 5, "...0": 8}
    assert bound.results == ((4, 5, 8),)
    first, second, third = bound.factors
    assert first.operands == (Place(0, 1, True), None)
    assert second.operands == (None, Place(0, 1, True))
    assert third.operands == (Place(2, 1, True), Place(1, 1, True))


def test_bind_size_one_everywhere_is_a_factor() -> None:
    bound = bind(parse_rule("..., ... -> ..."), [(1, 8), (8,)])
    assert bound.factors[0].operands == (Place(0, 1, True), None)


def test_bind_compound_solves_sizes_from_other_operands() -> None:
    bound = bind(parse_rule("b (k g) s, b k s -> b (k g) s"), [(2, 12, 5), (2, 4, 5)])
    assert _factors(bound) == {"b": 2, "k": 4, "g": 3, "s": 5}
    k, g = bound.factors[1:3]
    assert k.operands == (Place(1, 3, True), Place(1, 1, True))
    assert g.operands == (Place(1, 1, False), None)
    assert k.is_cuttable and not g.is_cuttable
    assert bound.results == ((2, 12, 5),)


def test_bind_compound_with_written_sizes_and_whole_part() -> None:
    bound = bind(parse_rule("(a=2 _=3) _=4 -> (a=2 _=2) _=6"), [(6, 4)])
    assert bound.factors[0].operands == (Place(0, 3, True),)
    assert bound.factors[0].results == (Place(0, 2, True),)
    assert bound.results == ((4, 6),)


def test_bind_unknown_result_sizes_and_contraction() -> None:
    bound = bind(parse_rule("a k, _ -> a _, a"), [(4, 3), (7,)])
    assert bound.results == ((4, None), (4,))
    assert [f.is_contracted for f in bound.factors] == [False, True]


def test_bind_scalar_operand_has_no_factor() -> None:
    bound = bind(parse_rule("... + ... -> ..."), [(4,), None])
    assert bound.factors[0].operands == (Place(0, 1, True), None)
    assert bound.shapes == ((4,), None)


@pytest.mark.parametrize(
    ("text", "shapes", "must"),
    [
        ("a, a -> a", [(4,)], "there must be 2 operands"),
        ("a b -> a", [(4,)], "operand 0 must have 2 dims"),
        ("... a b -> a", [(4,)], "operand 0 must have 2 dims or more"),
        ("a, a -> a", [(4,), (5,)], "dim 'a' of operand 1 must fit the other sizes"),
        ("..., ... -> ...", [(4,), (5,)], "dim 0 from the right of '...' must broadcast"),
        ("a 1 -> a", [(4, 2)], "must have size 1 where the rule says 1"),
        ("(a b) -> a b", [(6,)], "the sizes in 'a b' must be known"),
        ("(a=4 b) -> a b", [(6,)], "dim 'a b' of operand 0 must fit"),
        ("a=4 -> a", [(6,)], "dim 'a' of operand 0 must fit"),
        (
            "a, b -> a b",
            [(6,), None],
            "result factor 'b' must occur in an operand that is a tensor",
        ),
    ],
)
def test_bind_wrong_shapes(text: str, shapes: list, must: str) -> None:
    with pytest.raises(RuleError) as info:
        bind(parse_rule(text), shapes)
    assert must in str(info.value)
