# SPDX-License-Identifier: Apache-2.0
"""DtypeSupport: which dtypes a collective library moves and reduces, and what stands in for others.

A sum of bools is "any" and a product "all" everywhere; libraries that add bytes would leave a 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed import ReduceOp

__all__ = ["COMPLEX", "FLOATS", "INTS", "UNSIGNED", "DtypeSupport", "name_of"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTS = (torch.uint8, torch.int8, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

_OPS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
}
_LINEAR = ("sum", "avg")
_ON_BOOLS = {"sum": "max", "product": "min"}


class DtypeSupport:
    """The dtypes of one collective library.

    Args:
        moves: dtypes it moves as they are; others travel as bytes.
        reduces: dtypes it reduces as they are, with every op they have.
        widens: dtypes it reduces in a wider one, with every op.
        widens_product: the same, for "product" only.
    """

    def __init__(
        self,
        *,
        moves: Iterable[torch.dtype],
        reduces: Iterable[torch.dtype],
        widens: Mapping[torch.dtype, torch.dtype],
        widens_product: Mapping[torch.dtype, torch.dtype] | None = None,
    ) -> None:
        self.moves = frozenset(moves)
        self._widens = dict(widens)
        self._widens_product = dict(widens_product or {})
        self.native = {
            (op, dtype): _OPS[_ON_BOOLS.get(op, op) if dtype == torch.bool else op]
            for dtype in reduces
            for op in _OPS
            if not (op == "avg" and dtype not in FLOATS)
            and not (op == "product" and dtype in self._widens_product)
        }

    def answers(self) -> dict[str, Any]:
        """Give `reduces`, `widens` and `moves` of Capabilities."""
        dtypes = {dtype for _, dtype in self.native} | {*self._widens, *self._widens_product}
        wide = {(op, dtype) for op in _OPS for dtype in dtypes if self.widened(op, dtype)}
        parts = {c: c.to_real() for c in COMPLEX}  # summed as pairs of real numbers
        wide |= {(op, c) for c, r in parts.items() for op in _LINEAR if (op, r) in self.native}
        return {
            "reduces": frozenset((op, name_of(dtype)) for op, dtype in self.native),
            "widens": frozenset((op, name_of(d)) for op, d in wide if (op, d) not in self.native),
            "moves": frozenset(map(name_of, self.moves)),
        }

    def widened(self, op: str, dtype: torch.dtype) -> tuple[str, torch.dtype] | None:
        """Give the op and dtype that compute what the library cannot, or None: refuse."""
        wide = self._widens.get(dtype)
        if op == "product":
            wide = self._widens_product.get(dtype, wide)
        if wide is None or op not in _OPS or op == "avg":
            return None
        return (_ON_BOOLS.get(op, op) if dtype == torch.bool else op), wide


def name_of(dtype: torch.dtype) -> str:
    """Give a dtype's name, as Capabilities have it."""
    return str(dtype).removeprefix("torch.")
