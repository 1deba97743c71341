# SPDX-License-Identifier: Apache-2.0
"""CpuBackend: CPU tensors over gloo."""

from __future__ import annotations

import torch.distributed as dist

from hyper_parallel.backends._torch.backend import TorchBackend
from hyper_parallel.backends._torch.dtypes import GLOO_AND_NCCL
from hyper_parallel.runtime.interface import Capabilities

__all__ = ["CpuBackend"]


class CpuBackend(TorchBackend):
    """CPU tensors over gloo. Runs everywhere; waits block the host."""

    name = "cpu"
    device_type = "cpu"
    library = "gloo"
    dtypes = GLOO_AND_NCCL
    capabilities = Capabilities(**GLOO_AND_NCCL.answers())

    def _missing(self) -> str | None:
        if not dist.is_gloo_available():
            return "torch was built without gloo; install a build that has it"
        return None
