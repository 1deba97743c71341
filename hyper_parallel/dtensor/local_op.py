# SPDX-License-Identifier: Apache-2.0
"""Run an op on local tensors, inside torch's own graph of them.

[Note: above autograd] An op runs once, on plain local tensors that torch differentiates as it does
anywhere: no backward op needs a rule, and what is saved, freed, checked for changes or
differentiated twice is torch's own affair. Of each result `out` a DTensor is made that is an alias
of it in the graph, so a user's autograd.Function may take it; further ops go on from `out` itself
(`_graph`), at no cost. Hooks are put on `out`, too, where all gradients pass.

Three things stand between local tensors and DTensors:
* a leaf lends each op an alias of itself, since what it kept would keep it alive for ever;
* `_Lend` stands where gradients lie otherwise than in the cotangent layout: a pending sum that
  several ops leave is added up first and reduced once;
* gradients between local ops are plain. What a Function made elsewhere may see or give is a
  DTensor: `_Lend` wraps for it, a hook unwraps what it gives to a result of an op. The hook is set
  when an op is seen to work on the result without being recorded, as a Function's forward does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.decisions import Spec
from hyper_parallel.dtensor.moves import (
    PLAIN,
    How,
    Redistribute,
    move,
    moved,
    refuse_create_graph,
)
from hyper_parallel.dtensor.pending import without_torch_function

__all__ = [
    "expect_wrapped",
    "graph_part",
    "graph_parts",
    "moved_gradient",
    "needs_grad",
    "plain_gradient",
    "redistributed",
    "without_dispatch",
    "wrap",
    "wrap_results",
]

# Inside this context torch's kernels see a DTensor as the plain tensor it is made of.
without_dispatch = torch._C._DisableTorchDispatch
_Plain = torch.Tensor
_make_subclass = torch.Tensor._make_subclass
_as_subclass = torch.Tensor.as_subclass
_is_grad_enabled = torch.is_grad_enabled


def needs_grad(tensors: Sequence[Any]) -> bool:
    """Tell whether an op on these DTensors is recorded."""
    if not _is_grad_enabled():
        for tensor in tensors:  # perhaps within the forward of a Function
            if tensor._graph is not None and not tensor._is_ready:
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


def wrap_results(
    cls: type[Any], result: Any, spec: Spec, parts: Sequence[torch.Tensor] = ()
) -> Any:
    """Make DTensors of an op's local results.

    Args:
        cls: the DTensor class.
        result: what the op gave.
        spec: the decision.
        parts: the local operands, if the op was recorded.

    Returns:
        The results, tensors as DTensors.
    """
    outputs = spec.outputs
    if parts and spec.has_empty:
        result = tree_map(lambda value: _tied(value, parts), result)
    if type(result) is _Plain and outputs is not None:
        return wrap(cls, result, outputs[0], spec.divisors[0] if spec.divisors else 1)
    flat, tree = tree_flatten(result)
    position = 0
    for i, value in enumerate(flat):
        if not isinstance(value, _Plain):
            continue
        if outputs is None:
            whole = spec.inputs[0].replicated
            layout = Layout.of(whole.mesh, whole.placements, tuple(value.shape))
        else:
            layout = outputs[position]
        divisor = spec.divisors[position] if spec.divisors else 1
        flat[i] = wrap(cls, value, layout, divisor)
        position += 1
    return tree_unflatten(flat, tree)


def wrap(cls: type[Any], out: torch.Tensor, layout: Layout, divisor: int = 1) -> Any:
    """Make a DTensor of a plain local tensor, in the graph that it is in.

    Args:
        cls: the DTensor class.
        out: the local tensor.
        layout: its layout.
        divisor: what its gradient is divided by, for a pending average.

    Returns:
        The DTensor; see [Note: above autograd].
    """
    if not out.requires_grad:
        tensor: Any = _make_subclass(cls, out)
        tensor._local, tensor._layout = out, layout
        return tensor
    if divisor > 1:
        out = _Share.apply(out, divisor)  # type: ignore[assignment]
    tensor = _as_subclass(out, cls)
    tensor._layout, tensor._graph = layout, out  # `_local` is made when it is asked for
    return tensor


def expect_wrapped(tensor: Any) -> None:
    """Be ready for DTensors that a Function gives as gradients to a result of an op.

    Called where a Function is seen to work on the tensor: torch's own nodes take plain ones.
    """
    if tensor._graph is None or tensor._is_ready:
        return
    tensor._is_ready = True
    cls, target = type(tensor), tensor._layout.cotangent

    def unwrap(grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
        (grad,) = grads
        return (plain_gradient(grad, target),) if isinstance(grad, cls) else None

    with without_torch_function():
        torch.Tensor.grad_fn.__get__(tensor).register_prehook(unwrap)  # type: ignore[attr-defined]


def redistributed(tensor: Any, layout: Layout, how: How = PLAIN) -> Any:
    """Move a DTensor to another layout."""
    if needs_grad((tensor,)):
        expect_wrapped(tensor)  # a move that is not waited for gives such a gradient
        return Redistribute.apply(tensor, layout, how)
    local, dtype = tensor._local, how.forward_dtype
    local = local if dtype is None else local.to(dtype)
    return moved(type(tensor), local, tensor._layout, layout, how.async_op)


def plain_gradient(grad: Any, target: Layout) -> torch.Tensor:
    """Give the plain local part, in `target`, of a DTensor that is a gradient."""
    local = graph_part(grad) if torch.is_grad_enabled() else grad._local
    return moved_gradient(local, grad._layout, target)


def graph_part(tensor: Any, lies: Layout | None = None) -> torch.Tensor:
    """Give the local part as a plain tensor through which gradients flow to the DTensor.

    Args:
        tensor: the DTensor.
        lies: the layout of those gradients, if it is not the cotangent layout.

    Returns:
        The plain tensor; part of the graph if the DTensor is.

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
            return _lend(tensor, tensor, lies)
    parts = tensor._parts
    if parts is None:
        parts = tensor._parts = {}
    found = parts.get(lies)
    if found is None:
        found = parts[lies] = _connect(tensor, lies)
    return found


