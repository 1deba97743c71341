# SPDX-License-Identifier: Apache-2.0
"""What every backend does and refuses alike: identities, whole numbers, what a dtype cannot do."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.placement import REDUCE_OPS
from hyper_parallel.errors import BackendError, LayoutError, describe

__all__ = ["cannot_reduce", "identity_value", "integer_average", "scaled_integers"]


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


def scaled_integers(x: Any, factor: float, divide: bool) -> Any:
    """Multiply or divide an array of whole numbers, which must stay whole; refuse bools.

    Raises:
        BackendError: the result has no exact value in this dtype.
    """
    whole = int(factor)
    exact = "bool" not in str(x.dtype) and whole == factor
    if exact and divide:
        exact = whole != 0 and not bool((x % whole).any())
    if not exact:
        text = describe(
            "scale",
            "integers must stay whole numbers, and bools cannot be scaled",
            "Convert to a floating-point dtype first, or reduce with sum",
            dtype=x.dtype,
            factor=factor,
            divide=divide,
        )
        raise BackendError(text)
    return x // whole if divide else x * whole


def identity_value(op: str, dtype: object, limits: tuple[Any, Any] | None) -> Any:
    """Give what a reduction leaves as it is: of max the lowest value, of min the highest.

    Args:
        op: the reduction.
        dtype: the dtype, for the error.
        limits: its lowest and highest value; None: it has no order.

    Returns:
        The number.

    Raises:
        BackendError: no such op, or not in this dtype.
    """
    if op in ("sum", "avg", "product"):
        return int(op == "product")
    if op not in ("max", "min") or limits is None:
        text = describe(
            "identity",
            "op must be sum, avg or product, or, for ordered numbers, max or min",
            "Use an op that this dtype has",
            op=op,
            dtype=dtype,
        )
        raise BackendError(text)
    return limits[op == "min"]


def integer_average(where: str, dtype: object) -> LayoutError:
    """Give the error of a pending average of integers, which has no exact value."""
    text = describe(
        where,
        "Partial('avg') needs a floating point tensor",
        "Use Partial('sum') and divide afterwards",
        dtype=dtype,
    )
    return LayoutError(text)
