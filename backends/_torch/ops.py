# SPDX-License-Identifier: Apache-2.0
"""TorchOps: the local operations of a plan on torch tensors; none records a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.runtime.refusals import identity_value, scaled_integers

__all__ = ["TorchOps"]


class TorchOps:
    """ArrayOps on plain torch tensors.

    Inputs that ask for a gradient are detached first, so that grad mode does not matter.
    """

    __slots__ = ()

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Give `x` so that a view of it is a plain view: detached if it asks for a gradient."""
        return x.detach() if x.requires_grad else x

    def narrow(self, x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
        """View `length` entries of `dim` from `start`."""
        return self.plain(x).narrow(dim, start, length)

    def cat(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Concatenate into a new contiguous tensor."""
        return torch.cat([self.plain(part) for part in parts], dim).contiguous()

    def movedim(self, x: torch.Tensor, src: int, dst: int) -> torch.Tensor:
        """View `x` with dim `src` at `dst`; `x` itself if nothing moves."""
        return x if src == dst else self.plain(x).movedim(src, dst)

    def reshape(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Give `x` another shape of the same number of elements."""
        return self.plain(x).reshape(shape)

    def contiguous(self, x: torch.Tensor) -> torch.Tensor:
        """Give `x` itself if it is contiguous, else a contiguous copy."""
        return x if x.is_contiguous() else self.plain(x).contiguous()

    def clone(self, x: torch.Tensor) -> torch.Tensor:
        """Copy into a new contiguous tensor."""
        x = self.plain(x)
        if x.is_contiguous():
            return x.clone()  # without the argument, which takes a sixth of a small copy's time
        return x.clone(memory_format=torch.contiguous_format)

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Make an uninitialised tensor with the dtype and device of `like`."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def identity(self, shape: Sequence[int], op: str, like: torch.Tensor) -> torch.Tensor:
        """Make a tensor of the reduction's identity, with the dtype and device of `like`."""
        value = identity_value(op, like.dtype, _limits(like.dtype))
        return torch.full(tuple(shape), value, dtype=like.dtype, device=like.device)

    def scale(self, x: torch.Tensor, factor: float, *, divide: bool = False) -> torch.Tensor:
        """Multiply (or divide) into a new tensor of the same dtype.

        Integers stay exact or are refused; to read whether a division is exact costs a device
        synchronisation.
        """
        x = self.plain(x)
        if x.is_floating_point() or x.is_complex():
            return x.div(factor) if divide else x.mul(factor)
        return scaled_integers(x, factor, divide)

    def copy_into(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Write `src` into the view `dst` of the same shape."""
        TorchOps.plain(self, dst).copy_(self.plain(src))


def _limits(dtype: torch.dtype) -> tuple[Any, Any] | None:
    if dtype.is_complex:
        return None
    if dtype == torch.bool:
        return False, True
    if dtype.is_floating_point and dtype.itemsize > 1:  # some float8 have no infinity
        return float("-inf"), float("inf")
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.min, limits.max
