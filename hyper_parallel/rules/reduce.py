# SPDX-License-Identifier: Apache-2.0
"""Rules of reductions and scans: generated from the dims that are reduced."""

from __future__ import annotations

from functools import partial

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Call, Rule, letters, reduced, refuse, spec
from hyper_parallel.rules.pointwise import together

__all__ = ["RULES", "whole"]


def _by_pieces(reduce_op: str, is_linear: bool, call: Call) -> OpRule:
    """Reduce pieces on their own: a cut reduced dim leaves a pending reduction."""
    names = letters(len(call.shape))
    result = reduced(names, call.dims(), call.flag("keepdim"))
    return parse_rule(f"{' '.join(names)} -> {result}", reduce=reduce_op, linear=is_linear)


def whole(num_results: int, call: Call) -> OpRule:
    """Reduce whole dims only."""
    return over(call.dims(), num_results, call)


def over(dims: tuple[int, ...], num_results: int, call: Call) -> OpRule:
    """Reduce these whole dims."""
    names = spec(len(call.shape), dims)
    result = reduced(names, dims, call.flag("keepdim"))
    return parse_rule(f"{' '.join(names)} -> {', '.join([result] * num_results)}")


def _scan(num_results: int, is_linear: bool, call: Call) -> OpRule:
    """Run along one whole dim and keep the shape."""
    dims = " ".join(spec(len(call.shape), (call.dim("dim", -1),)))
    return parse_rule(f"{dims} -> {', '.join([dims] * num_results)}", linear=is_linear)


def _ordered(num_results: int, call: Call) -> OpRule:
    """Choose along one whole dim (`dim`), which is kept or dropped; all dims without `dim`."""
    if call.get("dim") is None:
        return over(tuple(range(len(call.shape))), 1, call)
    return over((call.dim("dim"),), num_results, call)


def kthvalue(call: Call) -> OpRule:
    """Choose along the last dim, or `dim`."""
    return over((call.dim("dim", -1),), 2, call)


def extreme(reduce_op: str, call: Call) -> OpRule:
    """Maximum or minimum of everything, along a dim (with positions), or of two tensors."""
    if len(call.shapes) == 2:
        return together(call)
    if call.get("dim") is not None:
        return over((call.dim("dim"),), 2, call)
    return parse_rule(f"{' '.join(letters(len(call.shape)))} ->", reduce=reduce_op)


def norm(call: Call) -> OpRule:
    """Vector norm over whole dims; of all dims flattened where none is given."""
    return over(call.dims(), 1, call)


def quantile(call: Call) -> OpRule:
    """Quantiles along one whole dim, or of everything; several make a new first dim."""
    dim = call.get("dim")
    dims = tuple(range(len(call.shape))) if dim is None else (call.dim("dim"),)
    names = spec(len(call.shape), dims)
    asked = call.shapes[1] if len(call.shapes) > 1 else None
    new = "_ " * len(asked or ())
    points = f", {new}" if asked is not None else ""
    if len(call.shapes) > 1 and asked is None:
        points = ", "
    result = reduced(names, dims, call.flag("keepdim"))
    return parse_rule(f"{' '.join(names)}{points} -> {new}{result}", empty=False)


def trace(call: Call) -> OpRule:
    """Sum the diagonal of a whole matrix."""
    if len(call.shape) != 2:
        raise refuse("trace", "the operand must be a matrix", shape=call.shape)
    return parse_rule("_ _ -> ", linear=True)


def difference(call: Call) -> OpRule:
    """Differences along one whole dim."""
    if len(call.shapes) > 1:
        raise refuse("diff", "prepend and append must be absent", shapes=call.shapes)
    return _scan(1, True, call)


def renorm(call: Call) -> OpRule:
    """Bound the norms of the slices of one dim, whose other dims are whole."""
    kept = call.dim("dim")
    dims = spec(len(call.shape), tuple(i for i in range(len(call.shape)) if i != kept))
    return parse_rule(f"{' '.join(dims)} -> {' '.join(dims)}")


def trapezoid(is_kept: bool, call: Call) -> OpRule:
    """Integrate along one whole dim (`dim`), of evenly spaced points."""
    if len(call.shapes) > 1:
        raise refuse("trapezoid", "x must be absent", shapes=call.shapes)
    dim = call.dim("dim", -1)
    names = spec(len(call.shape), (dim,))
    result = names if is_kept else [*names[:dim], *names[dim + 1 :]]
    return parse_rule(f"{' '.join(names)} -> {' '.join(result)}", linear=True)


def searchsorted(call: Call) -> OpRule:
    """Positions of values in whole sorted rows; leading dims go together."""
    rows, values = call.shape_of(0), call.shapes[1]
    if values is None:
        return parse_rule("_, -> ")
    sorter = len(call.shapes) > 2
    if len(rows) == 1:
        return parse_rule("_, ...{} -> ...".format(", _" if sorter else ""))
    lead = " ".join(letters(len(rows) - 1))
    text = f"{lead} _, {lead} v" + (f", {lead} _" if sorter else "")
    return parse_rule(f"{text} -> {lead} v")


RULES: dict[str, Rule] = {
    "sum": partial(_by_pieces, "sum", True),
    "nansum": partial(_by_pieces, "sum", False),
    "count_nonzero": partial(_by_pieces, "sum", False),
    "norm_power": partial(_by_pieces, "sum", False),
    "mean": partial(_by_pieces, "avg", True),
    "amax": partial(_by_pieces, "max", False),
    "amin": partial(_by_pieces, "min", False),
    "prod": partial(_by_pieces, "product", False),
    "max": partial(extreme, "max"),
    "min": partial(extreme, "min"),
    **dict.fromkeys(
        "all any argmax argmin logsumexp nanmean std var vector_norm linalg_matrix_norm".split(),
        partial(whole, 1),
    ),
    **dict.fromkeys("aminmax std_mean var_mean".split(), partial(whole, 2)),
    "norm": norm,
    "linalg_norm": norm,
    **dict.fromkeys("median nanmedian".split(), partial(_ordered, 2)),
    **dict.fromkeys("kthvalue mode".split(), kthvalue),
    "quantile": quantile,
    "nanquantile": quantile,
    "cumsum": partial(_scan, 1, True),
    **dict.fromkeys("cumprod logcumsumexp".split(), partial(_scan, 1, False)),
    **dict.fromkeys("cummax cummin sort topk".split(), partial(_scan, 2, False)),
    **dict.fromkeys("argsort glu".split(), partial(_scan, 1, False)),
    "msort": parse_rule("_ ... -> _ ..."),
    "renorm": renorm,
    "trapezoid": partial(trapezoid, False),
    "cumulative_trapezoid": partial(trapezoid, True),
    "diff": difference,
    "trace": trace,
    "searchsorted": searchsorted,
}
