# SPDX-License-Identifier: Apache-2.0
"""Local parts that are not there yet: made when asked for, or still filled by a collective.

[Note: pending results] A DTensor whose part a collective still fills has no `_local` yet, and its
own storage is a stand-in without memory. Every reading, from Python or by torch's engine, goes
through `_local`; what is missing is asked of `LocalPart`, which waits, does the steps that follow
the collective, and puts the result in place. So it cannot be read too early, and a DTensor that is
ready pays nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core import Layout
from hyper_parallel.runtime import Work

__all__ = ["LocalPart", "bare", "is_pending", "pending", "settle", "without_torch_function"]

# Inside this context torch's own methods see a DTensor as the plain tensor it is made of.
without_torch_function = torch._C.DisableTorchFunctionSubclass


class LocalPart:
    """`DTensor._local` where the tensor has none yet; what is set on the tensor goes before it."""

    def __get__(self, tensor: Any, cls: type[Any]) -> Any:
        if tensor is None:
            return self
        if tensor._graph is not None:
            tensor._local = local = tensor._graph.detach()
            return local
        return settle(tensor)


def bare(tensor: Any) -> torch.Tensor:
    """Give a plain tensor of a DTensor's memory, dtype and device, without making one."""
    return tensor._local if tensor._graph is None else tensor._graph


def pending(
    cls: type[Any], work: Work, layout: Layout, *, dtype: torch.dtype, device: torch.device
) -> Any:
    """Make a DTensor of which this rank's part is what `work` will give, cast to `dtype`.

    It has the result's shape, dtype and device already.
    """
    shape = layout.local_shape(layout.mesh.get_rank())  # type: ignore[attr-defined]
    made = cls(torch.empty((), dtype=dtype, device=device).expand(shape), layout)
    made._arrival = (work, made.__dict__.pop("_local"))
    return made


def is_pending(tensor: Any) -> bool:
    """Tell whether a DTensor's part is still on its way."""
    return "_arrival" in tensor.__dict__


def settle(tensor: Any) -> torch.Tensor:
    """Wait for a pending DTensor, put its part in place, and give that."""
    work, local = tensor._arrival
    result = work.wait().to(local.dtype)
    # Not another object: the two share their version counter, as those of a ready DTensor do.
    tensor._local = local
    del tensor._arrival
    with without_torch_function():
        torch.Tensor.data.__set__(tensor, result)  # type: ignore[attr-defined]
    local.data = result
    return local
