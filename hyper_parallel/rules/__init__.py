# SPDX-License-Identifier: Apache-2.0
"""Op rules by neutral op name: the tables of this folder, and what users register."""

from __future__ import annotations

from hyper_parallel.core.rule import OpRule
from hyper_parallel.errors import RuleError, near_names
from hyper_parallel.rules import (
    index,
    join,
    linalg,
    loss,
    matmul,
    norm,
    npu,
    pointwise,
    reduce,
    shape,
    vision,
)
from hyper_parallel.rules.call import Call, Rule

__all__ = ["Call", "Rule", "find", "lookup", "names", "register", "rules_version"]

_ROOMS = (pointwise, matmul, norm, loss, reduce, shape, join, index, vision, linalg, npu)
_RULES: dict[str, Rule] = {name: rule for room in _ROOMS for name, rule in room.RULES.items()}
_version = [0]


def lookup(name: str) -> Rule:
    """Give an op's rule, or the function that makes one from a call.

    Raises:
        RuleError: no rule has this name.

    Example:
        >>> lookup("mm").text
        'm k, k n -> m n'
    """
    found = _RULES.get(name)
    if found is None:
        near = near_names(name, names())
        fix = f"Use one of {near}, or register a rule" if near else "Register a rule"
        raise RuleError("lookup", "the op must have a rule", fix, name=name)
    return found


def find(name: str, call: Call) -> OpRule:
    """Give an op's rule for one call.

    Args:
        name: the op.
        call: operand shapes and static arguments.

    Returns:
        The rule, ready to be bound to `call.shapes`.

    Raises:
        RuleError: no rule has this name, or the call does not fit it.

    Example:
        >>> find("softmax", Call(((2, 3, 4),), (("dim", 1),)))
        OpRule('a _ b -> a _ b')
    """
    rule = lookup(name)
    return rule if isinstance(rule, OpRule) else rule(call)


def register(name: str, rule: Rule, *, replace: bool = False) -> None:
    """Add a rule for an op.

    Args:
        name: the op.
        rule: a rule from `parse_rule`, or a function from a `Call` to one.
        replace: allow an op that has a rule already.

    Raises:
        RuleError: the op has a rule already and `replace` is False.
    """
    if name in _RULES and not replace:
        fix = "Pass replace=True to put yours in its place"
        raise RuleError("register", "the op must have no rule yet", fix, name=name)
    _RULES[name] = rule
    _version[0] += 1


def rules_version() -> int:
    """Give a number that changes with each registration, for keys of cached decisions."""
    return _version[0]


def names() -> list[str]:
    """List the ops that have a rule, sorted."""
    return sorted(_RULES)
