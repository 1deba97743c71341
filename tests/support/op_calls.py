# SPDX-License-Identifier: Apache-2.0
"""Calls of every op that has a rule, on operands of two kinds of sizes, for brute-force checks.

A call is a function of its operands, their shapes and kinds. Shapes are written in letters, whose
sizes are multiples of each number of ranks (EVEN: every factor can be cut) or not (UNEVEN), digits
are sizes, and "." is a tensor of no dims: "ab b1 ." is three operands. Kinds, one letter for each:
f any number, p positive, u within (-1, 1), z within (0, 1), b truth, i a position below 3, j one
below 0, n a small natural, e an int32 8, s a sorted last dim, v ones and minus ones, l a
distribution over dim 1, q a well-conditioned matrix, y a symmetric positive one, w a float32, r all
positions in reverse, k a complex number. A capital letter is for an operand that has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function

from hyper_parallel.dtensor.composed import norm_power
from support.dtensors import seeded
from support.npu_ops import OPS

__all__ = ["CALLS", "EVEN", "RANDOM_CALLS", "UNEVEN", "OpCall"]

EVEN = {"a": 4, "b": 8, "c": 4, "d": 8, "e": 16}
UNEVEN = {"a": 5, "b": 6, "c": 3, "d": 4, "e": 16}


@dataclass(frozen=True)
class OpCall:
    """One call of an op."""

    op: Callable[..., Any]
    shapes: str
    kinds: str

    def operands(self, sizes: dict[str, int]) -> list[torch.Tensor]:
        """Draw the operands, the same on every rank."""
        shapes = [
            tuple(
                sizes[letter] if letter in sizes else int(letter) for letter in text if text != "."
            )
            for text in self.shapes.split()
        ]
        kinds = self.kinds * len(shapes) if len(self.kinds) == 1 else self.kinds
        return [
            _draw(kind, shape, i) for i, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
        ]


def _draw(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    x = seeded(*shape, seed=seed)
    drawn = {
        "p": lambda: x.abs() + 0.5,
        "u": lambda: x.tanh() * 0.9,
        "b": lambda: x > 0,
        "i": lambda: (x.abs() * 100).long() % 3,
        "n": lambda: (x.abs() * 100).long() % 7 + 1,
        "s": lambda: x.sort(-1).values,
        "v": lambda: x.sign(),
        "l": lambda: x.softmax(1),
        "z": lambda: x.sigmoid(),
        "y": lambda: x @ x.mT + 4 * torch.eye(shape[-1], dtype=x.dtype),
        "j": lambda: (x.abs() * 100).long() % 3 - 3,
        "e": lambda: (torch.arange(1, shape[0] + 1) * 8 // shape[0]).int(),
        "k": lambda: torch.complex(x, 2 * x),
        "r": lambda: torch.arange(shape[0]).flip(0),
        "w": lambda: x.float(),
        "q": lambda: x + 4 * torch.eye(shape[-1], dtype=x.dtype),
        "o": lambda: (x > 0).to(x.dtype),
    }
    made = drawn.get(kind.lower(), lambda: x)()
    return made.requires_grad_(kind.islower() and (made.is_floating_point() or made.is_complex()))


def c(op: Callable[..., Any], shapes: str = "ab", kinds: str = "f") -> OpCall:
    """Write a call."""
    return OpCall(op, shapes, kinds)


def method(name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Make a call of a tensor's method."""
    return lambda x, *rest: getattr(x, name)(*rest, *args, **kwargs)


def each(
    names: str, *shapes: str, kinds: str = "f", of: Any = torch, **kwargs: Any
) -> dict[str, list[OpCall]]:
    """Write the same calls for several functions of a module."""
    return {
        name: [c(partial(getattr(of, name), **kwargs), text, kinds) for text in shapes]
        for name in names.split()
    }


AB, BOTH = "ab", ("ab ab", "b a1")
SPECIAL = torch.special

