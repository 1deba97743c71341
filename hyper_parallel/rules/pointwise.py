# SPDX-License-Identifier: Apache-2.0
"""Rules of pointwise ops: every dim may be cut; what is linear may pass a pending sum.

A python scalar operand is None: `mul(x, 2.0)` scales a pending sum, `add(x, 2.0)` cannot be done
on one, since every rank would add the scalar. Both follow from the same line.
"""

from __future__ import annotations

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Call, Rule

__all__ = ["RULES"]

_UNARY = parse_rule("... -> ...")
_UNARY_LINEAR = parse_rule("... -> ...", linear=True)
_RANDOM = parse_rule("... -> ...", random=True)
_SUM = parse_rule("... + ... -> ...", linear=True)
_BINARY = parse_rule("..., ... -> ...")
_TERNARY = parse_rule("..., ..., ... -> ...")


def cast(call: Call) -> OpRule:
    """Cast: linear, unless the result is an integer or bool (`is_floating` is False)."""
    return _UNARY_LINEAR if call.flag("is_floating", True) else _UNARY


def div(call: Call) -> OpRule:
    """Division: linear in the dividend, unless it rounds."""
    is_linear = call.get("rounding_mode") is None
    return parse_rule("..., ... -> ...", linear=(0,) if is_linear else ())


def dropout(call: Call) -> OpRule:
    """Dropout: random only while training."""
    return _RANDOM if call.flag("training", True) and call.get("p", 0.5) else _UNARY_LINEAR


def dropout_of_channels(call: Call) -> OpRule:
    """Dropout of whole channels, dim 1 of a batch: what is dropped together is not cut."""
    is_random = bool(call.flag("training", True) and call.get("p", 0.5))
    rest = " _" * (len(call.shape) - 2)
    return parse_rule(f"n c{rest} -> n c{rest}", random=is_random, linear=not is_random)


_UNARY_NAMES = (
    "abs exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal square sin cos erf sign floor ceil"
    " round sigmoid tanh relu relu6 gelu silu elu leaky_relu softplus hardtanh logsigmoid clamp"
    " isnan isinf isfinite logical_not bitwise_not nan_to_num ones_like full_like"
)
_UNARY_LINEAR_NAMES = "neg clone detach contiguous alias positive zeros_like empty_like"
_BINARY_NAMES = (
    "pow maximum minimum fmod remainder floor_divide atan2 eq ne lt le gt ge logical_and logical_or"
    " logical_xor bitwise_and bitwise_or bitwise_xor masked_fill"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNARY_NAMES.split(), _UNARY),
    **dict.fromkeys(_UNARY_LINEAR_NAMES.split(), _UNARY_LINEAR),
    **dict.fromkeys(_BINARY_NAMES.split(), _BINARY),
    "add": _SUM,
    "sub": _SUM,
    "mul": parse_rule("..., ... -> ...", linear=True),
    "div": div,
    "to": cast,
    "where": parse_rule("..., ... + ... -> ...", linear=(1, 2)),
    "lerp": parse_rule("... + ..., ... -> ...", linear=(0, 1)),
    "addcmul": parse_rule("... + ..., ... -> ...", linear=True),
    "addcdiv": parse_rule("... + ..., ... -> ...", linear=(0, 1)),
    **dict.fromkeys("dropout alpha_dropout".split(), dropout),
    **dict.fromkeys("dropout1d dropout2d dropout3d".split(), dropout_of_channels),
    **dict.fromkeys("rand_like randn_like randint_like bernoulli poisson".split(), _RANDOM),
}
