# SPDX-License-Identifier: Apache-2.0
"""Rules of convolution, pooling, padding and transforms: what they mix in space is whole."""

from __future__ import annotations

from functools import partial

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Call, Rule, alike, refuse, spec

__all__ = ["RULES"]


def conv(is_transposed: bool, call: Call) -> OpRule:
    """Convolution: batch, output channels, and input channels (a pending sum) may be cut.

    With `groups` the groups are cut in place of channels, and rewritten per rank (`local`).
    """
    weight, groups = call.shape_of(1), call.number("groups", 1)
    space = " ".join(["_"] * (len(weight) - 2))
    batch = "n" if len(call.shape) == len(weight) else ""
    if groups == 1:
        given, kernel, made = "c", "c o" if is_transposed else "o c", "o"
    else:
        outside, inside = weight[0] // groups, weight[1]
        lead, rest = f"(g={groups} _={outside})", f"_={inside}"
        grouped = f"(g={groups} {rest})"
        given, made = (lead, grouped) if is_transposed else (grouped, lead)
        kernel = f"{lead} {rest}"
    bias = f" + {made}" if len(call.shapes) == 3 else ""
    text = f"{batch} {given} {space}, {kernel} {space}{bias} -> {batch} {made} {space}"
    return parse_rule(text, linear=True, local=("groups",) if groups > 1 else (), empty=False)


def over_space(num_dims: int, num_results: int, call: Call) -> OpRule:
    """Transform the last dims, which are whole; the leading ones (batch, channels) may be cut."""
    space = " ".join(["_"] * num_dims)
    results = ", ".join([f"... {space}"] * num_results)
    return parse_rule(f"... {space} -> {results}", empty=False)


def resample(call: Call) -> OpRule:
    """Resample all dims behind batch and channels."""
    return alike(["n", "c", *["_"] * (len(call.shape) - 2)], empty=False)


def pad(call: Call) -> OpRule:
    """Pad the last dims, as many as `pad` has pairs; a dim that gets nothing may be cut."""
    amounts = call.numbers("pad") or ()
    ndim = len(call.shape)
    is_constant = call.get("mode", "constant") == "constant"
    padded = {ndim - 1 - i // 2 for i, amount in enumerate(amounts) if amount or not is_constant}
    if len(amounts) > 2 * ndim:
        raise refuse("pad", "pad must have at most two numbers for each dim", pad=amounts)
    is_linear = is_constant and not call.get("value")
    return alike(spec(ndim, tuple(padded)), linear=is_linear, empty=is_constant)


def pixel_shuffle(call: Call) -> OpRule:
    """Move channels into space; only whole groups of channels may be cut."""
    factor = call.number("upscale_factor")
    return parse_rule(f"... (c _={factor * factor}) _ _ -> ... c _ _", linear=True, empty=False)


def pixel_unshuffle(call: Call) -> OpRule:
    """Move space into channels."""
    factor = call.number("downscale_factor")
    return parse_rule(f"... c _ _ -> ... (c _={factor * factor}) _ _", linear=True, empty=False)


def grid_sample(call: Call) -> OpRule:
    """Sample at the positions of a grid, which is one for all channels."""
    space = " ".join(["_"] * (len(call.shape) - 2))
    return parse_rule(f"n c {space}, n {space} _ -> n c {space}", empty=False)


_POOLS = "max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool"

RULES: dict[str, Rule] = {
    **{f"conv{n}d": partial(conv, False) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": partial(conv, True) for n in (1, 2, 3)},
    **{f"{pool}{n}d": partial(over_space, n, 1) for pool in _POOLS.split() for n in (1, 2, 3)},
    **{
        f"{pool}{n}d_with_indices": partial(over_space, n, 2)
        for pool in ("max_pool", "adaptive_max_pool")
        for n in (1, 2, 3)
    },
    "interpolate": resample,
    "pad": pad,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "channel_shuffle": parse_rule("n _ ... -> n _ ...", linear=True, empty=False),
    "grid_sample": grid_sample,
    "im2col": parse_rule("n _ _ _ -> n _ _", linear=True, empty=False),
    "col2im": parse_rule("n _ _ -> n _ _ _", linear=True, empty=False),
}
