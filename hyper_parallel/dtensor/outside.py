# SPDX-License-Identifier: Apache-2.0
"""Ops on a rank that is not in the mesh: results that hold nothing, with the same graph.

[Note: outside] Such a rank runs the same program, and must enter the same moves, backward too: one
of them may go to a mesh that it is in. So the op runs there on meta tensors of the global shapes,
between two nodes that turn nothing into a meta tensor and back. Then the same results need
gradients, and the same operands get one, as on the ranks of the mesh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.dtensor.known import KnownCall
from hyper_parallel.dtensor.local_op import graph_parts, needs_grad
from hyper_parallel.dtensor.wrapping import wrap_results
from hyper_parallel.errors import LayoutError, describe
from hyper_parallel.runtime import DeviceMesh

__all__ = ["outside", "refuse_value"]


def outside(
    cls: type[Any],
    known: KnownCall,
    on_meta: Callable[[Sequence[torch.Tensor]], Any],
    tensors: Sequence[Any],
) -> Any:
    """Run an op on a rank outside the mesh; see [Note: outside].

    Args:
        cls: the DTensor class.
        known: what was decided.
        on_meta: the op, given a meta tensor for each operand.
        tensors: the operands where the op needs them.

    Returns:
        What the op returns, tensors as DTensors that hold nothing.

    Raises:
        LayoutError: the op asks for a value.
    """

    def ghosts(locals_: Sequence[torch.Tensor]) -> tuple[list[Any], Any]:
        pairs = zip(locals_, tensors, strict=True)
        return tree_flatten(on_meta([_Ghost.apply(local, t.shape) for local, t in pairs]))

    whole: list[Any] = [None]
    with torch.no_grad(), contextlib.suppress(RuntimeError):  # it needs data
        whole, _ = ghosts([t._local for t in tensors])
    if not all(isinstance(value, torch.Tensor) for value in whole):
        refuse_value(tensors[0].device_mesh, f"DTensor op {known.name!r}")
    spec = known.spec
    layouts = spec.outputs or tuple(spec.inputs[0].with_shape(value.shape) for value in whole)
    is_recorded = needs_grad(tensors)
    parts = graph_parts(tensors, known.pending) if is_recorded else [t._local for t in tensors]
    results, tree = ghosts(parts)
    result = tree_unflatten([_Nothing.apply(r, parts[0]) for r in results], tree)
    return wrap_results(cls, result, replace(spec, outputs=layouts), parts if is_recorded else ())


class _Ghost(torch.autograd.Function):
    """Nothing -> a meta tensor of a global shape."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        ctx.like = local.detach()
        return local.new_empty(shape, device="meta")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(ctx.like), None


class _Nothing(torch.autograd.Function):
    """A meta tensor -> nothing, where the rank's tensors are."""

    @staticmethod
    def forward(ctx: Any, meta: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        ctx.meta = meta.detach()
        return like.new_empty(0, dtype=meta.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(ctx.meta), None


def refuse_value(mesh: DeviceMesh, where: str) -> NoReturn:
    """Refuse to tell a value on a rank that is not in the mesh.

    Raises:
        LayoutError: always.
    """
    raise LayoutError(
        describe(
            where,
            "only a rank of the mesh may ask for a value",
            f"rank {mesh.get_rank()} not in mesh: guard it with"
            " `mesh.get_coordinate() is not None`",
            mesh=mesh,
        )
    )
