# SPDX-License-Identifier: Apache-2.0
"""Parsing of rule lines, and refusals of malformed ones."""

from __future__ import annotations

import pytest

from hyper_parallel.core.rule import parse_rule
from hyper_parallel.errors import RuleError


def test_parse_rule_linear_with_bias() -> None:
    rule = parse_rule("... k, n k + n -> ... n", linear=True)
    assert rule.terms == ((0, 1), (2,))
    assert rule.operands == ((("...",), ("k",)), (("n",), ("k",)), (("n",),))
    assert rule.results == ((("...",), ("n",)),)
    assert rule.linear == (0, 1, 2)


def test_parse_rule_compound_whole_one_and_sizes() -> None:
    rule = parse_rule("b (h=4 g) _ 1 -> b (h _=3), _=7")
    assert rule.operands == ((("b",), ("h", "g"), ("_",), ("1",)),)
    assert rule.results == ((("b",), ("h", "_=3")), (("_=7",),))
    assert dict(rule.sizes) == {"h": 4, "_=3": 3, "_=7": 7}


def test_parse_rule_empty_operand_and_result() -> None:
    rule = parse_rule(" + m k, k n -> ")
    assert rule.operands[0] == ()
    assert rule.results == ((),)


def test_parse_rule_gives_equal_values_that_hash() -> None:
    first, second = parse_rule("... -> ...", index={}), parse_rule(" ...  -> ... ")
    assert first == second and hash(first) == hash(second)


def test_parse_rule_repr_is_what_one_types() -> None:
    rule = parse_rule("i,  v h -> i h", index={"v": 0}, linear=(1,))
    assert repr(rule) == "OpRule('i, v h -> i h', linear=(1,), index={'v': 0})"


@pytest.mark.parametrize(
    ("text", "must", "column"),
    [
        ("a b", "exactly one '->'", 3),
        ("a -> b -> c", "exactly one '->'", 7),
        ("a ? -> a", "a dim must be a name", 2),
        ("a 2 -> a", "a dim must be a name", 2),
        ("a .. -> a", "a dim must be a name", 2),
        ("(a) -> a", "at least two names", 2),
        ("a) -> a", "at least two names", 1),
        ("(a b -> a", "every '(' must be closed", 3),
        ("(a (b c)) -> a", "do not nest", 3),
        ("(_ a) -> a", "the first one cuttable", 1),
        ("(... a) -> a", "the first one cuttable", 1),
        ("a -> a + a", "results take no '+'", 7),
        ("a a -> a", "'a' must occur once in operand 0", 0),
        ("... a ... -> a", "'...' must occur once in operand 0", 0),
        ("a -> b", "result factor 'b' must occur in an operand", 2),
        ("a=2, a=3 -> a", "must have one size (2)", 5),
    ],
)
def test_parse_rule_malformed(text: str, must: str, column: int) -> None:
    with pytest.raises(RuleError) as info:
        parse_rule(text)
    assert must in str(info.value)
    assert f"column={column}" in str(info.value)


@pytest.mark.parametrize(
    ("flags", "must"),
    [
        ({"reduce": "median"}, "reduce must be a reduction"),
        ({"reduce": "max", "linear": True}, "a linear rule must reduce by sum or avg"),
        ({"linear": (2,)}, "operand positions below 2"),
        ({"index": {"z": 0}}, "index must map a plain factor"),
        ({"index": {"a": 5}}, "index must map a plain factor"),
        ({"index": {"...": 0}}, "index must map a plain factor"),
    ],
)
def test_parse_rule_wrong_flags(flags: dict, must: str) -> None:
    with pytest.raises(RuleError, match=must):
        parse_rule("... a, a -> ...", **flags)
