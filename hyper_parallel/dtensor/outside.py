# SPDX-License-Identifier: Apache-2.0
"""Ops on a rank that is not in the mesh: results that hold nothing, with the same graph.

[Note: outside] Such a rank runs the same program, and must enter the same moves, backward too: one
of them may go to a mesh that it is in. So the op runs there on meta tensors of the global shapes,
between two nodes that turn nothing into a meta tensor and back. Then the same results need
gradients, and the same operands get one, as on the ranks of the mesh.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hyper_parallel.dtensor.known import KnownCall
from hyper_parallel.dtensor.local_op import needs_grad
from hyper_parallel.dtensor.result_shapes import on_meta
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh

__all__ = ["outside", "refuse_value"]


def outside(
    cls: type[Any],
    known: KnownCall,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Any],
) -> Any:
    """Run an op on a rank outside the mesh: its results hold nothing; see [Note: outside].

    Raises:
        LayoutError: the op asks for a value.
    """
    whole: list[Any] = [None]
    with torch.no_grad(), contextlib.suppress(RuntimeError):  # it needs data
        whole, _ = tree_flatten(on_meta(func, args, kwargs))
    if not all(isinstance(value, torch.Tensor) for value in whole):
        refuse_value(tensors[0].device_mesh, f"DTensor op {known.name!r}")
    places = [i for i, x in enumerate(tree_flatten((args, kwargs))[0]) if isinstance(x, cls)]

    def on_ghosts(*args: Any, **kwargs: Any) -> Any:
        flat, tree = tree_flatten((args, kwargs))
        like = flat[places[0]]
        for i, tensor in zip(places, tensors, strict=True):
            flat[i] = _Ghost.apply(flat[i], tensor.shape)
        result = on_meta(func, *tree_unflatten(flat, tree))
        return tree_map(lambda value: _Nothing.apply(value, like), result)

    spec = known.spec
    if spec.outputs is None:
        layouts = [spec.inputs[0].with_shape(value.shape) for value in whole]
        spec = replace(spec, outputs=tuple(layouts))
    known = replace(known, spec=spec, is_view=False)
    return known.run(cls, on_ghosts, args, kwargs, tensors, needs_grad(tensors))


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
        where,
        "only a rank of the mesh may ask for a value",
        f"rank {mesh.get_rank()} not in mesh: guard it with `mesh.get_coordinate() is not None`",
        mesh=mesh,
    )
