# SPDX-License-Identifier: Apache-2.0
"""Brute force in NumPy: every choice of a rule, run on pieces, gives the whole op's result.

These are the ops with a short NumPy form, an oracle beside torch; tests/sim/rules has every op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from hyper_parallel.rules import Call, find


@dataclass
class Case:
    """An op by name, its NumPy form (context first), operand shapes and static arguments."""

    name: str
    op: Callable
    shapes: tuple
    args: tuple = ()
    ints: tuple = ()
    """For operands of positions: (operand, below)."""


def arrays(case: Case) -> list:
    rng = np.random.default_rng(0)
    found = [s if s is None or np.isscalar(s) else rng.uniform(0.5, 1.5, s) for s in case.shapes]
    for operand, below in case.ints:
        found[operand] = rng.integers(0, below, case.shapes[operand])
    return found


def call(case: Case) -> Call:
    return Call(tuple(s if isinstance(s, tuple) else None for s in case.shapes), case.args)


def plain(op: Callable) -> Callable:
    return lambda context, *operands: op(*operands)


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    powers = np.exp(x)
    return powers / powers.sum(axis=axis, keepdims=True)


def norm(x, weight=1.0, bias=0.0, axes=(-1,)):
    centered = x - x.mean(axis=axes, keepdims=True)
    return centered / np.sqrt(x.var(axis=axes, keepdims=True) + 1e-5) * weight + bias


def rms(x, weight=1.0):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight


def take(context, source, positions, axis):
    """Look up along a dim that may be cut: zero where another rank holds the position."""
    local = positions - context.start
    inside = (local >= 0) & (local < source.shape[axis])
    return np.where(inside, local, 0), inside


def embedding(context, positions, weight):
    local, inside = take(context, weight, positions, 0)
    return weight[local] * inside[..., None]


def index_select(context, x, positions):
    local, inside = take(context, x, positions, 1)
    return x[:, local] * inside[None, :, None]


def gather(context, x, positions):
    local, inside = take(context, x, positions, 1)
    return np.take_along_axis(x[: len(local)], local, 1) * inside


def select(context, x):
    """Take row 3, or zeros where another rank holds it."""
    local = 3 - context.start
    return x[:, local] if 0 <= local < x.shape[1] else np.zeros_like(x[:, 0])


def attention(causal=False):
    def op(context, q, k, v, mask=None):
        groups = q.shape[-3] // k.shape[-3]
        k, v = np.repeat(k, groups, axis=-3), np.repeat(v, groups, axis=-3)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask
        if causal:
            scores = np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -1e30)
        return softmax(scores) @ v

    return op


def cross_entropy(reduction):
    def op(context, x, target, weight=None):
        logs = np.moveaxis(np.log(softmax(x, 1)), 1, -1)
        picked = -np.take_along_axis(logs, target[..., None], -1)[..., 0]
        picked = picked if weight is None else picked * weight[target]
        return picked if reduction == "none" else getattr(np, reduction)(picked)

    return op


def reshape(context, x):
    return x.reshape(context.shapes[0])


def expand(context, x):
    return np.broadcast_to(x, context.shapes[0])


SAME_NAME = (
    "abs exp exp2 expm1 log log1p log2 sqrt reciprocal square sin cos sign floor ceil round tanh"
    " isnan isinf isfinite logical_not positive zeros_like ones_like"
)
UNARY = {name: getattr(np, name) for name in SAME_NAME.split()} | {
    "neg": np.negative, "clone": np.copy, "detach": np.asarray, "contiguous": np.copy,
    "to": lambda x: x.astype(np.float64), "rsqrt": lambda x: x**-0.5, "full_like": np.ones_like,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "relu": lambda x: np.maximum(x - 1, 0),
    "silu": lambda x: x / (1 + np.exp(-x)), "gelu": lambda x: x * (1 + np.tanh(x)) / 2,
    "clamp": lambda x: np.clip(x, 0.8, 1.2), "nan_to_num": np.nan_to_num,
    "empty_like": np.zeros_like,
}  # fmt: skip
BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power,
    "maximum": np.maximum, "minimum": np.minimum, "fmod": np.fmod, "remainder": np.remainder,
    "floor_divide": np.floor_divide, "atan2": np.arctan2, "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
    "masked_fill": lambda x, mask: np.where(mask > 1, 0.25, x),
}  # fmt: skip
DIM1, KEEP = ("dim", 1), ("keepdim", True)
B = ((4, 8, 4), (8, 1))
SDPA = "scaled_dot_product_attention"
CASES = [
    *(Case(name, plain(op), ((4, 8, 4),)) for name, op in UNARY.items()),
    *(Case(name, plain(op), shapes) for name, op in BINARY.items() for shapes in (B, B[::-1])),
    *(Case(name, plain(BINARY[name]), (B[0], 2.0)) for name in ("add", "mul", "div", "pow", "gt")),
    *(Case(name, plain(BINARY[name]), (2.0, B[0])) for name in ("sub", "mul", "div", "pow")),
    Case("div", plain(np.floor_divide), B, (("rounding_mode", "floor"),)),
    Case("to", plain(np.rint), ((4, 4),), (("is_linear", False),)),
    Case("where", plain(lambda c, a, b: np.where(c > 1, a, b)), ((8, 4), (8, 4), (4,))),
    Case("where", plain(lambda c, a, b: np.where(c > 1, a, b)), ((8, 4), (8, 4), 0.5)),
    Case("lerp", plain(lambda a, b, w: a + w * (b - a)), ((8, 4), (8, 4), (4,))),
    Case("addcmul", plain(lambda a, b, c: a + 2 * b * c), ((8, 4), (8, 1), (4,))),
    Case("addcdiv", plain(lambda a, b, c: a + 2 * b / c), ((8, 4), (8, 1), (4,))),
    Case("linear", plain(lambda x, w: x @ w.T), ((4, 8, 4), (8, 4))),
    Case("linear", plain(lambda x, w, b: x @ w.T + b), ((4, 8, 4), (8, 4), (8,))),
    *(
        Case("matmul", plain(np.matmul), s)
        for s in (((4, 8), (8, 4)), ((4, 4, 8), (8, 4)), ((4, 1, 4, 8), (8, 8, 4)), ((4,), (4,)),
                  ((8,), (4, 8, 4)), ((4, 4, 8), (8,)))
    ),
    Case("mm", plain(np.matmul), ((4, 8), (8, 4))),
    Case("bmm", plain(np.matmul), ((4, 4, 8), (4, 8, 4))),
    Case("mv", plain(np.matmul), ((4, 8), (8,))),
    Case("dot", plain(np.dot), ((8,), (8,))),
    Case("outer", plain(np.outer), ((8,), (4,))),
    *(
        Case("addmm", plain(lambda b, x, y: 2 * b + 3 * x @ y), (s, (4, 8), (8, 4)))
        for s in ((4, 4), (4,), (4, 1), (1, 4), ())
    ),
    Case("baddbmm", plain(lambda b, x, y: b + x @ y), ((4, 1, 4), (4, 4, 8), (4, 8, 4))),
    Case("layer_norm", plain(norm), ((4, 8, 4), (4,), (4,)), (("normalized_shape", (4,)),)),
    Case("layer_norm", plain(norm), ((4, 8, 4),), (("normalized_shape", (4,)),)),
    Case("layer_norm", plain(lambda x, w: norm(x, w, axes=(-2, -1))), ((4, 8, 4), (8, 4)),
         (("normalized_shape", (8, 4)),)),
    Case("rms_norm", plain(rms), ((4, 8, 4), (4,)), (("normalized_shape", (4,)),)),
    Case("softmax", plain(softmax), ((4, 8, 4),), (("dim", -1),)),
    Case("softmax", plain(lambda x: softmax(x, 1)), ((4, 8, 4),), (DIM1,)),
    Case("log_softmax", plain(lambda x: np.log(softmax(x, 1))), ((4, 8, 4),), (DIM1,)),
    *(
        Case(name, plain(op), ((4, 8, 4),))
        for name, op in (("sum", np.sum), ("mean", np.mean), ("amax", np.max), ("prod", np.prod),
                         ("amin", np.min), ("var", np.var), ("std", np.std))
    ),
    *(
        Case(name, plain(lambda x, op=op: op(x, 1)), ((4, 8, 4),), (DIM1,))
        for name, op in (("sum", np.sum), ("mean", np.mean), ("amax", np.max),
                         ("argmax", np.argmax),
                         ("argmin", np.argmin), ("amin", np.min), ("var", np.var), ("std", np.std),
                         ("cumsum", np.cumsum), ("cumprod", np.cumprod), ("argsort", np.argsort),
                         ("prod", np.prod), ("vector_norm", lambda x, d: np.linalg.norm(x, axis=d)),
                         ("logsumexp", lambda x, d: np.log(np.exp(x).sum(d))))
    ),
    Case("sum", plain(lambda x: x.sum((0, 2), keepdims=True)), ((4, 8, 4),),
         (("dim", (0, -1)), KEEP)),
    Case("mean", plain(lambda x: x.mean((1, 2))), ((4, 8, 4),), (("dim", (1, 2)),)),
    Case("sort", plain(lambda x: (np.sort(x, 1), np.argsort(x, 1))), ((4, 8),), (DIM1,)),
    Case("topk", plain(lambda x: (np.sort(x)[..., -2:], np.argsort(x)[..., -2:])), ((4, 8),)),
    Case("transpose", plain(lambda x: x.swapaxes(0, 2)), ((4, 8, 4),), (("dim0", 0), ("dim1", -1))),
    Case("permute", plain(lambda x: x.transpose(2, 0, 1)), ((4, 8, 4),), (("dims", (2, 0, 1)),)),
    Case("t", plain(np.transpose), ((4, 8),)),
    *(
        Case(name, reshape, (src,), (("shape", dst),))
        for name in ("view", "reshape")
        for src, dst in (((4, 8, 4), (32, 4)), ((32, 4), (4, 8, 4)), ((4, 24), (4, -1, 6)),
                         ((12, 4), (8, 6)),
                         ((4, 8), (8, 4)), ((1, 8, 4), (8, 1, 4)), ((8, 9, 4), (12, 6, 4)),
                         ((8,), (8,)))
    ),
    Case("flatten", reshape, ((4, 8, 4),)),
    Case("flatten", reshape, ((4, 8, 4),), (("start_dim", 1),)),
    Case("unflatten", reshape, ((4, 8, 4),), (DIM1, ("sizes", (4, -1)))),
    Case("unsqueeze", plain(lambda x: x[:, None]), ((4, 8),), (DIM1,)),
    Case("unsqueeze", plain(lambda x: x[..., None]), ((4, 8),), (("dim", -1),)),
    Case("squeeze", reshape, ((1, 4, 1, 8),)),
    Case("squeeze", reshape, ((1, 4, 1, 8),), (("dim", 2),)),
    Case("expand", expand, ((4, 1, 8),), (("sizes", (4, 6, -1)),)),
    Case("expand", expand, ((4, 8),), (("sizes", (3, 4, 8)),)),
    Case("cat", plain(lambda *x: np.concatenate(x, 1)), ((4, 3, 8), (4, 5, 8), (4, 2, 8)), (DIM1,)),
    Case("stack", plain(lambda *x: np.stack(x, 1)), ((4, 8), (4, 8)), (DIM1,)),
    Case("split", plain(lambda x: (x[:, :3], x[:, 3:6], x[:, 6:])), ((4, 8),),
         (DIM1, ("split_size", 3))),
    Case("split", plain(lambda x: (x[:, :3], x[:, 3:])), ((4, 8),), (DIM1, ("split_size", (3, 5)))),
    Case("chunk", plain(lambda x: (x[:, :3], x[:, 3:6], x[:, 6:])), ((4, 8),),
         (DIM1, ("chunks", 3))),
    Case("unbind", plain(lambda x: (x[:, 0], x[:, 1])), ((4, 2, 8),), (DIM1,)),
    Case("narrow", plain(lambda x: x[:, 2:5]), ((4, 8, 4),), (DIM1,)),
    Case("select", select, ((4, 8, 4),), (DIM1, ("index", 3))),
    Case("flip", plain(lambda x: x[:, ::-1]), ((4, 8, 4),), (DIM1,)),
    Case("roll", plain(lambda x: np.roll(x, 2, 1)), ((4, 8, 4),), (DIM1,)),
    Case("tril", plain(np.tril), ((4, 8, 8),)),
    Case("triu", plain(np.triu), ((4, 8, 8),)),
    Case("embedding", embedding, ((4, 8), (8, 4)), ints=((0, 8),)),
    Case("index_select", index_select, ((4, 8, 4), (4,)), (DIM1,), ((1, 8),)),
    Case("gather", gather, ((4, 8), (4, 4)), (DIM1,), ((1, 8),)),
    Case("gather", gather, ((8, 8), (4, 4)), (DIM1,), ((1, 8),)),
    Case(SDPA, attention(), ((4, 4, 8, 6), (4, 4, 5, 6), (4, 4, 5, 8))),
    Case(SDPA, attention(), ((4, 8, 6), (4, 5, 6), (4, 5, 8))),
    Case(SDPA, attention(True), ((4, 4, 8, 6), (4, 4, 8, 6), (4, 4, 8, 4)),
         (("is_causal", True),)),
    Case(SDPA, attention(), ((4, 8, 8, 6), (4, 4, 5, 6), (4, 4, 5, 8)),
         (("enable_gqa", True),)),
    *(
        Case(SDPA, attention(), ((4, 4, 8, 6), (4, 4, 5, 6), (4, 4, 5, 8), m))
        for m in ((8, 5), (4, 1, 8, 5), (4, 4, 1, 5))
    ),
    *(
        Case("cross_entropy", cross_entropy(kind), shapes, (("reduction", kind),), ((1, 6),))
        for kind in ("none", "sum", "mean")
        for shapes in (((8, 6), (8,)), ((4, 6, 8), (4, 8)), ((8, 6), (8,), (6,)))
    ),
]  # fmt: skip


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.shapes}")
def test_rules_every_choice_gives_the_whole_result(case: Case, count: int, check) -> None:
    num_checked, wrong = check(find(case.name, call(case)), case.op, arrays(case), count)
    assert num_checked > 0
    assert not wrong
