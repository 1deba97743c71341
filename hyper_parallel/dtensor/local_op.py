# SPDX-License-Identifier: Apache-2.0
"""Run an op on local tensors, inside torch's own graph of them.

[Note: above autograd] An op runs once, on plain local tensors that torch differentiates as it does
anywhere: no backward op needs a rule, and what is saved, freed, checked for changes or
differentiated twice is torch's own affair. Of each result `out` a DTensor is made that is an alias
of it in the graph, so a user's autograd.Function may take it; further ops go on from `out` itself
(`_graph`), at no cost. Hooks are put on `out`, too, where all gradients pass.

Three things stand between local tensors and DTensors:
* a leaf lends each op an alias of itself, since what it kept would keep it alive for ever;
* `Lend` stands where gradients lie otherwise than in the cotangent layout: a pending sum that
  several ops leave is added up first and reduced once;
* gradients between local ops are plain. What a Function made elsewhere may see or give is a
  DTensor: `Lend` wraps for it, a hook unwraps what it gives to a result of an op. The hook is set
  when an op is seen to work on the result without being recorded, as a Function's forward does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.moves import (
    PLAIN,
    How,
    Redistribute,
    move,
    moved,
    refuse_create_graph,
)
from hyper_parallel.dtensor.pending import without_torch_function
from hyper_parallel.dtensor.wrapping import wrap
from hyper_parallel.runtime.executor import program

__all__ = [
    "Lend",
    "expect_wrapped",
    "graph_part",
    "graph_parts",
    "moved_gradient",
    "needs_grad",
    "plain_gradient",
    "redistributed",
    "without_dispatch",
]

# Inside this context torch's kernels see a DTensor as the plain tensor it is made of.
without_dispatch = torch._C._DisableTorchDispatch
_Plain = torch.Tensor
_as_subclass = torch.Tensor.as_subclass
_is_grad_enabled = torch.is_grad_enabled


def needs_grad(tensors: Sequence[Any]) -> bool:
    """Tell whether an op on these DTensors is recorded."""
    if not _is_grad_enabled():
        for tensor in tensors:  # perhaps within the forward of a Function
            if tensor._graph is not None:
                expect_wrapped(tensor)
        return False
    for tensor in tensors:
        if tensor._graph is not None:
            return True
    with without_torch_function():
        return any([tensor.requires_grad for tensor in tensors])  # noqa: C419  # a short list


def graph_parts(
    tensors: Sequence[Any], pending: Sequence[Layout | None] | None
) -> list[torch.Tensor]:
    """Give `graph_part` of several DTensors; quickly for results of ops, and for leaves."""
    parts: list[Any] = [tensor._graph for tensor in tensors]
    if pending is not None:
        parts = [own if lies is None else lies for own, lies in zip(parts, pending, strict=True)]
    for part in parts:
        if type(part) is not _Plain:
            break
    else:
        return parts
    with without_torch_function(), without_dispatch():
        for i, tensor in enumerate(tensors):
            if parts[i] is None and tensor.is_leaf:
                parts[i] = _as_subclass(tensor, _Plain) if tensor.requires_grad else tensor._local
    for i, part in enumerate(parts):
        if type(part) is not _Plain:
            parts[i] = graph_part(tensors[i], part)
    return parts


def expect_wrapped(tensor: Any) -> None:
    """Be ready for DTensors that a Function gives as gradients to a result of an op.

    Called where a Function is seen to work on the tensor: torch's own nodes take plain ones.
    """
    graph = tensor._graph
    if graph is None or tensor._ready_at == graph._version:
        return
    tensor._ready_at = graph._version  # a write, through any alias, makes another node
    cls, target = type(tensor), tensor._layout.cotangent

    def unwrap(grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
        (grad,) = grads
        return (plain_gradient(grad, target),) if isinstance(grad, cls) else None

    with without_torch_function():
        torch.Tensor.grad_fn.__get__(tensor).register_prehook(unwrap)  # type: ignore[attr-defined]


def redistributed(tensor: Any, layout: Layout, how: How = PLAIN) -> Any:
    """Move a DTensor to another layout."""
    cls, src, is_recorded = type(tensor), tensor._layout, needs_grad((tensor,))
    if how is PLAIN:
        if is_recorded:
            if src is layout or not program(src, layout).plan.steps:
                part = graph_part(tensor)  # an alias, which torch knows of
                return wrap(cls, part.view_as(part), layout)
            return wrap(cls, _lend(tensor, layout.cotangent, layout), layout)
        return wrap(cls, move(tensor._local, src, layout), layout)
    if is_recorded:
        expect_wrapped(tensor)  # a move that is not waited for gives such a gradient
        return Redistribute.apply(tensor, layout, how)
    local, dtype = tensor._local, how.forward_dtype
    local = local if dtype is None else local.to(dtype)
    return moved(cls, local, src, layout, how.async_op)


def plain_gradient(grad: Any, target: Layout) -> torch.Tensor:
    """Give the plain local part, in `target`, of a DTensor that is a gradient."""
    local = graph_part(grad) if torch.is_grad_enabled() else grad._local
    return moved_gradient(local, grad._layout, target)


def graph_part(tensor: Any, lies: Layout | None = None) -> torch.Tensor:
    """Give the local part as a plain tensor through which gradients, laid out in `lies`, flow back.

    Communicates:
        Backward: the move from `lies`, once for all that flows through one such part.
    """
    own = tensor._graph
    if own is not None and lies is None:
        return own
    local = tensor._local
    with without_torch_function():
        if not tensor.requires_grad:
            return local
        if tensor.is_leaf:
            if lies is None:
                with without_dispatch():
                    return _as_subclass(tensor, _Plain)
            return _lend(tensor, lies)
    parts, version = tensor._parts, (local if own is None else own)._version
    if parts is None or parts[0] != version:  # a write, through any alias, makes another graph
        parts = tensor._parts = (version, {})
    found = parts[1].get(lies)
    if found is None:
        found = parts[1][lies] = _connect(tensor, lies)
    return found


def _connect(tensor: Any, lies: Layout | None) -> torch.Tensor:
    """Make a plain part of a tensor that is no leaf."""
    if lies is None and not _is_foreign(tensor):
        with without_torch_function(), without_dispatch():
            return _as_subclass(tensor, _Plain)
    return _lend(tensor, lies or tensor._layout.cotangent)


def _is_foreign(tensor: Any) -> bool:
    """Tell whether a Function that was made elsewhere gave it, so that its gradient is wrapped."""
    with without_torch_function():
        node: Any = tensor.grad_fn
    return isinstance(node, BackwardCFunction) and not hasattr(node, "takes_pending")


def _lend(tensor: Any, lies: Layout, dst: Layout | None = None) -> torch.Tensor:
    """Hand out the local part, moved if asked, of which the gradient is laid out in `lies`."""
    source, src, wrapper = tensor._graph, tensor._layout, None
    back = (lies, src.cotangent)
    if source is None:
        source, wrapper = tensor, type(tensor) if _is_foreign(tensor) else None
        with without_torch_function():
            node: Any = tensor.grad_fn
        # Such a node takes a DTensor that lies anywhere; grad_placements keep the local shape.
        if dst is None and hasattr(node, "takes_pending"):
            back, wrapper = (lies, lies), type(tensor)
    return Lend.apply(source, tensor._local, (src, dst or src), back, wrapper)  # type: ignore[return-value]


class Lend(torch.autograd.Function):
    """A local part, lent or moved, with its gradient moved back, and wrapped if asked."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        local: torch.Tensor,
        ends: tuple[Layout, Layout],
        back: tuple[Layout, Layout],
        wrapper: type[Any] | None,
    ) -> torch.Tensor:
        """Hand out `local`, moved between `ends`; the gradient goes to `source`."""
        del source
        ctx.back, ctx.wrapper = back, wrapper
        return move(local, *ends).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Move the gradient between the layouts of `back`."""
        grad = moved_gradient(grad, *ctx.back)
        if ctx.wrapper is not None:
            grad = wrap(ctx.wrapper, grad, ctx.back[1])
        return grad, None, None, None, None


def moved_gradient(grad: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
    """Move a plain gradient, within a graph of the backward pass if one is made.

    Communicates:
        The steps of plan(src, dst).

    Raises:
        HyperParallelError: one is made, and this is more than the reduction of a pending sum.
    """
    if src == dst:
        return grad
    if torch.is_grad_enabled() and grad.requires_grad:
        if src.cotangent != dst:
            refuse_create_graph("DTensor gradient")
        return _Reduced.apply(grad, src, dst)  # type: ignore[return-value]
    return move(grad, src, dst)


class _Reduced(torch.autograd.Function):
    """Reduce a pending gradient within a graph of the backward pass.

    Its value was handed out to each rank as it was, so what comes back goes on as it is.
    """

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
        return move(grad.clone(), src, dst)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad, None, None
