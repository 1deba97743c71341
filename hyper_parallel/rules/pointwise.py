# SPDX-License-Identifier: Apache-2.0
"""Rules of pointwise ops: every dim may be cut; what is linear may pass a pending sum.

A python scalar operand is None: `mul(x, 2.0)` scales a pending sum, `add(x, 2.0)` cannot be done
on one, since every rank would add the scalar. Both follow from the same line.
"""

from __future__ import annotations

from functools import partial

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Call, Rule, alike

__all__ = ["BROADCASTING", "ELEMENTWISE", "RULES"]

_LINEAR = parse_rule("... -> ...", linear=True)
_RANDOM = parse_rule("... -> ...", random=True)
_SUM = parse_rule("... + ... -> ...", linear=True)


def together(call: Call) -> OpRule:
    """Broadcast any number of operands."""
    return parse_rule(f"{', '.join(['...'] * len(call.shapes))} -> ...")


def spread(call: Call) -> OpRule:
    """Give every operand, broadcast."""
    return alike(["..."], len(call.shapes), len(call.shapes))


def cast(call: Call) -> OpRule:
    """Cast: linear, unless the result is not floating or of fewer bytes (`is_linear` is False)."""
    return _LINEAR if call.flag("is_linear", True) else together(call)


def div(call: Call) -> OpRule:
    """Division: linear in the dividend, unless it rounds."""
    is_linear = call.get("rounding_mode") is None
    return parse_rule("..., ... -> ...", linear=(0,) if is_linear else ())


def dropout(call: Call) -> OpRule:
    """Dropout: random only while training."""
    return _RANDOM if call.flag("training", True) and call.get("p", 0.5) else _LINEAR


def dropout_of_channels(call: Call, unbatched: int | None = None) -> OpRule:
    """Dropout of whole channels: what is dropped together is not cut.

    Channels are dim 1, but dim 0 of a tensor with `unbatched` dims.
    """
    is_random = bool(call.flag("training", True) and call.get("p", 0.5))
    lead = ["c"] if len(call.shape) == unbatched else ["n", "c"]
    dims = [*lead, *["_"] * (len(call.shape) - len(lead))]
    return alike(dims, random=is_random, linear=not is_random)


def one_hot(call: Call) -> OpRule:
    """Spread positions over a new dim of `num_classes`."""
    classes = call.number("num_classes", -1)
    return parse_rule(f"... -> ... _={classes}" if classes > 0 else "... -> ... _")


def prelu(call: Call) -> OpRule:
    """Leaky unit with one slope, or a slope for each channel (dim 1)."""
    slopes, ndim = call.shape_of(1), len(call.shape)
    if slopes in ((), (1,)) or ndim < 2:
        return parse_rule("..., _ -> ..." if slopes else "..., -> ...")
    rest = " ".join(f"d{i}" for i in range(ndim - 2))
    return parse_rule(f"n c {rest}, c -> n c {rest}")


_TOGETHER = (
    # of one operand
    "abs acos acosh angle asin asinh atan atanh bitwise_not ceil cos cosh digamma erf erfc erfinv"
    " exp exp2 expm1 floor frac full_like i0 isfinite isinf isnan isneginf isposinf isreal lgamma"
    " log log10 log1p log2 logical_not logit mvlgamma nan_to_num ones_like polygamma"
    " reciprocal round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc"
    # torch.special
    " airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx i0e i1 i1e log_ndtr"
    " modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtr ndtri"
    " scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0"
    # torch.nn.functional
    " celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6"
    " selu silu softplus softshrink softsign tanhshrink threshold"
    # of several operands
    " atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp"
    " clamp_max clamp_min copysign eq fill float_power floor_divide fmax fmin fmod gcd ge gt"
    " heaviside hypot igamma igammac isclose lcm le logaddexp logaddexp2 logical_and logical_or"
    " logical_xor lt masked_fill maximum minimum ne nextafter pow remainder xlog1py xlogy zeta"
    " chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w"
    " hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p"
    " shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v"
    " shifted_chebyshev_polynomial_w polar"
)
_LINEAR_NAMES = (
    "alias clone conj conj_physical contiguous deg2rad detach empty_like imag neg positive rad2deg"
    " real resolve_conj resolve_neg zeros_like"
)

# What works element by element, so that it may run in place on shards of one layout.
ELEMENTWISE = frozenset(
    f"{_TOGETHER} {_LINEAR_NAMES} add sub mul div where lerp addcmul addcdiv ldexp".split()
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_TOGETHER.split(), together),
    **dict.fromkeys(_LINEAR_NAMES.split(), _LINEAR),
    "add": _SUM,
    "sub": _SUM,
    "complex": _SUM,
    "mul": parse_rule("..., ... -> ...", linear=True),
    "div": div,
    "rdiv": parse_rule("..., ... -> ...", linear=(1,)),
    "ldexp": parse_rule("..., ... -> ...", linear=(0,)),
    "to": cast,
    "where": parse_rule("..., ... + ... -> ...", linear=(1, 2)),
    "lerp": parse_rule("... + ..., ... -> ...", linear=(0, 1)),
    "addcmul": parse_rule("... + ..., ... -> ...", linear=True),
    "addcdiv": parse_rule("... + ..., ... -> ...", linear=(0, 1)),
    **dict.fromkeys("dropout alpha_dropout".split(), dropout),
    "dropout1d": partial(dropout_of_channels, unbatched=2),
    "dropout2d": dropout_of_channels,
    "dropout3d": partial(dropout_of_channels, unbatched=4),
    **dict.fromkeys("rand_like randn_like randint_like bernoulli poisson".split(), _RANDOM),
    "frexp": parse_rule("... -> ..., ..."),
    "view_as_real": parse_rule("... -> ... _=2", linear=True),
    "view_as_complex": parse_rule("... _ -> ...", linear=True),
    "broadcast_tensors": spread,
    "prelu": prelu,
    "one_hot": one_hot,
    "bucketize": parse_rule("..., _ -> ..."),
}
_OTHERWISE = "frexp view_as_real view_as_complex broadcast_tensors one_hot bucketize"
# What gives one result, of the shape that the operands broadcast to.
BROADCASTING = frozenset(RULES).difference(_OTHERWISE.split())
