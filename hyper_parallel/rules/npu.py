# SPDX-License-Identifier: Apache-2.0
"""Rules of vendor ops for Ascend NPUs, by name: they bind where torch_npu brings the ops.

Read from torch_npu's documentation, and tried with stand-ins of the same signatures.
"""

from __future__ import annotations

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Call, Rule, along_dim, refuse
from hyper_parallel.rules.matmul import linear
from hyper_parallel.rules.pointwise import together

__all__ = ["RULES"]


def rms_norm(call: Call) -> OpRule:
    """Normalise the last dims, those of gamma; the second result has size 1 there."""
    ndim = len(call.shape_of(1))
    whole, ones = " ".join(["_"] * ndim), " ".join(["1"] * ndim)
    return parse_rule(f"... {whole}, {whole} -> ... {whole}, ... {ones}")


def add_rms_norm(call: Call) -> OpRule:
    """Add, then normalise as `npu_rms_norm`; the sum is the third result."""
    ndim = len(call.shape_of(2))
    whole, ones = " ".join(["_"] * ndim), " ".join(["1"] * ndim)
    text = f"... {whole}, ... {whole}, {whole} -> ... {whole}, ... {ones}, ... {whole}"
    return parse_rule(text)


# The dims of query (and output) and of key and value; h is heads, e one head, s a sequence.
_LAYOUTS = {
    "BNSD": ("b {} _ _", "b h _ _"),
    "BSND": ("b _ {} _", "b _ h _"),
    "BSH": ("b _ {}", "b _ {}"),
    "SBH": ("_ b {}", "_ b {}"),
}


def fusion_attention(call: Call) -> OpRule:
    """Attention: batch and heads may be cut; the number of heads is rewritten per rank (`local`).

    Where there are fewer key heads, query heads are `(key heads, group)`. A mask of two dims is
    whole. Of the results four are tensors: the output, and maxima and sums for the backward.
    """
    layout, heads = str(call.get("input_layout")), call.number("head_num")
    if layout not in _LAYOUTS or len(call.shapes) not in (3, 4):
        raise refuse("npu_fusion_attention", "the layout must be dense", input_layout=layout)
    if len(call.shapes) == 4 and len(call.shape_of(3)) != 2:
        raise refuse("npu_fusion_attention", "the mask must have two dims", shapes=call.shapes)
    query, key = call.shape, call.shape_of(1)
    if layout in ("BSH", "SBH"):
        key_heads = heads * key[2] // query[2]
    else:
        key_heads = key[layout.index("N")]
    group = heads // max(key_heads, 1)
    is_flat = layout.endswith("H")
    inner = [f"g={group}"] if group > 1 else []
    outer = f"h={key_heads}"
    of_query = " ".join([outer, *inner, *(["_"] if is_flat else [])])
    of_key = f"{outer} _" if is_flat else outer
    wrapped = f"({of_query})" if " " in of_query else of_query
    texts = _LAYOUTS[layout]
    q, k = texts[0].format(wrapped), texts[1].format(f"({of_key})")
    per_row = f"b ({' '.join([outer, *inner])}) _ _" if inner else f"b {outer} _ _"
    mask = ", _ _" if len(call.shapes) == 4 else ""
    text = f"{q}, {k}, {k}{mask} -> {q}, {per_row}, {per_row}, _"
    is_random = call.get("keep_prob", 1.0) != 1.0
    return parse_rule(text, local=("head_num",), random=is_random, empty=False)


def token_unpermute(call: Call) -> OpRule:
    """Put tokens back in order, weighted by `probs` if given: the hidden dim may be cut."""
    probs = ", _ _" if len(call.shapes) == 3 else ""
    return parse_rule(f"_ h, _{probs} -> _ h", linear=(0,))


RULES: dict[str, Rule] = {
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_rotary_mul": parse_rule("... _, ... _, ... _ -> ... _"),
    "npu_swiglu": along_dim,
    "npu_geglu": parse_rule("... _ -> ... _, ... _"),
    **dict.fromkeys("npu_fast_gelu npu_gelu npu_silu npu_mish".split(), together),
    "npu_linear": linear,
    "npu_scaled_masked_softmax": parse_rule("... _ _, ... _ _ -> ... _ _"),
    "npu_fusion_attention": fusion_attention,
    "npu_moe_token_unpermute": token_unpermute,
}
