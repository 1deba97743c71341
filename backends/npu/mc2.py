# SPDX-License-Identifier: Apache-2.0
"""Mc2Matmul: matmuls of torch_npu that communicate through HCCL meanwhile (MC2).

[Note: one MC2 group] On some chips all MC2 kernels of a process must use one communicator. So the
first group that may run one is the only one, as long as it exists.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hyper_parallel.backends._torch.fused import FusedKernel, verdicts
from hyper_parallel.backends.npu.formats import NpuOps
from hyper_parallel.runtime.interface import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

__all__ = ["Mc2Matmul"]
# Documented up to 32 on some chips; fewer until a device has shown more.
_GROUP_SIZES = (2, 4, 8)
_INNER = range(256, 65535)
_ALL_REDUCE_CHIP = "Ascend910B"

_ops = NpuOps()


class Mc2Matmul(FusedKernel):
    """`torch_npu.npu_*_base*`, by kind."""

    ops: ClassVar[Mapping[str, str]] = {
        ALL_GATHER: "npu_all_gather_base_mm",
        REDUCE_SCATTER: "npu_mm_reduce_scatter_base",
        ALL_REDUCE: "npu_mm_all_reduce_base",
    }
    device_type = "npu"
    dtypes = (torch.float16, torch.bfloat16)

    @staticmethod
    def op_named(name: str) -> Any:
        """Give an op of torch_npu, or None."""
        return getattr(importlib.import_module("torch_npu"), name, None)

    def limit(self, x: torch.Tensor, w: torch.Tensor) -> str | None:
        """Say which documented limit of MC2 a call is outside of, or None."""
        if len(self.ranks) not in _GROUP_SIZES:
            return f"MC2 is used with {_GROUP_SIZES} ranks, not {len(self.ranks)}"
        if x.shape[1] not in _INNER:
            first, last = _INNER[0], _INNER[-1]
            return f"MC2 multiplies over {first} to {last} entries, not {x.shape[1]}"
        if _ops.is_private(x) or _ops.is_private(w):
            return "MC2 is used with tensors in the plain memory format"
        if self.kind == ALL_REDUCE:
            name = torch.get_device_module("npu").get_device_name()
            if not name.startswith(_ALL_REDUCE_CHIP):
                return f"MC2 has this kind on {_ALL_REDUCE_CHIP} only, not on {name}"
        return None

    def group_limit(self) -> str | None:
        """Say which other group has MC2; see [Note: one MC2 group]."""
        for group, refusal in verdicts.items():
            if not refusal:
                ranks = tuple(dist.get_process_group_ranks(group))
                return f"MC2 is used with one group in a process, here that of ranks {ranks}"
        return None

    def run(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        """Run the op on the group's HCCL communicator, which the first call makes."""
        backend: Any = self.group._get_backend(torch.device("npu"))
        comm = backend.get_hccl_comm_name(dist.get_rank())
        if self.kind == ALL_REDUCE:
            return self.op(x, w, comm, reduce_op="sum")
        if self.kind == REDUCE_SCATTER:
            return self.op(x, w, comm, len(self.ranks), reduce_op="sum")
        return self.op(x, w, comm, len(self.ranks), gather_index=0, gather_output=True)