CALLS: dict[str, list[OpCall]] = {
    # ------------------------------------------------------------------ pointwise
    **each(
        "abs acosh angle ceil cos cosh digamma erf erfc exp exp2 expm1 floor frac i0 isfinite isinf"
        " isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not nan_to_num"
        " ones_like reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square"
        " tan tanh trunc clone deg2rad detach neg positive rad2deg zeros_like conj conj_physical"
        " resolve_conj resolve_neg real frexp",
        AB,
        kinds="p",
    ),
    **each("acos asin atan atanh asinh erfinv", AB, kinds="u"),
    **each("logit", AB, kinds="p", eps=0.1),
    **each(
        "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx i0e i1 i1e log_ndtr"
        " modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtr"
        " scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0",
        AB,
        kinds="p",
        of=SPECIAL,
    ),
    "ndtri": [c(lambda x: SPECIAL.ndtri(x), AB, "z")],
    **each(
        "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6"
        " selu silu softplus softshrink softsign tanhshrink",
        AB,
        of=F,
    ),
    "threshold": [c(lambda x: F.threshold(x, 0.1, 2.0))],
    "bitwise_not": [c(lambda x: ~x, AB, "b")],
    "polygamma": [c(lambda x: torch.polygamma(1, x), AB, "p")],
    "mvlgamma": [c(lambda x: torch.mvlgamma(x, 1), AB, "p")],
    "full_like": [c(lambda x: torch.full_like(x, 3.0))],
    "contiguous": [c(method("contiguous"))],
    "alias": [c(lambda x: torch.ops.aten.alias(x))],
    "empty_like": [c(torch.empty_like)],
    "imag": [c(lambda x: torch.imag(x), AB, "k")],
    "view_as_complex": [c(torch.view_as_complex, "ab2")],
    "view_as_real": [c(torch.view_as_real, AB, "k")],
    "complex": [c(torch.complex, "ab ab")],
    "polar": [c(torch.polar, "ab ab", "pf"), c(lambda x, y: torch.polar(abs=x, angle=y), "ab ab")],
    "to": [
        c(method("to", torch.float32)),
        c(method("to", dtype=torch.int32)),
        c(method("float")),
        c(method("long")),
        c(method("bool")),
        c(method("type", torch.float32)),
        c(method("to", "cpu")),
        c(method("cpu")),
        c(method("type", torch.int64)),
        c(method("type", "torch.LongTensor")),
        c(method("double")),
        c(lambda x: x.to(x)),
        c(lambda x: x.type_as(x.float())),
        c(method("bfloat16")),
    ],
    "clamp": [
        c(lambda x: x.clamp(-0.5, max=0.5)),
        c(lambda x: torch.clamp(x, min=0.1)),
        c(lambda x, y: x.clip(y), "ab b"),
        c(lambda x, y, z: torch.clamp(x, y, z), "ab ab b", "fup"),
    ],
    "clamp_min": [c(lambda x: x.clamp_min(0.1)), c(torch.clamp_min, "ab b")],
    "clamp_max": [c(lambda x: x.clamp_max(0.1)), c(lambda x, y: torch.clamp_max(x, max=y), "ab b")],
    **each(
        "atan2 copysign fmax fmin hypot maximum minimum logaddexp logaddexp2 nextafter xlogy", *BOTH
    ),
    **each("eq ne lt le gt ge ldexp isclose float_power", *BOTH, kinds="p"),
    **each("heaviside igamma igammac", *BOTH, kinds="P"),
    "zeta": [c(SPECIAL.zeta, s, "P") for s in BOTH],
    **each("xlog1py", *BOTH, kinds="p", of=SPECIAL),
    "pow": [c(torch.pow, s, "p") for s in BOTH] + [c(lambda x: x**2), c(lambda x: 2**x)],
    **each(
        "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor", *BOTH, kinds="b"
    ),
    **each("gcd lcm bitwise_left_shift bitwise_right_shift", *BOTH, kinds="n"),
    **{
        name: [c(getattr(SPECIAL, name), "ab b", "un")]
        for kind in "tuvw"
        for name in (f"chebyshev_polynomial_{kind}", f"shifted_chebyshev_polynomial_{kind}")
    },
    **each(
        "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p",
        "ab b",
        kinds="un",
        of=SPECIAL,
    ),
    "fmod": [
        c(lambda x: torch.fmod(x, 0.7)),
        c(lambda x, y: torch.fmod(x, y), "ab b", "fP"),
    ],
    "remainder": [c(lambda x: x % 0.7), c(lambda x, y: x % y, "ab b", "PP")],
    "floor_divide": [c(lambda x: x // 0.7, AB, "F"), c(lambda x: 3 // x, AB, "P")],
    "masked_fill": [
        c(lambda x, m: x.masked_fill(m, 2.0), "ab ab", "fb"),
        c(lambda x, m: x.masked_fill(m, value=torch.tensor(3.0)), "ab b", "fb"),
        c(lambda x, m, v: x.masked_fill(m, v), "ab b .", "fbf"),
    ],
    "fill": [c(lambda x: torch.fill(x, 2.0)), c(torch.fill, "ab .")],
    "add": [
        *(c(torch.add, s) for s in BOTH),
        c(lambda x: x + 1),
        c(lambda x: 1 + x),
        c(lambda x: torch.add(input=x, other=x, alpha=3)),
        c(lambda x: x + torch.tensor(2.0)),
        c(lambda x: torch.tensor(2.0) + x),
    ],
    "sub": [
        *(c(torch.sub, s) for s in BOTH),
        c(lambda x: 1 - x),
        c(lambda x: torch.rsub(x, 1, alpha=2)),
        c(lambda x, y: torch.sub(other=y, input=x), "ab ab"),
        c(lambda x: torch.tensor(2.0) - x),
    ],
    "mul": [*(c(torch.mul, s) for s in BOTH), c(lambda x: 2 * x * 3.0)],
    "div": [
        *(c(torch.div, s, "fp") for s in BOTH),
        c(lambda x: x / 2),
        c(lambda x: torch.div(x, 0.7, rounding_mode="floor")),
        c(lambda x, y: torch.div(x, y, rounding_mode="trunc"), "ab ab", "p"),
    ],
    "rdiv": [c(lambda x: 2 / x, AB, "p"), c(lambda x, y: x.__rdiv__(y), "ab ab", "p")],
    "where": [
        c(torch.where, "ab ab b", "bff"),
        c(lambda m, x: torch.where(m, x, 0.0), "ab b", "bf"),
    ],
    "lerp": [c(torch.lerp, "ab ab b"), c(lambda x, y: torch.lerp(x, y, 0.3), "ab ab")],
    "addcmul": [c(partial(torch.addcmul, value=2), "ab a1 b")],
    "addcdiv": [c(torch.addcdiv, "ab a1 b", "p")],
    "broadcast_tensors": [c(torch.broadcast_tensors, "ab b")],
    "prelu": [c(F.prelu, "abc b"), c(F.prelu, "ab 1"), c(F.prelu, "b 1")],
    "dropout": [c(lambda x: F.dropout(x, 0.5, training=False)), c(lambda x: F.dropout(x, 0))],
    "one_hot": [c(lambda x: F.one_hot(x, 3), AB, "i")],
    "bucketize": [c(torch.bucketize, "ab c", "fs")],
    # ------------------------------------------------------------------ products
    "linear": [
        c(F.linear, "abc dc"),
        c(F.linear, "ab db d"),
        c(lambda x, w: F.linear(weight=w, input=x), "ab db"),
    ],
    "matmul": [
        c(torch.matmul, "ab bc"),
        c(lambda x, y: x @ y, "cab bc"),
        c(torch.matmul, "cab cba"),
        c(torch.matmul, "a1bc dcb"),
        c(torch.matmul, "b ba"),
        c(torch.matmul, "ab b"),
        c(torch.matmul, "b b"),
        c(torch.matmul, "b cba"),
        c(lambda x, y: torch.matmul(other=y, input=x), "ab bc"),
    ],
    "mm": [c(torch.mm, "ab bc"), c(lambda x, y: torch.mm(x, mat2=y), "ab bc")],
    "bmm": [c(torch.bmm, "cab cba")],
    "mv": [c(torch.mv, "ab b")],
    "dot": [c(torch.dot, "b b"), c(torch.vdot, "b b")],
    "outer": [c(torch.outer, "a b")],
    "addmm": [
        *(c(torch.addmm, f"{bias} ab bd") for bias in ("d", "ad", "a1", "1d", ".")),
        c(lambda b, x, y: torch.addmm(b, mat1=x, mat2=y, beta=2, alpha=3), "ad ab bd"),
    ],
    "addmv": [c(torch.addmv, "a ab b"), c(torch.addmv, "1 ab b")],
    "addr": [c(torch.addr, "ab a b"), c(torch.addr, "b a b")],
    "baddbmm": [c(torch.baddbmm, "cad cab cbd"), c(torch.baddbmm, "c1d cab cbd")],
    "addbmm": [c(torch.addbmm, "ad cab cbd")],
    "chain_matmul": [c(torch.chain_matmul, "ab bc cd")],
    "linalg_multi_dot": [
        c(lambda *x: torch.linalg.multi_dot(x), s) for s in ("ab bc cd", "b bc cd", "ab bc c")
    ],
    "einsum": [
        c(partial(torch.einsum, equation), shapes)
        for equation, shapes in (
            ("abc,xc->abx", "abc dc"),
            ("bhqd,bhkd->bhqk", "abca abda"),
            ("...ab,...bc", "dab dbc"),
            ("ab,ab->", "ab ab"),
            ("ab->ba", "ab"),
            ("aab,b->ab", "aab b"),
            ("ab,bc,cd->ad", "ab bc cd"),
            ("a,b->ab", "a b"),
            ("...a,a->...", "dba a"),
            ("bshd,hdc->bshc", "abca cad"),
        )
    ],
    "tensordot": [
        c(torch.tensordot, "abc bcd"),
        c(partial(torch.tensordot, dims=1), "ab bc"),
        c(partial(torch.tensordot, dims=([0, 1], [1, 0])), "abc bad"),
    ],
    "inner": [c(torch.inner, "ab cb"), c(torch.inner, "b b"), c(torch.inner, "ab .")],
    "kron": [c(torch.kron, "ab cd"), c(torch.kron, "b a"), c(torch.kron, "ab c")],
    "linalg_vecdot": [
        c(torch.linalg.vecdot, "ab ab"),
        c(partial(torch.linalg.vecdot, dim=0), "ab ab"),
    ],
    "grouped_mm": [
        c(lambda x, w: F.grouped_mm(x, w), "4ae 4ee", "w"),
        *(
            c(lambda x, w, n: F.grouped_mm(x, w, offs=n), shapes, "wwe")
            for shapes in ("8e 2ee 2", "2ee e8 2", "e8 8e 2")
        ),
    ],
    "bilinear": [c(F.bilinear, "ab ac dbc"), c(F.bilinear, "ab ac dbc d")],
    "cdist": [c(torch.cdist, "cab cdb"), c(torch.cdist, "ab db")],
    # ------------------------------------------------------------------ reductions
    **{
        name: [
            c(method(name), AB, "p"),
            c(method(name, 0), AB, "p"),
            c(method(name, 1, True), AB, "p"),
            c(method(name, dim=-1, keepdim=True), "cab", "p"),
            c(method(name, axis=0), AB, "p"),
        ]
        for name in ("sum", "mean", "amax", "amin", "prod", "nansum", "nanmean", "var", "std")
    },
    "var_mean": [
        c(lambda x: torch.var_mean(x, (0, 2)), "cab"),
        c(lambda x: torch.var_mean(x, -1, keepdim=True)),
    ],
    "std_mean": [c(lambda x: torch.std_mean(x, 0)), c(lambda x: torch.std_mean(x, correction=0))],
    "count_nonzero": [
        c(torch.count_nonzero, AB, "i"),
        c(lambda x: torch.count_nonzero(x, 1), AB, "i"),
    ],
    "all": [
        c(torch.all, AB, "b"),
        c(lambda x: x.all(0), AB, "b"),
        c(lambda x: x.all(-1, True), AB, "b"),
    ],
    "any": [
        c(torch.any, AB, "b"),
        c(lambda x: x.any(0), AB, "b"),
        c(lambda x: x.any(-1, True), AB, "b"),
    ],
    "logsumexp": [
        c(lambda x: x.logsumexp(0)),
        c(lambda x: x.logsumexp((0, 1))),
        c(lambda x: x.logsumexp(1, True)),
    ],
    "norm_power": [
        # No call of torch's: norms are made of it.
        c(lambda x: handle_torch_function(norm_power, (x,), x, 3.0, 1, True)),
        c(lambda x: handle_torch_function(norm_power, (x,), x, 1.5)),
    ],
    "vector_norm": [
        c(torch.linalg.vector_norm),
        c(lambda x: torch.linalg.vector_norm(x, 3, 0)),
        c(lambda x: torch.linalg.vector_norm(x, ord=1, dim=1, keepdim=True)),
    ],
    "norm": [
        c(method("norm")),
        c(lambda x: torch.norm(x, dim=1)),
        c(lambda x: x.norm(3, 0, True)),
        c(lambda x: torch.norm(x, p=float("inf"))),
        c(lambda x: torch.norm(x, p="nuc")),
    ],
    "linalg_norm": [
        c(torch.linalg.norm),
        c(lambda x: torch.linalg.norm(x, dim=1)),
        c(lambda x: torch.linalg.norm(x, "fro", (0, 1))),
        c(lambda x: torch.linalg.norm(x, 2)),
    ],
    "linalg_matrix_norm": [c(lambda x: torch.linalg.matrix_norm(x, dim=(0, 1)), "abc")],
    "argmax": [c(method("argmax")), c(method("argmax", 1))],
    "argmin": [c(method("argmin", 0, keepdim=True))],
    **{
        name: [
            c(getattr(torch, name)),
            c(method(name, 0)),
            c(method(name, dim=-1, keepdim=True), "cab"),
            c(getattr(torch, name), "ab b"),
        ]
        for name in ("max", "min")
    },
    "aminmax": [c(torch.aminmax), c(lambda x: torch.aminmax(x, dim=0))],
    "median": [c(torch.median), c(method("median", 1)), c(method("median", 0, True))],
    "nanmedian": [c(torch.nanmedian), c(method("nanmedian", dim=1))],
    "kthvalue": [c(method("kthvalue", 2)), c(method("kthvalue", 2, 0))],
    "mode": [c(torch.mode), c(method("mode", 0))],
    "quantile": [
        c(lambda x: torch.quantile(x, 0.3)),
        c(lambda x: torch.quantile(x, 0.3, dim=0)),
        c(lambda x, q: torch.quantile(x, q, dim=1, keepdim=True), "ab 2", "fZ"),
    ],
    "nanquantile": [c(lambda x: torch.nanquantile(x, 0.3, dim=-1))],
    "cumsum": [c(method("cumsum", 0)), c(lambda x: torch.cumsum(x, dim=1))],
    "cumprod": [c(method("cumprod", 1))],
    "logcumsumexp": [c(method("logcumsumexp", 1))],
    "cummax": [c(method("cummax", 0))],
    "cummin": [c(method("cummin", -1))],
    "diff": [c(torch.diff), c(lambda x: torch.diff(x, 2, 0))],
    "topk": [c(method("topk", 2)), c(method("topk", 2, 0, largest=False))],
    "sort": [
        c(method("sort", 0)),
        c(method("sort", descending=True)),
        c(lambda x: torch.sort(x, stable=True)),
    ],
    "argsort": [c(method("argsort", 0)), c(method("argsort"))],
    "msort": [c(torch.msort)],
    "glu": [c(F.glu), c(lambda x: F.glu(x, 1), "a8c")],
    "renorm": [c(lambda x: torch.renorm(x, 2, 0, 1.0))],
    "trapezoid": [c(torch.trapezoid), c(lambda y: torch.trapz(y, dx=0.5, dim=0))],
    "cumulative_trapezoid": [c(lambda y: torch.cumulative_trapezoid(y, dim=0))],
    "trace": [c(torch.trace)],
    "searchsorted": [
        c(torch.searchsorted, "ab ac", "sf"),
        c(torch.searchsorted, "b ac", "sf"),
        c(lambda x: torch.searchsorted(x, 0.5), "b", "S"),
    ],
}

# ---------------------------------------------------------------------- normalisation, losses

_LOSSES = ("none", "sum", "mean")
_ATTENTION = F.scaled_dot_product_attention


def loss(name: str, shapes: str, kinds: str = "f", **options: Any) -> dict[str, list[OpCall]]:
    """Write the calls of a loss with every reduction."""
    function = getattr(F, name)
    return {name: [c(partial(function, reduction=r, **options), shapes, kinds) for r in _LOSSES]}


CALLS |= {
    "layer_norm": [
        c(lambda x: F.layer_norm(x, x.shape[-1:])),
        c(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), "cab b b"),
        c(lambda x, w: F.layer_norm(x, normalized_shape=x.shape[-2:], weight=w), "cab ab"),
    ],
    "rms_norm": [c(lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6), "cab b")],
    "group_norm": [
        c(lambda x: F.group_norm(x, 4), "a8c"),
        c(lambda x, w, b: F.group_norm(x, 4, w, b), "a8cd 8 8"),
    ],
    "batch_norm": [
        c(
            lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
            "abcd b b b b",
            "fFPff",
        ),
        c(lambda x: F.batch_norm(x, None, None, training=True), "abc"),
    ],
    "instance_norm": [
        c(F.instance_norm, "abcd"),
        c(lambda x, w, b: F.instance_norm(x, weight=w, bias=b), "abc b b"),
    ],
    "local_response_norm": [c(lambda x: F.local_response_norm(x, 2), "abcd")],
    "softmax": [c(method("softmax", 0)), c(lambda x: F.softmax(x, dim=-1, dtype=torch.float32))],
    "log_softmax": [c(lambda x: torch.log_softmax(x, 1)), c(method("log_softmax", dim=0))],
    "softmin": [c(lambda x: F.softmin(x, 1))],
    "_safe_softmax": [c(lambda x: torch.ops.aten._safe_softmax(x, 1))],
    "normalize": [c(F.normalize), c(lambda x: F.normalize(x, dim=0), "ab")],
    "scaled_dot_product_attention": [
        c(_ATTENTION, "ac56 ac36 ac3d"),
        c(partial(_ATTENTION, is_causal=True, scale=0.5), "acd6 acd6 acda"),
        c(partial(_ATTENTION, enable_gqa=True), "a8d6 a4d6 a4dc"),
        c(_ATTENTION, "ad6 a36 a3c"),
        *(c(_ATTENTION, f"acd6 ac36 ac3a {mask}") for mask in ("d3", "a1d3", "acd3")),
    ],
    "cross_entropy": [
        *(c(partial(F.cross_entropy, reduction=r), "ab a", "fi") for r in _LOSSES),
        *(
            c(partial(F.cross_entropy, reduction=r, ignore_index=1), "abc ac b", "fiP")
            for r in _LOSSES
        ),
        c(partial(F.cross_entropy, label_smoothing=0.1), "ab a b", "fiP"),
        c(F.cross_entropy, "ab ab", "fl"),
        c(F.cross_entropy, "abc abc b", "flP"),
    ],
    "nll_loss": [
        *(c(partial(F.nll_loss, reduction=r, ignore_index=2), "ab a b", "fiP") for r in _LOSSES),
        c(F.nll_loss, "ab a", "fi"),
    ],
    **loss("mse_loss", "ab ab"),
    **loss("l1_loss", "ab ab"),
    **loss("smooth_l1_loss", "ab ab"),
    **loss("huber_loss", "ab ab"),
    **loss("binary_cross_entropy", "ab ab b", "zzP"),
    **loss("binary_cross_entropy_with_logits", "ab ab", "fz"),
    **loss("poisson_nll_loss", "ab ab", "fp"),
    **loss("gaussian_nll_loss", "ab ab a1", "ffp"),
    **loss("soft_margin_loss", "ab ab", "fV"),
    **loss("hinge_embedding_loss", "ab ab", "fV"),
    **loss("margin_ranking_loss", "ab ab ab", "ffV"),
    **loss("triplet_margin_loss", "ab ab ab"),
    **loss("multilabel_margin_loss", "ab ab", "fi"),
    "multi_margin_loss": [
        c(lambda x, y, w, r=r: F.multi_margin_loss(x, y, weight=w, reduction=r), "ab a b", "fiP")
        for r in _LOSSES
    ]
    + [c(F.multi_margin_loss, "ab a", "fi")],
    **loss("multilabel_soft_margin_loss", "ab ab b", "fzP"),
    **loss("cosine_embedding_loss", "ab ab a", "ffV"),
    "kl_div": [c(partial(F.kl_div, reduction=r), "ab ab", "fz") for r in (*_LOSSES, "batchmean")],
    "pairwise_distance": [
        c(F.pairwise_distance, "ab ab"),
        c(partial(F.pairwise_distance, keepdim=True), "ab ab"),
    ],
    "cosine_similarity": [
        c(F.cosine_similarity, "ab ab"),
        c(partial(F.cosine_similarity, dim=0), "ab ab"),
    ],
    # ------------------------------------------------------------------ vision
    **{
        f"conv{n}d": [
            c(getattr(F, f"conv{n}d"), "ab" + "5" * n + " db" + "3" * n + " d"),
            c(
                partial(getattr(F, f"conv{n}d"), groups=4, padding=1),
                "a8" + "5" * n + " 82" + "3" * n + " 8",
            ),
            c(getattr(F, f"conv{n}d"), "b" + "5" * n + " db" + "3" * n),
        ]
        for n in (1, 2, 3)
    },
    **{
        f"conv_transpose{n}d": [
            c(getattr(F, f"conv_transpose{n}d"), "ab" + "3" * n + " bd" + "3" * n + " d"),
            c(
                partial(getattr(F, f"conv_transpose{n}d"), groups=4),
                "a8" + "3" * n + " 82" + "3" * n + " 8",
            ),
        ]
        for n in (1, 2, 3)
    },
    **{
        f"{pool}{n}d": [c(partial(getattr(F, f"{pool}{n}d"), **{size: 2}), "ab" + "6" * n)]
        for pool, size in (
            ("max_pool", "kernel_size"),
            ("avg_pool", "kernel_size"),
            ("adaptive_avg_pool", "output_size"),
            ("adaptive_max_pool", "output_size"),
        )
        for n in (1, 2, 3)
    },
    **{
        f"lp_pool{n}d": [
            c(partial(getattr(F, f"lp_pool{n}d"), norm_type=2, kernel_size=2), "ab" + "6" * n, "p")
        ]
        for n in (1, 2, 3)
    },
    **{
        f"{pool}{n}d_with_indices": [
            c(partial(getattr(F, f"{pool}{n}d_with_indices"), **{size: 2}), "ab" + "6" * n)
        ]
        for pool, size in (("max_pool", "kernel_size"), ("adaptive_max_pool", "output_size"))
        for n in (1, 2, 3)
    },
    "interpolate": [
        c(lambda x: F.interpolate(x, scale_factor=2.0), "ab34"),
        c(lambda x: F.interpolate(x, (5, 6), mode="bilinear"), "ab34"),
    ],
    "pad": [
        c(lambda x: F.pad(x, (1, 2))),
        c(lambda x: F.pad(x, (0, 0, 1, 0), value=1.5)),
        c(lambda x: F.pad(x, (1, 1), mode="reflect"), "abc"),
    ],
    "pixel_shuffle": [
        c(lambda x: F.pixel_shuffle(x, 2), "ae34"),
        c(lambda x: F.pixel_shuffle(x, 1), "ab34"),
    ],
    "pixel_unshuffle": [c(lambda x: F.pixel_unshuffle(x, 2), "ab64")],
    "channel_shuffle": [c(lambda x: F.channel_shuffle(x, 2), "ad4")],
    "grid_sample": [c(partial(F.grid_sample, align_corners=False), "ab34 a562", "fu")],
    "im2col": [c(lambda x: F.unfold(x, 2), "a345")],
    "col2im": [c(lambda x: F.fold(x, (3, 4), 2), "ad6")],
    # ------------------------------------------------------------------ linear algebra
    **{
        f"linalg_{name}": [c(getattr(torch.linalg, name), "a33", "q")]
        for name in (
            "inv pinv inv_ex matrix_exp det cond matrix_rank slogdet eigvals svdvals lu_factor lu"
            " qr"
        ).split()
    },
    **{
        f"linalg_{name}": [c(getattr(torch.linalg, name), "a33", "y")]
        for name in "cholesky cholesky_ex eigh eigvalsh".split()
    },
    "linalg_eig": [c(lambda x: torch.linalg.eig(x), "a33", "Q")],
    "linalg_svd": [c(lambda x: torch.linalg.svd(x), "a33", "Q")],
    "svd": [c(lambda x: torch.svd(x), "a33", "Q")],
    "qr": [c(torch.qr, "a33", "q")],
    "logdet": [c(lambda x: torch.logdet(x), "a33", "y")],
    "matrix_power": [c(lambda x: torch.matrix_power(x, 3), "a33")],
    "linalg_matrix_power": [c(lambda x: torch.linalg.matrix_power(x, 2), "a33")],
    "cholesky_inverse": [c(torch.cholesky_inverse, "a33", "q")],
    "cholesky_solve": [c(torch.cholesky_solve, "a32 a33", "fq")],
    "linalg_solve": [c(torch.linalg.solve, "a33 a32", "qf"), c(torch.linalg.solve, "a33 a3", "qf")],
    "linalg_solve_triangular": [
        c(partial(torch.linalg.solve_triangular, upper=True), "a33 a32", "qf")
    ],
    "triangular_solve": [c(torch.triangular_solve, "a32 a33", "fq")],
    "cross": [c(lambda x, y: torch.cross(x, y, 1), "a3b a3b")],
    "linalg_cross": [c(torch.linalg.cross, "ab3 ab3")],
    **{
        f"fft_{name}{dims}": [
            c(getattr(torch.fft, name + dims), "abc"),
            *([c(partial(getattr(torch.fft, name + dims), dim=dim), "abc")]),
        ]
        for dims, dim in (("", 0), ("2", (0, 2)), ("n", (1,)))
        for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    },
    "stft": [
        c(partial(torch.stft, n_fft=4, return_complex=True), "ae", "f"),
        c(lambda x, w: torch.stft(x, 4, window=w, return_complex=True), "be 4", "fP"),
    ],
    "istft": [c(lambda x, w: torch.istft(x, 4, window=w), "a39 4", "kP")],
    "fft_fftshift": [c(torch.fft.fftshift), c(partial(torch.fft.fftshift, dim=1))],
    "fft_ifftshift": [c(partial(torch.fft.ifftshift, dim=(0,)))],
}

