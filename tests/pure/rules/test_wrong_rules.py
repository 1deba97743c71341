# SPDX-License-Identifier: Apache-2.0
"""The brute-force checker must refuse wrong rules; otherwise its silence proves nothing."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.rule import parse_rule


def _softmax(x):
    powers = np.exp(x)
    return powers / powers.sum(axis=-1, keepdims=True)


def _causal(q, k, v):
    scores = q @ k.swapaxes(-1, -2)
    return _softmax(np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -1e30)) @ v


def _lookup(positions, weight):
    return weight[np.minimum(positions, len(weight) - 1)]


WRONG = {
    "square is not linear": (parse_rule("... -> ...", linear=True), np.square, [(4, 8)]),
    "softmax mixes its dim": (parse_rule("... -> ..."), _softmax, [(4, 8)]),
    "division is not linear in the divisor": (
        parse_rule("..., ... -> ...", linear=True), np.divide, [(4, 8), (4, 8)]),
    "addition is not linear in one operand alone": (
        parse_rule("..., ... -> ...", linear=True), np.add, [(4, 8), (4, 8)]),
    "a product is not linear in both together": (
        parse_rule("... + ... -> ...", linear=True), np.multiply, [(4, 8), (4, 8)]),
    "a bias is added once": (
        parse_rule("... k, n k, n -> ... n", linear=True),
        lambda x, w, b: x @ w.T + b, [(4, 8), (8, 8), (8,)]),
    "the contracted dim is not a batch dim": (
        parse_rule("k n, k n -> k n"), lambda x, y: x @ y, [(8, 8), (8, 8)]),
    "a maximum is not a sum": (parse_rule("a b -> a"), lambda x: x.max(1), [(4, 8)]),
    "a mean is not a sum": (parse_rule("a b -> a"), lambda x: x.mean(1), [(4, 8)]),
    "a sum is not an average": (parse_rule("a b -> a", reduce="avg"), lambda x: x.sum(1), [(4, 8)]),
    "causal rows know their position": (
        parse_rule("b s _, b _ _, b _ e -> b s e"), _causal, [(4, 8, 4), (4, 8, 4), (4, 8, 4)]),
    "key rows are mixed by softmax": (
        parse_rule("s d, t d, t e -> s e"), lambda q, k, v: _softmax(q @ k.T) @ v,
        [(4, 4), (8, 4), (8, 4)]),
    "a variance is not pieced together": (parse_rule("a b -> a"), lambda x: x.var(1), [(4, 8)]),
    "cumsum runs along its dim": (parse_rule("a b -> a b"), lambda x: x.cumsum(1), [(4, 8)]),
    "a transpose moves its dims": (parse_rule("a b -> a b"), np.transpose, [(8, 8)]),
    "a flattened dim is cut by its outer factor": (
        parse_rule("a=4 b=8 -> (b a)", linear=True), lambda x: x.reshape(-1), [(4, 8)]),
    "one outer factor is not the other": (
        parse_rule("(h g=2) s, h s -> (h g) s"), lambda q, k: q + np.tile(k, (2, 1)),
        [(8, 4), (4, 4)]),
    "a joined dim is whole": (
        parse_rule("a b + a b -> a b", linear=True), lambda x, y: np.concatenate([x, y], 1),
        [(4, 8), (4, 8)]),
    "positions need a shift": (parse_rule("i, v h -> i h", linear=(1,)), _lookup, [(4,), (8, 4)]),
    "rows are added to what is kept once": (
        parse_rule("v b, i b -> v b"), lambda x, y: x + y.sum(0), [(4, 8), (8, 8)]),
    "what is overwritten is not added": (
        parse_rule("v b + i b -> v b", linear=True), lambda x, y: np.vstack([y[-1:], x[1:]]),
        [(4, 8), (8, 8)]),
    "a convolution mixes its window": (
        parse_rule("n h, _ -> n h"),
        lambda x, w: np.apply_along_axis(np.convolve, 1, x, w, "same"), [(4, 8), (3,)]),
    "a tiled dim is not repeated in place": (
        parse_rule("b -> (b _=2)", linear=True), lambda x: np.tile(x, 2), [(8,)]),
    "a rolled dim is whole": (parse_rule("b -> b", linear=True), lambda x: np.roll(x, 1), [(8,)]),
    "an index takes from the whole dim": (
        parse_rule("v b -> b", linear=True), lambda x: x[-1], [(8, 4)]),
    "groups are not channels": (
        parse_rule("(c g=2) s -> (c g) s"),
        lambda x: (x.reshape(2, -1, 4) - x.reshape(2, -1, 4).mean(1, keepdims=True)).reshape(8, 4),
        [(8, 4)]),
    "a norm is not a sum": (parse_rule("a b -> a"), lambda x: np.sqrt((x * x).sum(1)), [(4, 8)]),
    "a factor must be cut at least once": (
        parse_rule("a b -> a", reduce="max"), lambda x: x.max(1), [(4, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_is_refused(name: str, count: int, check) -> None:
    rule, op, shapes = WRONG[name]
    rng = np.random.default_rng(1)
    operands = [rng.uniform(0.5, 1.5, shape) for shape in shapes]
    if name == "positions need a shift":
        operands[0] = np.array([7, 1, 5, 3])
    _, wrong = check(rule, lambda context, *values: op(*values), operands, count)
    assert wrong
