# SPDX-License-Identifier: Apache-2.0
"""Rules of normalisations, softmax and attention: the dims they mix are whole on every rank."""

from __future__ import annotations

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Call, Rule, spec

__all__ = ["RULES"]


def over_last_dims(call: Call) -> OpRule:
    """Normalise the last dims (`normalized_shape`), with weight and bias of that shape or none."""
    shape = call.numbers("normalized_shape")
    whole = " ".join(["_"] * (1 if shape is None else len(shape)))
    affine = f", {whole}" * (len(call.shapes) - 1)
    return parse_rule(f"... {whole}{affine} -> ... {whole}")


def over_dim(call: Call) -> OpRule:
    """Mix one dim (`dim`) and keep the shape."""
    dims = " ".join(spec(len(call.shape), (call.dim("dim", -1),)))
    return parse_rule(f"{dims} -> {dims}")


def attention(call: Call) -> OpRule:
    """Scaled dot-product attention: batch, heads, query rows and value columns may be cut.

    Keys and head dim are whole. Causal attention keeps the query rows whole too, since a row's
    position counts. With `enable_gqa` query heads are `(key heads, group)`.
    """
    query, key = call.shape, call.shapes[1] or ()
    rows = "_" if call.flag("is_causal") else "s"
    lead_names = [f"b{i}" for i in range(len(query) - 3)] + ["h"] * (len(query) > 2)
    is_grouped = call.flag("enable_gqa") and query[-3:-2] != key[-3:-2]
    query_names = [*lead_names[:-1], "(h g)"] if is_grouped else lead_names
    lead, query_lead = " ".join(lead_names), " ".join(query_names)
    text = f"{query_lead} {rows} _, {lead} _ _, {lead} _ e"
    if len(call.shapes) == 4:
        text += ", " + _mask(call.shapes[3] or (), query, [*query_names, rows, "_"])
    text += f" -> {query_lead} {rows} e"
    is_random = bool(call.get("dropout_p", 0.0))
    return parse_rule(text, linear=() if is_random else (2,), random=is_random)


def _mask(mask: tuple[int, ...], query: tuple[int, ...], dims: list[str]) -> str:
    """Name the dims of a mask, which broadcasts to `[..., query rows, key rows]`."""
    missing = len(query) - len(mask)
    sizes = zip(dims[missing:], mask, query[missing:], strict=True)
    return " ".join(
        "1" if size == 1 != full and name != "_" else name for name, size, full in sizes
    )


def cross_entropy(call: Call) -> OpRule:
    """Cross entropy over classes (dim 1): everything else may be cut, unless it is a mean.

    The mean divides by a number of targets that depends on their values, so it is computed whole.
    """
    ndim = len(call.shape)
    class_dim = 1 if ndim > 1 else 0
    reduction = call.get("reduction", "mean")
    names = ["_"] * ndim if reduction == "mean" else spec(ndim, (class_dim,))
    kept = [name for dim, name in enumerate(names) if dim != class_dim]
    target = names if call.shapes[1] == call.shape else kept
    weight = ", _" * (len(call.shapes) - 2)
    result = kept if reduction == "none" else []
    return parse_rule(f"{' '.join(names)}, {' '.join(target)}{weight} -> {' '.join(result)}")


RULES: dict[str, Rule] = {
    "layer_norm": over_last_dims,
    "rms_norm": over_last_dims,
    "softmax": over_dim,
    "log_softmax": over_dim,
    "scaled_dot_product_attention": attention,
    "cross_entropy": cross_entropy,
    "nll_loss": cross_entropy,
}
