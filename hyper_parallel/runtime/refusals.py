# SPDX-License-Identifier: Apache-2.0
"""Errors that every backend gives alike: what a dtype cannot do."""

from __future__ import annotations

from hyper_parallel.core.placement import REDUCE_OPS
from hyper_parallel.errors import BackendError, LayoutError, describe

__all__ = ["cannot_reduce", "cannot_scale", "integer_average", "no_identity"]


def cannot_reduce(where: str, dtype: object, op: str, device_type: str) -> BackendError:
    """Give the error of an op that does not exist, or that this dtype does not have here."""
    if op not in REDUCE_OPS:
        text = describe(where, f"op must be one of {REDUCE_OPS}", "Name one of them", op=op)
        return BackendError(text)
    sums = op == "avg" or "complex" in str(dtype)
    text = describe(
        where,
        f"the {device_type} backend must be able to reduce this dtype with this op",
        "Reduce with sum" if sums else "Convert to float32 or int32 first",
        dtype=dtype,
        op=op,
    )
    return BackendError(text)


def cannot_scale(dtype: object, factor: float, divide: bool) -> BackendError:
    """Give the error of integers that would not stay whole, or of booleans."""
    text = describe(
        "scale",
        "integers must stay whole numbers, and bools cannot be scaled",
        "Convert to a floating-point dtype first, or reduce with sum",
        dtype=dtype,
        factor=factor,
        divide=divide,
    )
    return BackendError(text)


def no_identity(op: str, dtype: object) -> BackendError:
    """Give the error of an op that has no identity in this dtype."""
    text = describe(
        "identity",
        "op must be sum, avg or product, or, for ordered numbers, max or min",
        "Use an op that this dtype has",
        op=op,
        dtype=dtype,
    )
    return BackendError(text)


def integer_average(where: str, dtype: object) -> LayoutError:
    """Give the error of a pending average of integers, which has no exact value."""
    text = describe(
        where,
        "Partial('avg') needs a floating point tensor",
        "Use Partial('sum') and divide afterwards",
        dtype=dtype,
    )
    return LayoutError(text)
