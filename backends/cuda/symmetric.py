# SPDX-License-Identifier: Apache-2.0
"""SymmetricMatmul: torch's matmuls over symmetric memory, which move and multiply in turns.

[Note: peers] The GPUs of a group must read each other's memory: one host, every pair linked. That
is read off what torchrun sets, and asked of all pairs; ranks that find otherwise agree, see [Note:
verdicts].
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from itertools import permutations
from typing import Any, ClassVar

import torch

from hyper_parallel.backends._torch.dtypes import FLOATS
from hyper_parallel.backends._torch.fused import FusedKernel
from hyper_parallel.runtime.interface import ALL_GATHER, REDUCE_SCATTER

__all__ = ["SymmetricMatmul"]


class SymmetricMatmul(FusedKernel):
    """`torch.ops.symm_mem.fused_*`, by kind."""

    ops: ClassVar[Mapping[str, str]] = {
        ALL_GATHER: "fused_all_gather_matmul",
        REDUCE_SCATTER: "fused_matmul_reduce_scatter",
    }
    device_type = "cuda"
    dtypes = FLOATS

    @staticmethod
    def op_named(name: str) -> Any:
        """Give an op of torch.ops.symm_mem, or None."""
        return _op(name)

    def group_limit(self) -> str | None:
        """Say why the GPUs of the group cannot read each other's memory, or None."""
        return why_no_peers(self.ranks)

    def run(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        """Run the op on rows of dim 0."""
        if self.kind == REDUCE_SCATTER:
            return self.op(x, w, "sum", 0, self.group.group_name)
        gathered, (product,) = self.op(x, [w], 0, self.group.group_name, return_A=True)
        return product, gathered


@functools.cache
def _op(name: str) -> Any:
    """Give an op of torch.ops.symm_mem, or None; the import defines them."""
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError:
        return None
    return getattr(torch.ops.symm_mem, name, None)


@functools.cache
def why_no_peers(ranks: tuple[int, ...]) -> str | None:
    """Say why the GPUs of some ranks cannot read each other's memory, or None."""
    each = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not each:
        return "LOCAL_WORLD_SIZE must say how many ranks a host has, as torchrun sets it"
    if len({rank // each for rank in ranks}) > 1:
        return "the group must be on one host"
    devices = [rank % each for rank in ranks]
    if max(devices) >= torch.cuda.device_count():
        return "every rank must see the GPUs of all ranks of its host"
    if not all(torch.cuda.can_device_access_peer(a, b) for a, b in permutations(devices, 2)):
        return "the GPUs of the group must be able to read each other's memory"
    return None
