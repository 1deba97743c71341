# SPDX-License-Identifier: Apache-2.0
"""Brute force: every choice of every rule gives the whole op's values and gradients.

The checker is in tests/support/brute.py; wrong rules show that it finds what is wrong.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import rules
from hyper_parallel.core.rule import parse_rule
from hyper_parallel.rules import names
from support.brute import check, noted
from support.op_calls import CALLS, RANDOM_CALLS, UNEVEN, OpCall

OWN = frozenset(names())  # before any test registers one


def test_every_rule_is_called() -> None:
    assert set(CALLS) | set(RANDOM_CALLS) == OWN
    # At least one call of each is compared.
    assert not [name for name, cases in CALLS.items() if not any(map(noted, cases))]


def returns(path: Path) -> set[tuple[str, int]]:
    """List the lines of a file on which a function gives something."""
    found = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Return))
    return {(str(path), node.lineno) for node in found}


@pytest.mark.filterwarnings("ignore")
def test_every_rule_that_a_function_may_give_is_given_in_a_call() -> None:
    families = {str(p) for p in Path(rules.__file__).parent.glob("*.py")}
    families -= {p for p in families if p.endswith(("__init__.py", "call.py"))}
    seen = set()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in families:
            return None
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for case in itertools.chain(*CALLS.values(), (call for call, _ in RANDOM_CALLS.values())):
            noted(case)
    finally:
        sys.settrace(before)
    missing = set().union(*(returns(Path(path)) for path in families)) - seen
    assert not sorted(missing)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_rule_every_choice_gives_the_whole_op(name: str, count: int) -> None:
    for case in CALLS[name]:
        op = noted(case)
        if op is None:
            continue
        assert op.name == name, f"{case.shapes}: the call is one of {op.name}"
        wrong = check(op, count)
        assert not wrong, f"{op.bound.rule} on {case.shapes}: {wrong}"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_rule_holds_for_uneven_pieces_and_pieces_without_elements(name: str) -> None:
    for case in CALLS[name]:
        op = noted(case, UNEVEN)
        if op is not None:
            wrong = check(op, 4, check_cut=False)
            assert not wrong, f"{op.bound.rule} on {case.shapes}: {wrong}"


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", RANDOM_CALLS)
def test_random_rule_every_choice_draws_as_the_whole_op(name: str, count: int) -> None:
    case, holds = RANDOM_CALLS[name]
    op = noted(case)
    assert op is not None and op.name == name
    wrong = check(op, count, holds=holds)
    assert not wrong, f"{op.bound.rule} on {case.shapes}: {wrong}"


def wrong(text: str, op: Callable[..., Any], shapes: str, kinds: str = "f", **flags: Any) -> Any:
    return OpCall(op, shapes, kinds), parse_rule(text, **flags)


WRONG = {
    "values are right, gradients are not": wrong(
        "..., ... -> ...", torch.polar, "ab ab", "pf", linear=(0,)),
    "groups stay as many": wrong(
        "n c _, o _ _ -> n o _", partial(F.conv1d, groups=4), "a85 823"),
    "positions are not shifted": wrong(
        "v b, i -> i b", lambda x, i: x.index_select(0, i), "ab d", "fi", linear=(0,)),
    "what is overwritten is not added": wrong(
        "v b + i, i b -> v b", lambda x, i, y: x.index_copy(0, i, y), "ab d db", "fif",
        linear=(0, 2)),
    "experts are told apart by offsets": wrong(
        "t k, e k n, e -> t n", lambda x, w, n: F.grouped_mm(x, w, offs=n), "8e 4ee 4", "wwe"),
    "a mean with weights is not a mean of means": wrong(
        "n _, n, _ ->", lambda x, y, w: F.cross_entropy(x, y, w), "eb e b", "fiP", reduce="avg"),
    "statistics of a batch are not those of its pieces": wrong(
        "n c _, c, c, c, c -> n c _", lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, True),
        "abc b b b b", "fFPff"),
    "a softmax mixes its dim": wrong("a b -> a b", lambda x: x.softmax(1), "ab"),
    "a window mixes its signal": wrong("a b -> a b _", lambda x: x.unfold(1, 3, 1), "ab"),
    "the first channels are not all channels": wrong(
        "n c _ _ -> n c _ _", lambda x: F.local_response_norm(x, 3), "abcd"),
    "a chosen position counts from the first rank": wrong(
        "a b -> a", lambda x: x.argmax(1), "ab", reduce="max"),
}  # fmt: skip


WRONG_RANDOM = {
    "what is dropped to a level is not linear": ("alpha_dropout", "... -> ...", {"linear": True}),
    "channels are dropped together": ("dropout2d", "n c h w -> n c h w", {}),
    "a draw follows its own part": ("bernoulli", "a b -> b a", {}),
}


@pytest.mark.parametrize("name", WRONG_RANDOM)
def test_wrong_random_rule_is_refused(name: str) -> None:
    op, text, flags = WRONG_RANDOM[name]
    case, holds = RANDOM_CALLS[op]
    made = noted(case, rule=parse_rule(text, **flags))
    assert made is not None
    assert check(made, 2, holds=holds)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore")
def test_wrong_rule_is_refused(name: str, count: int) -> None:
    case, rule = WRONG[name]
    op = noted(case, rule=rule)
    assert op is not None
    assert check(op, count)