# ---------------------------------------------------------------------- shapes

CALLS |= {
    "reshape": [
        c(method("reshape", 4, -1), "4b"),
        c(method("reshape", (4, 2, 6)), "86"),
        c(method("reshape", -1)),
        c(method("reshape", 2, 0), "0b"),
        c(method("ravel")),
        c(lambda x, y: x.reshape_as(y), "46 83"),
        c(method("reshape", 8, 9), "89"),
        c(method("reshape", (8, 6)), "86"),
        c(method("reshape", (8, 4)), "48"),
        c(method("reshape", 8, 1, 4), "184"),
        c(method("reshape", 9, 8, 6), "896"),
    ],
    "view": [
        c(method("view", 4, 4, 2), "48"),
        c(method("view", (4, 8, 2)), "4e"),
        c(lambda x: x.view(x.shape.numel())),
        c(method("view", -1)),
        c(lambda x: x.view(x.shape[0], 4, -1), "ae"),
        c(lambda x, y: x.view_as(y), "46 83"),
    ],
    "flatten": [
        c(method("flatten")),
        c(method("flatten", 1), "cab"),
        c(method("flatten", 0, 1), "cab"),
        c(torch.flatten, "."),
    ],
    "unflatten": [
        c(method("unflatten", 1, (4, -1)), "ae"),
        c(method("unflatten", 0, (-1, 2)), "86"),
        c(method("unflatten", 1, (4, 2)), "a8"),
    ],
    "permute": [c(method("permute", 2, 0, 1), "cab"), c(method("permute", (1, -1, 0)), "cab")],
    "transpose": [
        c(method("transpose", 0, 1)),
        c(lambda x: torch.transpose(x, dim0=-1, dim1=0), "cab"),
        c(lambda x: torch.swapaxes(x, axis0=0, axis1=2), "cab"),
        c(method("swapaxes", 0, 1)),
    ],
    "mT": [c(lambda x: x.mT, "cab")],
    "mH": [c(lambda x: x.mH, "cab"), c(method("adjoint"), "cab")],
    "t": [c(method("t")), c(lambda x: x.T), c(lambda x: x.H), c(method("t"), "b")],
    "movedim": [
        c(method("movedim", 0, -1), "cab"),
        c(method("movedim", (0, 1), (2, 0)), "cab"),
        c(method("moveaxis", 1, 0)),
    ],
    "unsqueeze": [c(method("unsqueeze", 0)), c(method("unsqueeze", dim=-1))],
    "squeeze": [
        c(method("squeeze"), "a1b"),
        c(method("squeeze", 1), "a1b"),
        c(method("squeeze", 0)),
        c(method("squeeze", (0, 2)), "1a1"),
    ],
    "expand": [
        c(lambda x: x.expand(3, *x.shape)),
        c(method("expand", -1, 4), "a1"),
        c(method("expand", (-1, 4)), "a1"),
        c(lambda x: torch.broadcast_to(x, (2, *x.shape))),
        c(lambda x, y: x.expand_as(y), "1b ab"),
    ],
    "repeat": [c(method("repeat", 2, 1)), c(method("repeat", (3, 1, 2)))],
    "tile": [c(method("tile", 2)), c(lambda x: torch.tile(x, (2, 1, 1)))],
    "repeat_interleave": [
        c(method("repeat_interleave", 3, 1)),
        c(method("repeat_interleave", 2)),
        c(method("repeat_interleave", 1, dim=0)),
    ],
    "atleast_1d": [c(torch.atleast_1d), c(torch.atleast_1d, ".")],
    "atleast_2d": [c(torch.atleast_2d, "b")],
    "atleast_3d": [c(torch.atleast_3d), c(torch.atleast_3d, "b"), c(torch.atleast_3d, ".")],
    "diagonal": [c(torch.diagonal, "abc"), c(lambda x: x.diagonal(1, -2, -1), "cab")],
    "linalg_diagonal": [c(torch.linalg.diagonal, "cab")],
    "diag_embed": [c(torch.diag_embed), c(lambda x: torch.diag_embed(x, 1, 0, 2))],
    "diag": [c(torch.diag), c(torch.diag, "b")],
    "tril": [c(method("tril"), "cab")],
    "triu": [c(lambda x: torch.triu(x, diagonal=1), "cab")],
    "unfold": [c(method("unfold", 1, 2, 2)), c(method("unfold", 0, 3, 1))],
    # ------------------------------------------------------------------ joining and indexing
    "cat": [
        c(lambda x, y: torch.cat([x, y]), "ab cb"),
        c(lambda x, y: torch.cat((x, y), dim=1), "ab a2"),
        c(lambda x, y: torch.concat([x, y], axis=-1), "ab ab"),
    ],
    "stack": [
        c(lambda x, y: torch.stack([x, y]), "ab ab"),
        c(lambda x, y: torch.stack((x, y), -1), "ab ab"),
    ],
    "vstack": [c(lambda x, y: torch.vstack([x, y]), s) for s in ("ab cb", "b b")],
    "hstack": [c(lambda x, y: torch.hstack([x, y]), s) for s in ("ab ac", "b b")],
    "dstack": [c(lambda x, y: torch.dstack([x, y]), s) for s in ("abc abc", "ab ab")],
    "column_stack": [c(lambda x, y: torch.column_stack([x, y]), s) for s in ("ab ac", "b b")],
    "meshgrid": [c(partial(torch.meshgrid, indexing=i), "a b") for i in ("ij", "xy")],
    "split": [
        c(method("split", 2)),
        c(lambda x: torch.split(x, [1, x.shape[1] - 1], dim=1)),
        c(method("split_with_sizes", (1, 5), 1), "a6"),
    ],
    "chunk": [c(method("chunk", 2)), c(lambda x: torch.chunk(x, 4, dim=1))],
    "tensor_split": [
        c(method("tensor_split", 3)),
        c(method("tensor_split", (1, 3), dim=1)),
        c(method("tensor_split", (1, -1))),
    ],
    "vsplit": [c(method("vsplit", (1, 2)))],
    "hsplit": [c(method("hsplit", 2)), c(method("hsplit", (1,)), "b")],
    "dsplit": [c(method("dsplit", (1,)), "abc")],
    "unbind": [c(method("unbind")), c(method("unbind", 1)), c(lambda x: tuple(x))],
    "narrow": [
        c(method("narrow", 0, 1, 2)),
        c(method("narrow", 1, 2, 3)),
        c(lambda x: x.narrow(0, 0, x.shape[0])),
    ],
    "select": [c(method("select", 0, 1)), c(method("select", -1, -1))],
    "flip": [c(method("flip", 0)), c(method("flip", 0, 1)), c(lambda x: torch.flip(x, dims=(1,)))],
    "fliplr": [c(torch.fliplr)],
    "flipud": [c(torch.flipud, "cab")],
    "rot90": [c(torch.rot90, "abc"), c(lambda x: torch.rot90(x, 2, (0, 2)), "abc")],
    "roll": [
        c(method("roll", 1, 0)),
        c(method("roll", 2, dims=1)),
        c(method("roll", (1, 2), (0, 1))),
        c(method("roll", 3)),
    ],
    "select_scatter": [c(lambda x, y: torch.select_scatter(x, y, 0, 1), "ab b")],
    "slice_scatter": [c(lambda x, y: torch.slice_scatter(x, y, 1, 1, 3), "ab a2")],
    "__getitem__": [
        c(lambda x: x[0]),
        c(lambda x: x[:, -1]),
        c(lambda x: x[..., 1:3]),
        c(lambda x: x[:2, None]),
        c(lambda x: x[None, ..., 0], "abc"),
        c(lambda x: x[1, :, 2], "abc"),
        c(lambda x: x[..., ::2], "abc"),
        c(lambda x: x[..., : x.shape[-1]]),
        c(lambda x: x[:, 0:9]),
        c(lambda x, i: x[i], "ab d", "fi"),
        c(lambda x, i: x[:, i], "abc ad", "fi"),
        c(lambda x, i: x[i, ..., None], "abc d", "fi"),
        c(lambda x, i, j: x[i, j], "abc d d", "fii"),
        c(lambda x, i, j: x[i, :, j], "abc d 1", "fii"),
        c(lambda x, i: x[0, i], "ab d", "fi"),
        c(lambda x, i: x[i], "ab .", "fi"),
        c(lambda x, i: x[i], "b .", "fi"),
        c(lambda x, i: x[i], "ab d", "fj"),
        c(lambda x: x[:, [0, 2, 2]], "ab"),
        c(lambda x: x[[0, 1], :, [0, 2]], "abc"),
        c(lambda x, i: x[i, [0]], "abc d", "fi"),
    ],
    "embedding": [
        c(F.embedding, "ca ab", "if"),
        c(lambda i, w: F.embedding(i, w, padding_idx=-1), "7 ab", "if"),
    ],
    "index_select": [
        c(lambda x, i: x.index_select(0, i), "ab d", "fi"),
        c(lambda x, i: torch.index_select(x, 1, i), "ab d", "fi"),
        c(lambda x, i: torch.index_select(x, 1, i), "ab .", "fi"),
    ],
    "gather": [
        c(lambda x, i: x.gather(0, i), "ab cb", "fi"),
        c(lambda x, i: torch.gather(x, 1, index=i), "ab ad", "fi"),
        c(lambda x, i: x.gather(1, i), "ab 3d", "fi"),
    ],
    "take_along_dim": [
        c(lambda x, i: torch.take_along_dim(x, i, 1), "ab ad", "fi"),
        c(lambda x, i: torch.take_along_dim(x, i, dim=0), "ab 11", "fi"),
    ],
    "take": [c(torch.take, "ab cd", "fi")],
    "isin": [c(torch.isin, "ab c", "in")],
    "scatter": [
        c(lambda x, i, y: x.scatter(1, i, y), "ab ad ad", "fif"),
        c(lambda x, i: x.scatter(0, i, 2.0), "ab cb", "fi"),
        c(lambda x, i, y: torch.scatter(x, 0, index=i, src=y), "ab 2b ab", "fiF"),
    ],
    "scatter_add": [
        c(lambda x, i, y: x.scatter_add(1, i, y), "ab ad ad", "fif"),
        c(lambda x, i, y: x.scatter_add(0, i, y), "ab c2 c2", "fif"),
    ],
    "scatter_reduce": [
        c(
            lambda x, i, y, r=r, s=s: x.scatter_reduce(1, i, y, reduce=r, include_self=s),
            "ab ad ad",
            "fif",
        )
        for r, s in (("sum", True), ("amax", True), ("mean", False), ("sum", False))
    ],
    "index_add": [
        c(lambda x, i, y: x.index_add(0, i, y), "ab d db", "fif"),
        c(lambda x, i, y: torch.index_add(x, 1, i, source=y, alpha=2), "ab d ad", "fif"),
    ],
    "index_copy": [c(lambda x, i, y: x.index_copy(1, i, y), "ab d ad", "fif")],
    "index_fill": [
        c(lambda x, i: x.index_fill(1, i, 2.0), "ab d", "fi"),
        c(lambda x, i, v: x.index_fill(0, i, v), "ab d .", "fif"),
        c(lambda x, i: x.index_fill(0, i, 2.0), "ab .", "fi"),
    ],
    "index_reduce": [c(lambda x, i, y: x.index_reduce(1, i, y, "amax"), "ab d ad", "fif")],
    "index_put": [
        c(lambda x, i, y: x.index_put((i,), y, accumulate=True), "ab d db", "fif"),
        c(lambda x, i, y: x.index_put((i,), y), "ab d b", "fif"),
        c(lambda x, i, j, y: x.index_put((i, j), y, True), "abc d d dc", "fiif"),
    ],
}
# ---------------------------------------------------------------------- vendor ops

