# SPDX-License-Identifier: Apache-2.0
"""fused_collectives: let a backend run a Linear's matmul and the collective beside it as one.

[Note: fused collectives] Where a linear's rows are cut (a sequence) or its product is a pending
sum, a collective stands right before or behind the matmul. A backend may have a kernel for the two
that moves one piece while it multiplies another. Which way a call takes must be alike on all ranks,
so it follows from shapes that layouts make equal, dtypes, and the group; never from local data.

Kernels take matrices and rows of dim 0. The cut dim is brought to the front and back again, which
copies unless all dims before it are 1. Backward takes the way of the forward that recorded it:

  all-gather, then matmul           backward of x: matmul, then reduce-scatter
  matmul, then reduce-scatter       backward of x: all-gather, then matmul
  matmul, then all-reduce           without gradients only

The gradient of the weight is made of what was gathered on the way. A bias is added to the product,
which rounds once more than torch's linear does in dtypes of 16 bits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hyper_parallel.core.estimate import align
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.fused import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, find_fused

__all__ = ["FusedCall", "FusedCalls", "FusedSide", "Fusing", "fused_collectives"]

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class FusedCall:
    """A matmul with a collective beside it.

    Args:
        kind: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce".
        where: the style and its module.
        is_backward: whether it made the gradient of the input.
        refusal: why the two ran one after the other; None where a backend's kernel ran.
    """

    kind: str
    where: str
    is_backward: bool
    refusal: str | None


class FusedCalls:
    """What ran as one kernel in a block of `fused_collectives`, what did not, and why."""

    def __init__(self) -> None:
        self.counts: Counter[FusedCall] = Counter()

    def get_counts(self) -> dict[str, int]:
        """Count what ran as one kernel, by kind."""
        fused: Counter[str] = Counter()
        for call, count in self.counts.items():
            if call.refusal is None:
                fused[call.kind] += count
        return dict(fused)

    def __str__(self) -> str:
        rows = [("module", "pass", "calls", "kind", "fused")]
        for one, count in self.counts.items():
            way = "backward" if one.is_backward else "forward"
            said = "yes" if one.refusal is None else f"no: {one.refusal}"
            rows.append((one.where, way, str(count), one.kind, said))
        return align(rows, "<<><<")


class _Here(threading.local):
    """The calls of the innermost block of this thread."""

    calls: FusedCalls | None = None


_here = _Here()


@contextmanager
def fused_collectives() -> Generator[FusedCalls, None, None]:
    """Within the block, let the backend fuse collectives of Linear styles with their matmuls.

    For column-wise layers with an input that is cut on a dim other than the last (a sequence),
    row-wise layers with such an output, and, without gradients, row-wise layers with a Replicate
    output. A backward whose forward ran in the block is fused, wherever it runs. What a backend
    cannot fuse runs as it does outside of the block. Off by default: no device has run these
    kernels from this library yet. All ranks must enter and leave alike.

    Yields:
        The calls, to be counted or printed, during the block and after it.

    Communicates:
        The same bytes as outside of the block.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from hyper_parallel import ColwiseParallel, Shard
        >>> from hyper_parallel.parallel import fused_collectives
        >>> from hyper_parallel import init_device_mesh, simulate
        >>> @simulate(2)
        ... def run():
        ...     style = ColwiseParallel(input_layouts=Shard(0))
        ...     layer = style.apply(nn.Linear(4, 6), init_device_mesh("cpu", (2,)))
        ...     with fused_collectives() as calls:
        ...         layer(torch.ones(3, 4))
        ...     return list(calls.counts)[0]
        >>> call = run()[0]
        >>> call.kind, call.refusal
        ('all_gather_matmul', 'the simulated backend has no such kernel')
    """
    before, calls = _here.calls, FusedCalls()
    _here.calls = calls
    try:
        yield calls
    finally:
        _here.calls = before


@dataclass(frozen=True, slots=True)
class FusedSide:
    """The side of a Linear where a collective meets the matmul; see [Note: fused collectives].

    `dim` is cut there, None for a sum that all ranks get; kernels need parts that are even.
    """

    mesh: DeviceMesh
    where: str
    dim: int | None
    is_even: bool

    def here(self) -> Fusing | None:
        """Give what runs the kernels of a call that begins now; None outside of all blocks."""
        calls = _here.calls
        return None if calls is None else Fusing(self, calls, torch.is_grad_enabled())

    def front(self, x: Tensor) -> Tensor:
        """Bring the cut dim to the front."""
        return x if self.dim is None else x.movedim(self.dim, 0)

    def back(self, rows: Tensor, like: Tensor) -> Tensor:
        """Give rows the dims of `like`, but for the number of rows and columns."""
        if self.dim is None:
            return rows.view(*like.shape[:-1], rows.shape[-1])
        rest = self.front(like).shape[1:-1]
        return rows.view(-1, *rest, rows.shape[-1]).movedim(0, self.dim)


class Fusing(NamedTuple):
    """One call of a layer inside `fused_collectives`."""

    side: FusedSide
    calls: FusedCalls
    records: bool  # gradients

    def gather(
        self, x: Tensor, w: Tensor, *, backward: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Give (all rows of x) @ w and all rows of x, or None if the two must run apart."""
        made = self._run(ALL_GATHER, x, w, backward)
        if made is None:
            return None
        return self.side.back(made[0], x).contiguous(), self.side.back(made[1], x)

    def spread(self, x: Tensor, w: Tensor, *, backward: bool = False) -> Tensor | None:
        """Give the sum of x @ w over the ranks, cut or whole, or None if they must run apart."""
        kind = ALL_REDUCE if self.side.dim is None else REDUCE_SCATTER
        made = self._run(kind, x, w, backward)
        return None if made is None else self.side.back(made, x).contiguous()

    def _run(self, kind: str, x: Tensor, w: Tensor, backward: bool) -> Any:
        """Run the kernel if there is one for this call, and count either way."""
        device = x.device.type
        if torch.is_autocast_enabled(device) and torch.float64 not in (x.dtype, w.dtype):
            dtype = torch.get_autocast_dtype(device)
            x, w = x.to(dtype), w.to(dtype)
        found = self._find(kind, x, w)
        refusal = found if isinstance(found, str) else None
        self.calls.counts[FusedCall(kind, self.side.where, backward, refusal)] += 1
        return None if isinstance(found, str) else found()

    def _find(self, kind: str, x: Tensor, w: Tensor) -> Callable[[], Any] | str:
        """Give what runs the kernel, or say why there is none."""
        if kind == ALL_REDUCE and self.records:
            return "kernels of this kind are for inference, and gradients are recorded"
        if not x.dim() or x.shape[-1] != w.shape[0]:
            return "the matrices must fit"  # the matmul itself says more
        if not self.side.is_even:
            return "the ranks' parts must be of one size"
        rows = self.side.front(x).reshape(-1, x.shape[-1]).contiguous()
        return find_fused(kind, self.side.mesh, rows, w)
