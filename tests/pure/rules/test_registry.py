# SPDX-License-Identifier: Apache-2.0
"""Looking up and registering rules, and calls that a generator refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hyper_parallel import rules
from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.errors import RuleError
from hyper_parallel.rules import Call, find, lookup, names, register


@pytest.fixture
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))


def test_lookup_unknown_names_the_near_ones() -> None:
    with pytest.raises(RuleError, match=r"must have a rule, but got name='sofmax'.*softmax"):
        lookup("sofmax")


@pytest.mark.usefixtures("_clean")
def test_register_then_find() -> None:
    rule = parse_rule("b s d, d -> b s d")
    register("my_op", rule)
    assert find("my_op", Call(((2, 3, 4), (4,)))) is rule
    assert "my_op" in names()


@pytest.mark.usefixtures("_clean")
def test_register_twice_needs_replace() -> None:
    with pytest.raises(RuleError, match="must have no rule yet, but got name='add'"):
        register("add", parse_rule("... -> ..."))
    register("add", parse_rule("... -> ..."), replace=True)
    assert lookup("add") == parse_rule("... -> ...")


def test_find_is_pure_and_returns_rules() -> None:
    call = Call(((4, 6),), (("dim", -1), ("keepdim", True)))
    assert isinstance(find("sum", call), OpRule)
    assert find("sum", call) == find("sum", call)
    assert find("sum", call).text == "a b -> a 1"


@pytest.mark.parametrize(
    ("name", "shapes", "args", "must"),
    [
        ("softmax", ((4, 6),), {"dim": 2}, r"dim must be in \[-2, 2\), but got dim=2"),
        ("softmax", ((4, 6),), {"dim": "x"}, "dim must be an int, but got dim='x'"),
        ("softmax", (None,), {}, "operand 0 must be a tensor"),
        ("sum", ((4, 6),), {"dim": (0, "x")}, "dim must hold ints"),
        ("permute", ((4, 6),), {"dims": (0, 0)}, "dims must name every dim once"),
        ("reshape", ((4, 6),), {"shape": (5, 5)}, "the number of elements must stay"),
        ("reshape", ((4, 6),), {"shape": (-1, -1)}, "at most one size may be -1"),
        ("reshape", ((4, 6),), {"shape": (-1, 5)}, "the rest must divide 24"),
    ],
)
def test_find_wrong_call(name: str, shapes: tuple, args: dict, must: str) -> None:
    with pytest.raises(RuleError, match=must):
        find(name, Call(shapes, tuple(args.items())))


def test_rules_import_no_framework() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; "
        "import hyper_parallel.rules, hyper_parallel.core.propagate"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
