# SPDX-License-Identifier: Apache-2.0
"""Parts of a tensor by placement, cut with plain slicing, to compare parallel modules with dense.

It shares no code with the library's layouts: torch.chunk's rule is written out.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel import Placement
from support.device import TOLERANCE

__all__ = ["TOLERANCE", "assert_same", "cut", "cut_cotangent", "equal", "join", "spread"]


def cut(x: torch.Tensor, dim: int, rank: int, num_ranks: int, block: int = 1) -> torch.Tensor:
    """Give the rank's chunk of dim `dim`, perhaps empty, as a copy."""
    chunk = -(-x.shape[dim] // (num_ranks * block)) * block
    start = min(rank * chunk, x.shape[dim])
    stop = min(start + chunk, x.shape[dim])
    return x.narrow(dim, start, stop - start).clone()


def spread(x: torch.Tensor, placement: Placement, rank: int, num_ranks: int) -> torch.Tensor:
    """Give what the rank holds of `x`; a pending sum is spread unevenly over all ranks."""
    if placement.is_shard():
        return cut(x, placement.dim, rank, num_ranks)
    if placement.is_partial():
        total = num_ranks * (num_ranks + 1) // 2
        if not x.is_floating_point():
            return x.clone() if rank == num_ranks - 1 else torch.zeros_like(x)
        return x * ((rank + 1) / total)
    return x.clone()


def cut_cotangent(
    grad: torch.Tensor, placement: Placement, rank: int, num_ranks: int
) -> torch.Tensor:
    """Give the rank's part of the gradient of a value placed so: whole for a pending sum."""
    if placement.is_shard():
        return cut(grad, placement.dim, rank, num_ranks)
    return grad.clone()


def join(parts: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    """Give the whole value of the ranks' parts; replicas must agree."""
    if placement.is_shard():
        return torch.cat(parts, placement.dim)
    if placement.is_partial():
        return torch.stack(parts).sum(0)
    for part in parts[1:]:
        assert_same(part, parts[0])
    return parts[0]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors have one shape and the same values within the dtype's tolerance."""
    tolerance = TOLERANCE[b.dtype]
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def assert_same(got: Any, want: torch.Tensor, what: str = "value") -> None:
    """Compare shape, dtype and values within the dtype's tolerance."""
    tolerance = TOLERANCE.get(want.dtype, 0)
    assert got is not None, f"{what} is None"
    torch.testing.assert_close(
        got, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )
