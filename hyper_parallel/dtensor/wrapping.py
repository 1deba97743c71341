# SPDX-License-Identifier: Apache-2.0
"""Make DTensors of the local results of ops, in the graph that these are in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.decisions import Spec

__all__ = ["is_tied", "wrap", "wrap_results"]

_Plain = torch.Tensor
_make_subclass = torch.Tensor._make_subclass
_as_subclass = torch.Tensor.as_subclass


def wrap_results(
    cls: type[Any], result: Any, spec: Spec, parts: Sequence[torch.Tensor] = ()
) -> Any:
    """Make DTensors of an op's local results; `parts` are its operands, if it was recorded."""
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
    """Make a DTensor of a plain local tensor, in its graph; see [Note: above autograd].

    Its gradient is divided by `divisor`, which is that of a pending average.
    """
    if not out.requires_grad:
        tensor: Any = _make_subclass(cls, out)
        tensor._local, tensor._layout = out, layout
        return tensor
    if divisor > 1:
        out.register_hook(lambda grad: grad / divisor)
        out = out.view_as(out)  # other hooks see the whole gradient
    tensor = _as_subclass(out, cls)
    tensor._layout, tensor._graph = layout, out  # `_local` is made when it is asked for
    return tensor


def _tied(out: Any, parts: Sequence[torch.Tensor]) -> Any:
    """Let a result depend on all operands, also where a part without elements does not.

    The moves of their gradients need every rank.
    """
    return _Tied.apply(out, *parts) if isinstance(out, _Plain) and out.requires_grad else out


def is_tied(out: torch.Tensor) -> bool:
    """Tell whether a result depends on operands by way of a view, which must not be written to."""
    return isinstance(out.grad_fn, _Tied._backward_cls)  # type: ignore[attr-defined]


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
