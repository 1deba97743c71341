# SPDX-License-Identifier: Apache-2.0
"""Ops that are made of other ops where a rule alone would gather: statistics over cut dims.

[Note: composed] A mean loss, a variance, a norm or a softmax over a cut dim is not a reduction of
the pieces' own, but is made of sums that are. The pieces' sums are what is communicated, and counts
are global. Each function here is given a call's arguments by name and gives NotImplemented where
the op's own rule does as well: where nothing that it reduces is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, prod
from typing import Any

import torch

from hyper_parallel.dtensor.signatures import by_name

__all__ = ["composed"]

_HALF = (torch.float16, torch.bfloat16)


def composed(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op as others where that is better; else give NotImplemented."""
    made = _COMPOSED.get(name)
    if made is None:
        return NotImplemented
    given = by_name(name, args, kwargs)
    return made(func, given) if _is_ours(given) else NotImplemented


def _is_ours(given: dict[str, Any]) -> bool:
    """Tell whether the first argument is a DTensor, of real numbers, and no `out=` is given."""
    x: Any = given.get("input")
    is_real = hasattr(x, "_layout") and not x.dtype.is_complex
    return is_real and given.get("out") is None


def _dims(x: Any, dim: Any) -> list[int]:
    """List dims, non-negative; all of them for None or nothing."""
    dims = list(dim) if isinstance(dim, (list, tuple)) else [] if dim is None else [dim]
    return [d % max(x.ndim, 1) for d in dims] or list(range(x.ndim))


def _is_cut(x: Any, dims: list[int]) -> bool:
    return any(p.cut_dim in dims for p in x._layout.placements if p.cut_dim is not None)


def _dtype(func: Any, x: Any, given: dict[str, Any]) -> torch.dtype:
    """Tell what dtype the op itself gives, autocast counted in."""
    asked = given.get("dtype")
    return asked or func(x._local.detach().new_empty(1), dim=0).dtype


def _root(x: Any, power: float = 2) -> Any:
    """Take a root of what is not negative, with gradient 0 at 0 as torch's norms have."""
    is_zero = x == 0
    return x.masked_fill(is_zero, 1).pow(1 / power).masked_fill(is_zero, 0)


# ---------------------------------------------------------------------- losses


