# SPDX-License-Identifier: Apache-2.0
"""Rules of reductions and scans: generated from the dims that are reduced."""

from __future__ import annotations

from functools import partial

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import (
    Call,
    Rule,
    alike,
    along_dim,
    letters,
    over_dims,
    reduced,
    refuse,
    spec,
)
from hyper_parallel.rules.pointwise import together

__all__ = ["RULES"]


def _by_pieces(reduce_op: str, is_linear: bool, call: Call) -> OpRule:
    """Reduce pieces on their own: a cut reduced dim leaves a pending reduction."""
    names = letters(len(call.shape))
    result = reduced(names, call.dims(), call.flag("keepdim"))
    return parse_rule(f"{' '.join(names)} -> {result}", reduce=reduce_op, linear=is_linear)


def whole(num_results: int, call: Call) -> OpRule:
    """Reduce whole dims only."""
    return over_dims(call, call.dims(), num_results)


def chosen(default: int | None, call: Call) -> OpRule:
    """Choose along one whole dim (`dim`), with positions; along all where none is given."""
    if default is None and call.get("dim") is None:
        return over_dims(call, range(len(call.shape)))
    return over_dims(call, (call.dim("dim", default),), 2)


def extreme(reduce_op: str, call: Call) -> OpRule:
    """Maximum or minimum of everything, along a dim (with positions), or of two tensors."""
    if len(call.shapes) == 2:
        return together(call)
    if call.get("dim") is not None:
        return over_dims(call, (call.dim("dim"),), 2)
    return parse_rule(f"{' '.join(letters(len(call.shape)))} ->", reduce=reduce_op)


def quantile(call: Call) -> OpRule:
    """Quantiles along one whole dim, or of everything; several make a new first dim."""
    dim = call.get("dim")
    dims = tuple(range(len(call.shape))) if dim is None else (call.dim("dim"),)
    names = spec(len(call.shape), dims)
    is_asked = len(call.shapes) > 1
    new = "_ " * len(call.shapes[1] or ()) if is_asked else ""
    points = f", {new}" if is_asked else ""
    result = reduced(names, dims, call.flag("keepdim"))
    return parse_rule(f"{' '.join(names)}{points} -> {new}{result}", empty=False)


def difference(call: Call) -> OpRule:
    """Differences along one whole dim."""
    if len(call.shapes) > 1:
        raise refuse("diff", "prepend and append must be absent", shapes=call.shapes)
    return along_dim(call, linear=True)


def renorm(call: Call) -> OpRule:
    """Bound the norms of the slices of one dim, whose other dims are whole."""
    kept = call.dim("dim")
    return alike(["a" if i == kept else "_" for i in range(len(call.shape))])


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
    lead = " ".join(letters(len(rows) - 1))
    sorter = f", {lead} _" if len(call.shapes) > 2 else ""
    if len(rows) == 1:
        return parse_rule(f"_, ...{sorter} -> ...")
    return parse_rule(f"{lead} _, {lead} v{sorter} -> {lead} v")


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
        "all any argmax argmin logsumexp nanmean std var norm vector_norm linalg_norm"
        " linalg_matrix_norm".split(),
        partial(whole, 1),
    ),
    **dict.fromkeys("aminmax std_mean var_mean".split(), partial(whole, 2)),
    **dict.fromkeys("median nanmedian".split(), partial(chosen, None)),
    **dict.fromkeys("kthvalue mode".split(), partial(chosen, -1)),
    "quantile": quantile,
    "nanquantile": quantile,
    "cumsum": partial(along_dim, linear=True),
    **dict.fromkeys("cumprod logcumsumexp argsort glu".split(), along_dim),
    **dict.fromkeys("cummax cummin sort topk".split(), partial(along_dim, results=2)),
    "msort": parse_rule("_ ... -> _ ..."),
    "renorm": renorm,
    "trapezoid": partial(trapezoid, False),
    "cumulative_trapezoid": partial(trapezoid, True),
    "diff": difference,
    "trace": parse_rule("_ _ -> ", linear=True),
    "searchsorted": searchsorted,
}
