# SPDX-License-Identifier: Apache-2.0
"""Global shapes of an op's results: told for the most common ops, asked of torch for the others."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.rules import pointwise

__all__ = ["asked_shapes", "on_meta", "told_shapes"]

_SHAPE_KEEPING = frozenset("layer_norm rms_norm softmax log_softmax".split())


def told_shapes(
    name: str, operands: Sequence[Any], static: dict[str, Any]
) -> list[tuple[int, ...]] | None:
    """Give the global shapes of the results of the most common ops; None: ask torch.

    For these torch's way to tell, meta tensors, imports the compiler at first use, which takes a
    second.
    """
    shapes = [t._layout.shape for t in operands if t is not None]
    if name in _SHAPE_KEEPING:
        return shapes[:1]
    if name in pointwise.BROADCASTING:
        try:
            return [tuple(torch.broadcast_shapes(*shapes))]
        except RuntimeError:
            return None  # torch will refuse it in its own words
    dim = static.get("dim")
    if name == "mean" and dim is None and not static.get("keepdim"):
        return [()]
    if name == "mean" and type(dim) is int and -len(shapes[0]) <= dim < len(shapes[0]):
        kept = list(shapes[0])
        kept[dim : dim + 1 or None] = [1] if static.get("keepdim") else []
        return [tuple(kept)]
    return None


def asked_shapes(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[int, ...]] | None:
    """Give the global shapes of the op's results; None: torch cannot tell without data."""
    if name == "to":
        return [tuple(args[0].shape)]
    try:
        with torch.no_grad():
            results, _ = tree_flatten(on_meta(func, args, kwargs))
    except NotImplementedError:
        return None
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        return None
    return [tuple(r.shape) for r in results if isinstance(r, torch.Tensor)]


def on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the op on meta tensors of the global shapes; arguments that are such are taken as is.

    A call that torch refuses fails here, with torch's own text.
    """
    flat, tree = tree_flatten((args, kwargs))
    # On meta tensors torch takes only this dtype, on others more.
    only = torch.bfloat16 if getattr(func, "__name__", "") == "_grouped_mm" else None
    meta_args, meta_kwargs = tree_unflatten([_meta(value, only) for value in flat], tree)
    meta_kwargs.pop("device", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the op itself will warn
        return func(*meta_args, **meta_kwargs)


def _meta(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    dtype = dtype if dtype and value.ndim > 1 else value.dtype
    if type(value) is torch.Tensor and value.is_meta:
        return value.to(dtype)
    return torch.empty(tuple(value.shape), dtype=dtype, device="meta")
