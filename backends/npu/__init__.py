# SPDX-License-Identifier: Apache-2.0
"""NpuBackend: Ascend NPUs over HCCL, through torch_npu."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist

from hyper_parallel.backends._torch.backend import TorchBackend
from hyper_parallel.backends._torch.dtypes import COMPLEX, FLOATS, INTS, UNSIGNED, DtypeSupport
from hyper_parallel.backends.npu.formats import NpuOps
from hyper_parallel.backends.npu.mc2 import Mc2Matmul
from hyper_parallel.backends.npu.presence import why_no_torch_npu
from hyper_parallel.runtime.interface import Capabilities

__all__ = ["NpuBackend"]


class NpuBackend(TorchBackend):
    """NPU tensors over HCCL. Every collective runs on HCCL's own stream; waits order streams.

    HCCL's uneven gathers need one server (A3) or equal card counts (A2), so pieces are padded.
    Its average is a sum and a division, so the caller does that. float64 cannot be reduced.
    """

    name = "npu"
    device_type = "npu"
    library = "hccl"
    ops = NpuOps()
    dtypes = DtypeSupport(
        moves=(*FLOATS, *INTS, torch.int16, *UNSIGNED, *COMPLEX, torch.bool),
        reduces=(
            *(torch.float16, torch.bfloat16, torch.float32),
            *(torch.int8, torch.int16, torch.int32, torch.int64),
        ),
        widens={torch.bool: torch.int32, torch.uint8: torch.int32},
        widens_product={torch.int16: torch.int32, torch.bfloat16: torch.float32},
    )
    capabilities = Capabilities(fused=Mc2Matmul.find, **dtypes.answers())

    def _libraries(self) -> dict[str, str]:
        return {"torch_npu": importlib.import_module("torch_npu").__version__}

    def _missing(self) -> str | None:
        reason = why_no_torch_npu()
        if reason is not None:
            return reason
        if not torch.get_device_module("npu").is_available():
            return "no NPU is visible; check npu-smi info and ASCEND_RT_VISIBLE_DEVICES"
        if not dist.is_backend_available("hccl"):
            return "torch_npu did not register hccl; install a build of it with distributed"
        return None