CALLS |= {
    "npu_rms_norm": [c(OPS.npu_rms_norm, "abc c"), c(OPS.npu_rms_norm, "abc bc")],
    "npu_add_rms_norm": [c(OPS.npu_add_rms_norm, "abc abc c")],
    "npu_rotary_mul": [
        c(OPS.npu_rotary_mul, "abc6 1bc6 11c6"),
        c(OPS.npu_rotary_mul, "ab16 a116 b16"),
    ],
    "npu_swiglu": [c(OPS.npu_swiglu, "ab6"), c(lambda x: OPS.npu_swiglu(x, 1), "a6c")],
    "npu_geglu": [c(OPS.npu_geglu, "ab6")],
    **{f"npu_{n}": [c(getattr(OPS, f"npu_{n}"))] for n in ("fast_gelu", "gelu", "silu", "mish")},
    "npu_linear": [c(OPS.npu_linear, "abc dc d"), c(OPS.npu_linear, "ab db")],
    "npu_scaled_masked_softmax": [
        c(lambda x, m: OPS.npu_scaled_masked_softmax(x, m, 0.5), "abcd a1cd", "fb")
    ],
    "npu_fusion_attention": [
        c(lambda *x, n=n, y=layout: OPS.npu_fusion_attention(*x, n, y, scale=0.3), shapes)
        for n, layout, shapes in (
            (4, "BNSD", "a456 a436 a436"),
            (8, "BNSD", "a856 a436 a436"),
            (4, "BSND", "a546 a346 a346"),
            (8, "BSND", "a582 a342 a342"),
            (4, "BSH", "a58 a38 a38"),
            (8, "BSH", "a5e a38 a38"),
            (4, "SBH", "5a8 3a8 3a8"),
        )
    ]
    + [
        c(
            lambda q, k, v, m: OPS.npu_fusion_attention(q, k, v, 4, "BNSD", atten_mask=m),
            "a456 a436 a436 53",
            "fffb",
        )
    ],
    "npu_moe_token_unpermute": [
        c(OPS.npu_moe_token_unpermute, "ab a", "fr"),
        c(OPS.npu_moe_token_unpermute, "6b 6 23", "frp"),
    ],
}


# ---------------------------------------------------------------------- random numbers

Holds = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]


def drops(together: int | None = None) -> Holds:
    """Tell that values are dropped or scaled, those of a channel (dims from `together`) alike."""

    def holds(x: torch.Tensor, y: torch.Tensor, slope: torch.Tensor) -> bool:
        kept = (y != 0).to(x.dtype)
        is_mask = torch.allclose(y, kept * x / 0.75) and torch.allclose(slope, kept / 0.75)
        channels = kept if together is None else kept.flatten(together)
        alike = together is None or bool((channels == channels[..., :1]).all())
        return is_mask and alike and 0 < kept.sum() < kept.numel()

    return holds


def _drops_to_a_level(x: torch.Tensor, y: torch.Tensor, slope: torch.Tensor) -> bool:
    scale, level = (0.75 * (1 + 0.25 * 1.7580993408473766**2)) ** -0.5, 1.7580993408473766
    kept = (slope != 0).to(x.dtype)
    wanted = scale * (torch.where(slope != 0, x, -level) + 0.25 * level)
    return torch.allclose(y, wanted) and torch.allclose(slope, kept * scale)


def _differs(least: float, most: float) -> Holds:
    return lambda x, y, slope: bool(
        len(y.unique()) > y.numel() / 2 and (least <= y).all() and (y < most).all()
    )


# What draws: a call, and what must hold of its operand, result, and gradient for ones.
RANDOM_CALLS: dict[str, tuple[OpCall, Holds]] = {
    "dropout": (c(lambda x: F.dropout(x, 0.25)), drops()),
    "alpha_dropout": (c(lambda x: F.alpha_dropout(x, 0.25, training=True)), _drops_to_a_level),
    "dropout1d": (c(lambda x: F.dropout1d(x, 0.25), "ab3"), drops(2)),
    "dropout2d": (c(lambda x: F.dropout2d(x, 0.25), "ab33"), drops(2)),
    "dropout3d": (c(lambda x: F.dropout3d(x, 0.25), "b333"), drops(1)),
    "rand_like": (c(torch.rand_like), _differs(0, 1)),
    "randn_like": (c(torch.randn_like), _differs(-6, 6)),
    "randint_like": (c(lambda x: torch.randint_like(x, 10**6, 10**7)), _differs(10**6, 10**7)),
    "bernoulli": (c(torch.bernoulli, "ab", "O"), lambda x, y, slope: torch.equal(x, y)),
    "poisson": (c(torch.poisson, "ab", "O"), lambda x, y, slope: not y[x == 0].any()),
}
