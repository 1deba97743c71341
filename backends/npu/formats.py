# SPDX-License-Identifier: Apache-2.0
"""NpuOps: local operations on NPU tensors, whose private memory formats are made plain first.

[Note: private formats] An NPU may keep a matrix in a format of its own, such as tiles of 16 x 16
(FRACTAL_NZ). Its shape and strides then do not say where its elements lie: a slice of it is wrong,
or refused by HCCL. So every operand of a plan is cast to the plain format (ND) before it is cut.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from hyper_parallel.backends._torch.ops import TorchOps

__all__ = ["NpuOps"]

_ND = 2
# NC1HWC0, FRACTAL_Z, NC1HWC0_C04, FRACTAL_NZ, NDC1HWC0, FRACTAL_Z_3D, FRACTAL_NZ_C0_*.
_PRIVATE = frozenset({3, 4, 12, 29, 32, 33, 50, 51, 52, 53, 54})


class NpuOps(TorchOps):
    """The operations of torch; see [Note: private formats]."""

    __slots__ = ("_torch_npu",)

    def __init__(self) -> None:
        self._torch_npu: Any = None

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Detach `x`, and copy it into the plain format if it is in a private one."""
        x = super().plain(x)
        return self._torch_npu.npu_format_cast(x, _ND) if self.is_private(x) else x

    def is_private(self, x: torch.Tensor) -> bool:
        """Tell whether `x` is in a private format."""
        if x.get_device() < 0:
            return False
        if self._torch_npu is None:
            self._torch_npu = importlib.import_module("torch_npu")
        return int(self._torch_npu.get_npu_format(x)) in _PRIVATE

    def contiguous(self, x: torch.Tensor) -> torch.Tensor:
        """Give `x` itself if it is contiguous and plain, else a copy that is."""
        return super().contiguous(self.plain(x))
