# SPDX-License-Identifier: Apache-2.0
"""NumpyOps: the local operations of a plan on NumPy arrays, and reductions in group order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_parallel.runtime.refusals import cannot_reduce, identity_value, scaled_integers

__all__ = ["Array", "NumpyOps", "reduction"]

Array = np.ndarray[Any, Any]

# On booleans NumPy's "add" is "or" and its "multiply" is "and", as torch has them.
_REDUCTIONS: dict[str, Callable[..., Array]] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}


def reduction(where: str, op: str, dtype: np.dtype[Any]) -> Callable[..., Array]:
    """Give the function that reduces two arrays of a dtype; of "avg" the sum.

    Raises:
        BackendError: no such op, or not for this dtype.
    """
    averages = op != "avg" or dtype.kind in "fc"
    ordered = op not in ("max", "min") or dtype.kind != "c"
    if op not in _REDUCTIONS or not averages or not ordered:
        raise cannot_reduce(where, dtype, op, "numpy")
    return _REDUCTIONS[op]


class NumpyOps:
    """ArrayOps on NumPy arrays."""

    __slots__ = ()

    def narrow(self, x: Array, dim: int, start: int, length: int) -> Array:
        """View `length` entries of `dim` from `start`."""
        return x[(slice(None),) * dim + (slice(start, start + length),)]

    def cat(self, parts: Sequence[Array], dim: int) -> Array:
        """Concatenate into a new contiguous array."""
        return np.ascontiguousarray(np.concatenate(parts, dim))

    def movedim(self, x: Array, src: int, dst: int) -> Array:
        """View `x` with dim `src` at `dst`."""
        return np.moveaxis(x, src, dst)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """Give `x` another shape of the same number of elements."""
        return x.reshape(tuple(shape))

    def contiguous(self, x: Array) -> Array:
        """Give `x` itself if it is contiguous, else a contiguous copy."""
        return x if x.flags.c_contiguous else self.clone(x)

    def clone(self, x: Array) -> Array:
        """Copy into a new contiguous array."""
        return x.copy(order="C")

    def empty(self, shape: Sequence[int], like: Array) -> Array:
        """Make an uninitialised array with the dtype of `like`."""
        return np.empty(tuple(shape), like.dtype)

    def identity(self, shape: Sequence[int], op: str, like: Array) -> Array:
        """Make an array of the reduction's identity, with the dtype of `like`."""
        return np.full(
            tuple(shape), identity_value(op, like.dtype, _limits(like.dtype)), like.dtype
        )

    def scale(self, x: Array, factor: float, *, divide: bool = False) -> Array:
        """Multiply (or divide) into a new array of the same dtype.

        Integers stay exact or are refused.
        """
        if x.dtype.kind in "fc":
            return np.asarray(x / factor if divide else x * factor, x.dtype)
        return np.asarray(scaled_integers(x, factor, divide), x.dtype)

    def copy_into(self, dst: Array, src: Array) -> None:
        """Write `src` into the view `dst` of the same shape."""
        np.copyto(dst, src)


def _limits(dtype: np.dtype[Any]) -> tuple[Any, Any] | None:
    if dtype.kind in "cbf":
        return {"c": None, "b": (False, True), "f": (-np.inf, np.inf)}[dtype.kind]
    return np.iinfo(dtype).min, np.iinfo(dtype).max
