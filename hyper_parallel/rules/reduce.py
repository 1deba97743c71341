# SPDX-License-Identifier: Apache-2.0
"""Rules of reductions: generated from the dims that are reduced."""

from __future__ import annotations

from functools import partial

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Call, Rule, letters, spec

__all__ = ["RULES"]


def _dims(call: Call) -> tuple[int, ...]:
    """Give the reduced dims, non-negative; all of them where `dim` is None or empty."""
    dims = call.numbers("dim")
    if not dims:
        return tuple(range(len(call.shape)))
    return tuple(call.normalize(dim) for dim in dims) if call.shape else ()


def _results(names: list[str], dims: tuple[int, ...], keepdim: bool) -> str:
    kept = ["1" if dim in dims else name for dim, name in enumerate(names)]
    return " ".join(kept if keepdim else [n for dim, n in enumerate(kept) if dim not in dims])


def _by_pieces(reduce_op: str, is_linear: bool, call: Call) -> OpRule:
    """Reduce pieces on their own: a cut reduced dim leaves a pending reduction."""
    names = letters(len(call.shape))
    result = _results(names, _dims(call), call.flag("keepdim"))
    return parse_rule(f"{' '.join(names)} -> {result}", reduce=reduce_op, linear=is_linear)


def _whole(call: Call) -> OpRule:
    """Reduce whole dims only."""
    names = spec(len(call.shape), _dims(call))
    return parse_rule(f"{' '.join(names)} -> {_results(names, _dims(call), call.flag('keepdim'))}")


def _scan(is_linear: bool, call: Call) -> OpRule:
    """Run along one whole dim and keep the shape."""
    dims = " ".join(spec(len(call.shape), (call.dim("dim"),)))
    return parse_rule(f"{dims} -> {dims}", linear=is_linear)


def _with_indices(num_results: int, call: Call) -> OpRule:
    """Give values and positions along one whole dim (`dim`), keeping the number of dims."""
    dims = " ".join(spec(len(call.shape), (call.dim("dim", -1),)))
    return parse_rule(f"{dims} -> {', '.join([dims] * num_results)}")


RULES: dict[str, Rule] = {
    "sum": partial(_by_pieces, "sum", True),
    "mean": partial(_by_pieces, "avg", True),
    "amax": partial(_by_pieces, "max", False),
    "amin": partial(_by_pieces, "min", False),
    "prod": partial(_by_pieces, "product", False),
    "var": _whole,
    "std": _whole,
    "logsumexp": _whole,
    "vector_norm": _whole,
    "argmax": _whole,
    "argmin": _whole,
    "cumsum": partial(_scan, True),
    "cumprod": partial(_scan, False),
    "topk": partial(_with_indices, 2),
    "sort": partial(_with_indices, 2),
    "argsort": partial(_with_indices, 1),
}
