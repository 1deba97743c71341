# SPDX-License-Identifier: Apache-2.0
"""Moves of an even 2-d tensor along one axis, written by hand on plain tensors."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Move = Callable[[Tensor, int], Tensor]
RANK = 0

if hasattr(dist, "all_gather_single"):
    _gather, _scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    _gather, _scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def _slice(dim: int) -> Move:
    def run(x: Tensor, n: int) -> Tensor:
        size = x.shape[dim] // n
        return x.narrow(dim, RANK * size, size).clone(memory_format=torch.contiguous_format)

    return run


def _gather_rows(x: Tensor, n: int) -> Tensor:
    rows, columns = x.shape
    out = x.new_empty((rows * n, columns))
    _gather(out, x)
    return out


def _gather_columns(x: Tensor, n: int) -> Tensor:
    rows, columns = x.shape
    out = x.new_empty((n * rows, columns))
    _gather(out, x)
    return out.view(n, rows, columns).transpose(0, 1).reshape(rows, n * columns)


def _reduce(x: Tensor, n: int) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def _reduce_to_rows(x: Tensor, n: int) -> Tensor:
    rows, columns = x.shape
    out = x.new_empty((rows // n, columns))
    _scatter(out, x)
    return out


def _reduce_to_columns(x: Tensor, n: int) -> Tensor:
    rows, columns = x.shape
    pieces = x.view(rows, n, columns // n).transpose(0, 1).reshape(n * rows, columns // n)
    out = x.new_empty((rows, columns // n))
    _scatter(out, pieces)
    return out


def _rows_to_columns(x: Tensor, n: int) -> Tensor:
    rows, columns = x.shape
    pieces = x.view(rows, n, columns // n).transpose(0, 1).contiguous()
    out = torch.empty_like(pieces)
    dist.all_to_all_single(out, pieces)
    return out.view(n * rows, columns // n)


def _columns_to_rows(x: Tensor, n: int) -> Tensor:
    rows, columns = x.shape
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out.view(n, rows // n, columns).transpose(0, 1).reshape(rows // n, n * columns)


def _keep(x: Tensor, n: int) -> Tensor:
    return x.clone() if RANK == 0 else torch.zeros_like(x)


def _place(x: Tensor, n: int) -> Tensor:
    rows, columns = x.shape
    out = x.new_zeros((rows * n, columns))
    out.narrow(0, RANK * rows, rows).copy_(x)
    return out


MOVES: dict[tuple[str, str], Move] = {
    ("R", "S(0)"): _slice(0),
    ("R", "S(1)"): _slice(1),
    ("S(0)", "R"): _gather_rows,
    ("S(1)", "R"): _gather_columns,
    ("S(0)", "S(1)"): _rows_to_columns,
    ("S(1)", "S(0)"): _columns_to_rows,
    ("P", "R"): _reduce,
    ("P", "S(0)"): _reduce_to_rows,
    ("P", "S(1)"): _reduce_to_columns,
    ("R", "P"): _keep,
    ("S(0)", "P"): _place,
    ("P", "P(avg)"): lambda x, n: x * n,
}


def adjoint(src: str, dst: str) -> tuple[str, str]:
    """Return the move of the gradient: a pending sum's gradient is replicated."""
    return tuple("R" if name.startswith("P") else name for name in (dst, src))


def with_backward(move: Move, back: Move | None) -> type[torch.autograd.Function]:
    """Return the autograd.Function of a move; without `back` the gradient stays as it is."""

    class Moved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, n: int) -> Tensor:
            ctx.n = n
            return move(x, n)

        @staticmethod
        def backward(ctx, grad: Tensor):
            return grad if back is None else back(grad, ctx.n), None

    return Moved