def _mean_loss(func: Any, given: dict[str, Any]) -> Any:
    """Sum what each rank holds, and divide by the number, or weight, of all targets that count."""
    x, target, weight = given["input"], given["target"], given.get("weight")
    tensors = [t for t in (x, target, weight) if t is not None]
    is_mean = given.get("reduction", "mean") == "mean"
    is_legacy = given.get("size_average") is not None or given.get("reduce") is not None
    if not is_mean or is_legacy or all(_is_whole(t) for t in tensors):
        return NotImplemented
    total = func(**{**given, "reduction": "sum"})
    if target.is_floating_point():  # a distribution over the classes
        return total / (prod(target.shape) // x.shape[min(x.ndim - 1, 1)])
    is_kept = target != given.get("ignore_index", -100)
    if weight is None:
        return total / is_kept.sum()
    weights = weight.detach()[target.masked_fill(~is_kept, 0)]
    return total / (weights * is_kept).sum()


def _is_whole(tensor: Any) -> bool:
    return not hasattr(tensor, "_layout") or tensor._layout.is_replicated


# ---------------------------------------------------------------------- moments


def _moments(has_root: bool, has_mean: bool, func: Any, given: dict[str, Any]) -> Any:
    """Variance or standard deviation, from the global mean."""
    x, dim, keepdim = given["input"], given.get("dim"), given.get("keepdim", False)
    unbiased = given.get("unbiased", True)
    if isinstance(dim, bool):  # var(x, unbiased)
        dim, unbiased = None, dim
    dims = _dims(x, dim)
    if not _is_cut(x, dims):
        return NotImplemented
    correction = given.get("correction")
    correction = (1 if unbiased else 0) if correction is None else correction
    mean = x.mean(dims, keepdim=True)
    centered = x - mean
    freedom = max(prod(x.shape[d] for d in dims) - correction, 0)
    found = (centered * centered).sum(dims, keepdim=keepdim) / freedom
    found = _root(found) if has_root else found
    if not has_mean:
        return found
    return found, mean if keepdim else mean.reshape(found.shape)


def _nanmean(func: Any, given: dict[str, Any]) -> Any:
    x, keepdim = given["input"], given.get("keepdim", False)
    dims = _dims(x, given.get("dim"))
    if not _is_cut(x, dims) or given.get("dtype") is not None:
        return NotImplemented
    return x.nansum(dims, keepdim) / (~x.isnan()).sum(dims, keepdim)


# ---------------------------------------------------------------------- norms


def norm_power(input: Any, ord: float, dim: Any = None, keepdim: bool = False) -> Any:
    """Give a vector norm to the power of its order: what adds up over pieces."""
    return torch.linalg.vector_norm(input, ord, dim, keepdim) ** ord


def _norm(func: Any, given: dict[str, Any]) -> Any:
    """Vector norm over cut dims, from the pieces' norms."""
    x, keepdim = given["input"], given.get("keepdim", False)
    order = given.get("ord", given.get("p"))
    dims = _dims(x, given.get("dim"))
    has_order = order not in (None, "fro")
    is_matrix = len(dims) > 1 and func.__name__ == "linalg_norm" and has_order
    if not _is_cut(x, dims) or is_matrix or (isinstance(order, str) and has_order):
        return NotImplemented
    order = float(order) if has_order else 2.0
    dtype = _dtype(func, x, given)
    x = x.to(torch.float32 if dtype in _HALF else dtype)
    if order in (0, inf, -inf):
        if x.requires_grad:
            return NotImplemented
        if order == 0:
            return (x != 0).sum(dims, keepdim).to(dtype)
        return x.abs().amax(dims, keepdim) if order > 0 else x.abs().amin(dims, keepdim)
    if order < 0:
        return NotImplemented
    total = _run(x, norm_power, order, dims, keepdim)
    return _root(total, order).to(dtype)


def _dist(func: Any, given: dict[str, Any]) -> Any:
    return torch.linalg.vector_norm(given["input"] - given["other"], given.get("p", 2))


def _run(x: Any, func: Any, *args: Any) -> Any:
    """Run a function of ours as an op with a rule."""
    return type(x).__torch_function__(func, (type(x),), (x, *args), {})


def _normalize(func: Any, given: dict[str, Any]) -> Any:
    x, dim, order = given["input"], given.get("dim", 1), given.get("p", 2.0)
    if not _is_cut(x, _dims(x, dim)):
        return NotImplemented
    norm = torch.linalg.vector_norm(x, order, dim, True)
    return x / norm.clamp_min(given.get("eps", 1e-12))


# ---------------------------------------------------------------------- exponentials


def _shifted(x: Any, dims: list[int]) -> tuple[Any, Any]:
    """Subtract the greatest entry, so that no power overflows; give the rest, and it."""
    with torch.no_grad():
        top = x.detach().amax(dims, keepdim=True)
        top = top.masked_fill(top.isinf(), 0)
    return x - top, top


def _logsumexp(func: Any, given: dict[str, Any]) -> Any:
    x, keepdim = given["input"], given.get("keepdim", False)
    dims = _dims(x, given.get("dim"))
    if not _is_cut(x, dims) or 0 in x.shape or not x.is_floating_point():
        return NotImplemented
    rest, top = _shifted(x, dims)
    total = rest.exp().sum(dims, keepdim=keepdim).log()
    return total + (top if keepdim else top.reshape(total.shape))


def _softmax(has_log: bool, func: Any, given: dict[str, Any]) -> Any:
    """Softmax along a cut dim, which stays cut."""
    x, dim = given["input"], given.get("dim")
    if not isinstance(dim, int) or not _is_cut(x, _dims(x, dim)) or 0 in x.shape:
        return NotImplemented
    dtype = _dtype(func, x, given)
    x = x.to(torch.float32 if dtype in _HALF else dtype)
    rest, _ = _shifted(x, [dim])
    powers = rest.exp()
    total = powers.sum(dim, keepdim=True)
    return (rest - total.log() if has_log else powers / total).to(dtype)


# ---------------------------------------------------------------------- truth


def _truth(is_all: bool, func: Any, given: dict[str, Any]) -> Any:
    """Count what speaks for or against; counts add up on every backend."""
    x, keepdim = given["input"], given.get("keepdim", False)
    dims = _dims(x, given.get("dim"))
    if not _is_cut(x, dims) or x.dtype == torch.uint8:
        return NotImplemented
    count = ((x == 0) if is_all else (x != 0)).sum(dims, keepdim=keepdim)
    return count == 0 if is_all else count != 0


def _swapped(func: Any, given: dict[str, Any]) -> Any:
    return torch.matmul(given["other"], given["input"])


_COMPOSED: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "cross_entropy": _mean_loss,
    "nll_loss": _mean_loss,
    "var": partial(_moments, False, False),
    "std": partial(_moments, True, False),
    "var_mean": partial(_moments, False, True),
    "std_mean": partial(_moments, True, True),
    "nanmean": _nanmean,
    "norm": _norm,
    "vector_norm": _norm,
    "linalg_norm": _norm,
    "dist": _dist,
    "normalize": _normalize,
    "logsumexp": _logsumexp,
    "softmax": partial(_softmax, False),
    "log_softmax": partial(_softmax, True),
    "all": partial(_truth, True),
    "any": partial(_truth, False),
    "__rmatmul__": _swapped,
}
