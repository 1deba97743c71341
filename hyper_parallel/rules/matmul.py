# SPDX-License-Identifier: Apache-2.0
"""Rules of matrix products: a cut contracted dim leaves a pending sum."""

from __future__ import annotations

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Call, Rule

__all__ = ["RULES"]


def linear(call: Call) -> OpRule:
    """Linear layer with or without bias, weight `[out, in]`."""
    bias = " + n" if len(call.shapes) == 3 else ""
    return parse_rule(f"... k, n k{bias} -> ... n", linear=True)


def matmul(call: Call) -> OpRule:
    """Product of vectors, matrices, or batches of matrices with broadcasting."""
    left, right = (len(shape or ()) for shape in call.shapes)
    if left == 1:
        text = "k, k -> " if right == 1 else "k, ... k n -> ... n"
    else:
        text = "... k, k -> ..." if right == 1 else "... m k, ... k n -> ... m n"
    return parse_rule(text, linear=True)


def addmm(call: Call) -> OpRule:
    """Bias plus product; a bias of size 1 in a dim is broadcast over it."""
    return parse_rule(f"{_bias(call, 'm n')} + m k, k n -> m n", linear=True)


def baddbmm(call: Call) -> OpRule:
    """Bias plus batch of products."""
    return parse_rule(f"{_bias(call, 'b m n')} + b m k, b k n -> b m n", linear=True)


def _bias(call: Call, dims: str) -> str:
    bias, left, right = (shape or () for shape in call.shapes)
    result = (*left[:-1], *right[-1:])
    names = dims.split()[len(result) - len(bias) :]
    sizes = zip(names, bias, result[len(result) - len(bias) :], strict=True)
    return " ".join("1" if size == 1 != full else name for name, size, full in sizes)


RULES: dict[str, Rule] = {
    "linear": linear,
    "matmul": matmul,
    "mm": parse_rule("m k, k n -> m n", linear=True),
    "bmm": parse_rule("b m k, b k n -> b m n", linear=True),
    "mv": parse_rule("m k, k -> m", linear=True),
    "dot": parse_rule("k, k -> ", linear=True),
    "outer": parse_rule("m, n -> m n", linear=True),
    "addmm": addmm,
    "baddbmm": baddbmm,
}
