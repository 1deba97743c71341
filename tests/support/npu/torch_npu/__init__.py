# SPDX-License-Identifier: Apache-2.0
"""A simulated torch_npu: device "npu" and backend "hccl", in Python, on CPU memory.

Importing it changes the process as importing the real package does: torch's PrivateUse1 device is
called "npu", `torch.npu` exists, and "hccl" can be named as a backend. It is strict where NPUs are:
what HCCL refuses is refused here, in HCCL's words (the texts are those of torch_npu 2.13.0).

Not simulated: numerics of NPU kernels, streams, memory limits, the freeing of storage.
"""

import torch
import torch.distributed as dist

from torch_npu import _device, _formats, _hccl, _mc2, _runtime

__all__ = [
    "Format",
    "get_npu_format",
    "npu",
    "npu_all_gather_base_mm",
    "npu_format_cast",
    "npu_mm_all_reduce_base",
    "npu_mm_reduce_scatter_base",
]
__version__ = torch.__version__.split("+")[0]

Format = _formats.Format
get_npu_format = _formats.get_npu_format
npu_format_cast = _formats.npu_format_cast
npu_all_gather_base_mm = _mc2.npu_all_gather_base_mm
npu_mm_all_reduce_base = _mc2.npu_mm_all_reduce_base
npu_mm_reduce_scatter_base = _mc2.npu_mm_reduce_scatter_base

npu = _runtime.module
_device.register(npu)
if dist.is_available():
    _hccl.register()
