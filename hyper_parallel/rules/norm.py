# SPDX-License-Identifier: Apache-2.0
"""Rules of normalisations, softmax and attention: the dims they mix are whole on every rank."""

from __future__ import annotations

from functools import partial

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Call, Rule, aligned, along_dim, refuse

__all__ = ["RULES"]


def over_last_dims(call: Call) -> OpRule:
    """Normalise the last dims (`normalized_shape`), with weight and bias of that shape or none."""
    shape = call.numbers("normalized_shape")
    whole = " ".join(["_"] * (1 if shape is None else len(shape)))
    affine = f", {whole}" * (len(call.shapes) - 1)
    return parse_rule(f"... {whole}{affine} -> ... {whole}")


def group_norm(call: Call) -> OpRule:
    """Normalise groups of channels (dim 1): batch and groups may be cut.

    The number of groups is rewritten per rank (`local`).
    """
    groups, channels = call.number("num_groups"), call.shape[1]
    if groups < 1 or channels % groups:
        raise refuse("group_norm", "groups must divide the channels", num_groups=groups)
    rest = " ".join(["_"] * (len(call.shape) - 2))
    grouped = f"(g={groups} _={channels // groups})"
    affine = f", {grouped}" * (len(call.shapes) - 1)
    text = f"n {grouped} {rest}{affine} -> n {grouped} {rest}"
    return parse_rule(text, local=("num_groups",))


def batch_norm(call: Call) -> OpRule:
    """Normalise each channel (dim 1); in training over everything else, which is then whole."""
    return _by_channel(call, call.flag("training"), call.flag("training"))


def instance_norm(call: Call) -> OpRule:
    """Normalise each channel (dim 1) of each sample; running statistics need the whole batch."""
    by_input = call.flag("use_input_stats", True)
    return _by_channel(call, by_input and len(call.shapes) in (3, 5), by_input)


def _by_channel(call: Call, whole_batch: bool, whole_rest: bool) -> OpRule:
    rest = ["_" if whole_rest else f"d{i}" for i in range(len(call.shape) - 2)]
    text = " ".join(["_" if whole_batch else "n", "c", *rest])
    return parse_rule(f"{text}{', c' * (len(call.shapes) - 1)} -> {text}", empty=False)


def attention(call: Call) -> OpRule:
    """Scaled dot-product attention: batch, heads, query rows and value columns may be cut.

    Keys and head dim are whole. Causal attention keeps the query rows whole too, since a row's
    position counts, and dropout the value columns, since they lose the same keys. With `enable_gqa`
    query heads are `(key heads, group)`.
    """
    query, key = call.shape, call.shape_of(1)
    rows = "_" if call.flag("is_causal") else "s"
    lead_names = [f"b{i}" for i in range(len(query) - 3)] + ["h"] * (len(query) > 2)
    is_grouped = call.flag("enable_gqa") and query[-3:-2] != key[-3:-2]
    query_names = [*lead_names[:-1], "(h g)"] if is_grouped else lead_names
    lead, query_lead = " ".join(lead_names), " ".join(query_names)
    is_random = bool(call.get("dropout_p", 0.0))
    columns = "_" if is_random else "e"
    text = f"{query_lead} {rows} _, {lead} _ _, {lead} _ {columns}"
    if len(call.shapes) == 4:
        names = [*query_names, rows, "_"]
        text += f", {aligned(names, call.shape_of(3), (*query[:-1], key[-2]))}"
    text += f" -> {query_lead} {rows} {columns}"
    return parse_rule(text, linear=() if is_random else (2,), random=is_random)


RULES: dict[str, Rule] = {
    "layer_norm": over_last_dims,
    "rms_norm": over_last_dims,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "local_response_norm": parse_rule("n _ ... -> n _ ..."),
    **dict.fromkeys("softmax log_softmax softmin _safe_softmax".split(), along_dim),
    "normalize": partial(along_dim, default=1),
    "scaled_dot_product_attention": attention,
}
