# SPDX-License-Identifier: Apache-2.0
"""Rules of losses: sums leave a pending sum, means one of shares; what a loss mixes is whole."""

from __future__ import annotations

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Argument, Call, Rule, aligned, refuse, spec

__all__ = ["RULES"]


def _reduction(call: Call) -> Argument:
    if call.get("size_average") is not None or call.get("reduce") is not None:
        raise refuse("loss", "the reduction must be given as reduction=")
    return call.get("reduction", "mean")


def _reduced(operands: str, result: str, call: Call) -> OpRule:
    """Reduce what a loss gives without reduction as `reduction` says."""
    reduction = _reduction(call)
    if reduction == "none":
        return parse_rule(f"{operands} -> {result}")
    if reduction not in ("sum", "mean"):
        raise refuse("loss", "reduction must be none, sum or mean", reduction=reduction)
    return parse_rule(f"{operands} ->", reduce="sum" if reduction == "sum" else "avg")


def pointwise(call: Call) -> OpRule:
    """Compare element by element."""
    return _reduced(", ".join(["..."] * len(call.shapes)), "...", call)


def weighted(call: Call) -> OpRule:
    """Compare element by element; a mean with weights divides by their sum, so it is whole."""
    if len(call.shapes) > 2 and call.get("reduction", "mean") == "mean":
        raise refuse("loss", "a weighted mean must be computed whole")
    return pointwise(call)


def kl_div(call: Call) -> OpRule:
    """Compare element by element; "batchmean" averages over dim 0 and sums over the rest."""
    if call.get("reduction") != "batchmean":
        return pointwise(call)
    if call.shapes[0] != call.shapes[1] or not call.shape:
        raise refuse("kl_div", "the shapes must be equal", shapes=call.shapes)
    dims = " ".join(["n", *["_"] * (len(call.shape) - 1)])
    return parse_rule(f"{dims}, {dims} ->", reduce="avg")


def gaussian_nll(call: Call) -> OpRule:
    """Compare element by element; the variance may lack the last dim."""
    variance = call.shapes[2]
    if variance is not None and len(variance) != len(call.shape):
        raise refuse("gaussian_nll_loss", "var must have all dims", shapes=call.shapes)
    return pointwise(call)


def by_row(call: Call) -> OpRule:
    """Compare whole rows (the last dim); a class index or a sign is one for a row."""
    ndim = len(call.shape)
    dims = [
        "..." if len(shape or ()) < ndim else "... _" if ndim else "..." for shape in call.shapes
    ]
    return _reduced(", ".join(dims), "...", call)


def with_classes(call: Call) -> OpRule:
    """Compare whole rows, with a weight for each class last."""
    rows = by_row(Call(call.shapes[:2], call.args))
    if len(call.shapes) == 2:
        return rows
    left, _, right = rows.text.partition("->")
    return parse_rule(f"{left}, _ -> {right}", reduce=rows.reduce)


def cosine_embedding(call: Call) -> OpRule:
    """Compare two whole vectors, or a batch of pairs."""
    lead = "n" if len(call.shape) == 2 else ""
    return _reduced(f"{lead} _, {lead} _, {lead}", lead, call)


def cross_entropy(call: Call) -> OpRule:
    """Cross entropy over classes (dim 1): everything else may be cut, unless it is a mean.

    The mean divides by a number of targets that depends on their values; what is cut is summed
    and divided afterwards, in dtensor/composed.py.
    """
    ndim = len(call.shape)
    class_dim = 1 if ndim > 1 else 0
    reduction = _reduction(call)
    names = ["_"] * ndim if reduction == "mean" else spec(ndim, (class_dim,))
    kept = [name for dim, name in enumerate(names) if dim != class_dim]
    target = names if call.shapes[1] == call.shape else kept
    weight = ", _" * (len(call.shapes) - 2)
    result = kept if reduction == "none" else []
    return parse_rule(f"{' '.join(names)}, {' '.join(target)}{weight} -> {' '.join(result)}")


def distance(call: Call) -> OpRule:
    """Compare whole vectors along the last dim."""
    kept = " 1" if call.flag("keepdim") else ""
    return parse_rule(f"... _, ... _ -> ...{kept}")


def similarity(call: Call) -> OpRule:
    """Compare whole vectors along one dim (`dim`)."""
    first, second = (shape or () for shape in call.shapes)
    if len(first) != len(second):
        raise refuse("cosine_similarity", "there must be as many dims", shapes=call.shapes)
    dim = call.dim("dim", 1)
    full = tuple(map(max, first, second))
    names = spec(len(full), (dim,))
    dims = f"{aligned(names, first, full)}, {aligned(names, second, full)}"
    return parse_rule(f"{dims} -> {' '.join(names[:dim] + names[dim + 1 :])}")


_POINTWISE = (
    "binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss"
    " soft_margin_loss hinge_embedding_loss margin_ranking_loss"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_POINTWISE.split(), pointwise),
    **dict.fromkeys("mse_loss l1_loss smooth_l1_loss huber_loss".split(), weighted),
    "kl_div": kl_div,
    "gaussian_nll_loss": gaussian_nll,
    **dict.fromkeys("triplet_margin_loss multilabel_margin_loss".split(), by_row),
    **dict.fromkeys("multi_margin_loss multilabel_soft_margin_loss".split(), with_classes),
    "cosine_embedding_loss": cosine_embedding,
    **dict.fromkeys("cross_entropy nll_loss".split(), cross_entropy),
    "pairwise_distance": distance,
    "cosine_similarity": similarity,
}
