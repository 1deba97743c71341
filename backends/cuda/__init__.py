# SPDX-License-Identifier: Apache-2.0
"""CudaBackend: NVIDIA GPUs over NCCL."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist

from hyper_parallel.backends._torch.backend import TorchBackend
from hyper_parallel.backends._torch.dtypes import GLOO_AND_NCCL
from hyper_parallel.backends.cuda.symmetric import SymmetricMatmul
from hyper_parallel.runtime.interface import Capabilities

__all__ = ["CudaBackend"]


class CudaBackend(TorchBackend):
    """CUDA tensors over NCCL. Waits order streams; errors of a rank end the process (watchdog)."""

    name = "cuda"
    device_type = "cuda"
    library = "nccl"
    dtypes = GLOO_AND_NCCL
    capabilities = Capabilities(
        uneven_gather=True,
        native_avg=True,
        fused=SymmetricMatmul.find,
        **GLOO_AND_NCCL.answers(),
    )

    def _libraries(self) -> dict[str, str]:
        nccl = importlib.import_module("torch.cuda.nccl").version()
        return {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl))}

    def _missing(self) -> str | None:
        if not torch.backends.cuda.is_built():
            return "torch was built without CUDA; install a CUDA build of torch"
        if not torch.cuda.is_available():
            return "no CUDA device is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        if not dist.is_nccl_available():
            return "torch was built without NCCL; install a build that has it"
        return None
