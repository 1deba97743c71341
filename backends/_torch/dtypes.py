# SPDX-License-Identifier: Apache-2.0
"""DtypeSupport: which dtypes a collective library moves and reduces, and what stands in for others.

A sum of bools is "any" and a product "all" everywhere; libraries that add bytes would leave a 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed import ReduceOp

from hyper_parallel.core.placement import REDUCE_OPS

__all__ = ["COMPLEX", "FLOATS", "GLOO_AND_NCCL", "INTS", "UNSIGNED", "DtypeSupport", "name_of"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTS = (torch.uint8, torch.int8, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

_OPS: dict[str, Any] = {op: getattr(ReduceOp, op.upper()) for op in REDUCE_OPS}
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
        # The op and dtype that compute what the library cannot.
        self.wide = {
            (op, dtype): (_on(dtype, op), wide)
            for op in _OPS.keys() - {"avg"}
            for dtype, wide in {
                **widens, **((widens_product or {}) if op == "product" else {})
            }.items()
        }  # fmt: skip
        self.native = {
            (op, dtype): _OPS[_on(dtype, op)]
            for dtype in reduces
            for op in _OPS
            if (op, dtype) not in self.wide and (op != "avg" or dtype in FLOATS)
        }

    def answers(self) -> dict[str, Any]:
        """Give `reduces`, `widens` and `moves` of Capabilities."""
        parts = {(op, c) for c in COMPLEX for op in _LINEAR if (op, c.to_real()) in self.native}
        return {
            "reduces": frozenset((op, name_of(dtype)) for op, dtype in self.native),
            # Complex numbers are summed as pairs of real ones.
            "widens": frozenset((op, name_of(dtype)) for op, dtype in {*self.wide, *parts}),
            "moves": frozenset(map(name_of, self.moves)),
        }


def _on(dtype: torch.dtype, op: str) -> str:
    return _ON_BOOLS.get(op, op) if dtype == torch.bool else op


def name_of(dtype: torch.dtype) -> str:
    """Give a dtype's name, as Capabilities have it."""
    return str(dtype).removeprefix("torch.")


GLOO_AND_NCCL = DtypeSupport(
    moves=(*FLOATS, *INTS, *COMPLEX, torch.bool),
    reduces=(*FLOATS, *INTS, torch.bool),
    widens={torch.int16: torch.int32},
)