def _connect(tensor: Any, lies: Layout | None) -> torch.Tensor:
    """Make a plain part of a tensor that is no leaf."""
    if tensor._graph is not None:
        return _lend(tensor._graph, tensor, lies)
    with without_torch_function():
        node: Any = tensor.grad_fn
        is_foreign = isinstance(node, BackwardCFunction) and not hasattr(node, "takes_plain")
        if not is_foreign and lies is None:
            with without_dispatch():
                return _as_subclass(tensor, _Plain)
    return _lend(tensor, tensor, lies, is_foreign)


def _lend(
    source: torch.Tensor, tensor: Any, lies: Layout | None, is_wrapped: bool = False
) -> torch.Tensor:
    target = tensor._layout.cotangent
    wrapper = type(tensor) if is_wrapped else None
    return _Lend.apply(source, tensor._local, lies or target, target, wrapper)  # type: ignore[return-value]


class _Lend(torch.autograd.Function):
    """Hand out a local part; move its gradient to the cotangent layout, and wrap it if asked."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        local: torch.Tensor,
        lies: Layout,
        target: Layout,
        wrapper: type[Any] | None,
    ) -> torch.Tensor:
        del source  # where the gradient goes
        ctx.lies, ctx.target, ctx.wrapper = lies, target, wrapper
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grad = moved_gradient(grad, ctx.lies, ctx.target)
        if ctx.wrapper is not None:
            grad = wrap(ctx.wrapper, grad, ctx.target)
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


def _tied(out: Any, parts: Sequence[torch.Tensor]) -> Any:
    """Let a result depend on all operands, also where a part without elements does not.

    The moves of their gradients need every rank.
    """
    return _Tied.apply(out, *parts) if isinstance(out, _Plain) and out.requires_grad else out


class _Tied(torch.autograd.Function):
    """A result, from which each operand gets a gradient of zeros beside its own."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(part.shape, part.dtype) for part in parts]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        zeros = [
            grad.new_zeros(shape, dtype=dtype) if need else None
            for (shape, dtype), need in zip(ctx.shapes, ctx.needs_input_grad[1:], strict=True)
        ]
        return grad, *zeros


class _Share(torch.autograd.Function):
    """A local average of which the whole result is the average: its share of the gradient."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad / ctx.divisor, None
