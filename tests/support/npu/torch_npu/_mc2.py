# SPDX-License-Identifier: Apache-2.0
"""MC2: matmuls that communicate. They refuse what is outside of their documented limits (A2).

Signatures are those of torch_npu 2.13.0; an argument that the documents rule out is refused.
"""

from typing import Any

import torch

from torch_npu import _runtime
from torch_npu._device import to_host, to_npu
from torch_npu._formats import Format, get_npu_format
from torch_npu._hccl import gathered, met, reduced

Tensor = torch.Tensor
_SUM = 0
_used: set[str] = set()


def _check(name: str, x: Tensor, w: Tensor, hcom: str, size: int, given: dict[str, Any]) -> Any:
    """Refuse what MC2 does; give the group."""
    gloo = met(hcom)
    wrong = {
        "tensors must be on the NPU": {x.device.type, w.device.type} != {"npu"},
        "dtypes must be float16 or bfloat16, and alike": x.dtype != w.dtype
        or x.dtype not in (torch.float16, torch.bfloat16),
        "the matrices must be 2-D and fit": x.dim() != 2
        or w.dim() != 2
        or x.shape[1] != w.shape[0],
        "x1 must not be transposed": not x.is_contiguous(),
        "x2 may be transposed, and nothing else": not (w.is_contiguous() or w.t().is_contiguous()),
        "k must be in [256, 65535)": not 256 <= x.shape[-1] < 65535,
        "tensors must have elements": not (x.numel() and w.numel()),
        "the format must be ND": any(get_npu_format(t) != Format.ND for t in (x, w)),
        "world_size must be 2, 4 or 8, that of the group": size not in (2, 4, 8)
        or size != gloo.size(),
        "one communicator serves all MC2 kernels": bool(_used - {hcom}),
        f"arguments must have their defaults: {given}": any(
            value not in (None, 0, "sum") for value in given.values()
        ),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise RuntimeError(f"{name}: {text}")
    _used.add(hcom)
    return gloo


def _every(gloo: Any, x: Tensor) -> list[Tensor]:
    work, parts = gathered(gloo, x)
    work.wait()
    return parts


def npu_all_gather_base_mm(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    gather_index: int = 0,
    gather_output: bool = True,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    """Gather the rows of the input and multiply them."""
    given["gather_index"] = gather_index
    gloo = _check("npu_all_gather_base_mm", input, x2, hcom, world_size, given)
    rows = torch.cat(_every(gloo, input))
    product = to_npu(rows @ to_host(x2))
    return product, to_npu(rows) if gather_output else product.new_empty(0)


def npu_mm_reduce_scatter_base(
    input: Tensor, x2: Tensor, hcom: str, world_size: int, **given: Any
) -> Tensor:
    """Multiply, and give this rank its rows of the sum."""
    name = "npu_mm_reduce_scatter_base"
    gloo = _check(name, input, x2, hcom, world_size, given)
    if input.shape[0] % world_size:
        raise RuntimeError(f"{name}: m must be a multiple of world_size")
    whole = reduced(_every(gloo, input @ x2), _SUM)
    return to_npu(whole.chunk(world_size)[gloo.rank()].clone())


def npu_mm_all_reduce_base(x1: Tensor, x2: Tensor, hcom: str, **given: Any) -> Tensor:
    """Multiply, and give the sum."""
    name = "npu_mm_all_reduce_base"
    gloo = _check(name, x1, x2, hcom, met(hcom).size(), given)
    if "Ascend910B" not in _runtime.module.get_device_name():
        raise RuntimeError(f"{name}: not on this chip")
    return to_npu(reduced(_every(gloo, x1 @ x2), _SUM))
