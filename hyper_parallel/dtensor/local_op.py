# SPDX-License-Identifier: Apache-2.0
"""Run an op on local tensors, as one node of the outer autograd graph.

[Note: above autograd] The op runs once, on local tensors under grad mode, inside one
autograd.Function whose backward differentiates that local piece. So no backward op needs a rule;
the layouts of the gradients come from the same decision.

[Note: checkpoint] Under torch.utils.checkpoint a saved tensor is replaced by a promise, kept by
pack hooks per backward pass, and a backward of the local piece is a pass of its own: each op would
recompute the whole block. So there the local piece travels as an attribute of one saved tensor of
the outer node, which the recomputation of the outer pass makes anew, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C import _autograd as engine  # pyright: ignore[reportAttributeAccessIssue]
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.core import Layout, Replicate
from hyper_parallel.dtensor.decisions import Spec
from hyper_parallel.dtensor.moves import move, refuse_create_graph

__all__ = ["apply"]

LocalCall = Callable[[Sequence[torch.Tensor]], Any]


def apply(cls: type[Any], call: LocalCall, spec: Spec, tensors: Sequence[Any]) -> Any:
    """Run `call` on the local tensors and wrap its results.

    Args:
        cls: the DTensor class.
        call: the op, given the operands' local tensors.
        spec: the layouts of operands, results and gradients.
        tensors: the operands, in `spec.inputs`.

    Returns:
        What `call` returns, tensors as DTensors.

    Communicates:
        Forward: nothing. Backward: a gradient that lies elsewhere is moved; what reaches a leaf
        is reduced.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        trees: list[Any] = []
        outs = _LocalOp.apply(partial(_flat, call, trees), spec, *tensors)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return tree_unflatten(list(outs), trees[0])
    flat, tree = tree_flatten(call([t._local for t in tensors]))
    return tree_unflatten(_wrap(cls, flat, spec), tree)


def _flat(call: LocalCall, trees: list[Any], locals_: Sequence[torch.Tensor]) -> list[Any]:
    flat, tree = tree_flatten(call(locals_))
    trees.append(tree)
    return flat


def _wrap(cls: type[Any], flat: list[Any], spec: Spec) -> list[Any]:
    mesh = spec.inputs[0].mesh
    wrapped: list[Any] = []
    position = 0
    for value in flat:
        if not isinstance(value, torch.Tensor):
            wrapped.append(value)
        elif spec.outputs is None:
            whole = Layout(mesh, (Replicate(),) * mesh.ndim, tuple(value.shape))
            wrapped.append(cls(value, whole))
        else:
            wrapped.append(cls(value, spec.outputs[position]))
            position += 1
    return wrapped


class _LocalOp(torch.autograd.Function):
    """One op on local tensors; see [Note: above autograd]."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., list[Any]], spec: Spec, *tensors: Any) -> Any:
        needs = ctx.needs_input_grad[2:]
        leaves = [
            t._local.detach().requires_grad_() if need else t._local
            for t, need in zip(tensors, needs, strict=True)
        ]
        with torch.enable_grad():
            outs = call(leaves)
        ctx.cls, ctx.spec = type(tensors[0]), spec
        ctx.to_leaf = [t.is_leaf for t in tensors]
        ctx.inner = (leaves, outs)
        if _in_checkpoint():
            carrier: Any = torch.empty(0)
            carrier.inner, ctx.inner = ctx.inner, None
            ctx.save_for_backward(carrier)
        ctx.set_materialize_grads(False)
        plain = [o.detach() if isinstance(o, torch.Tensor) else o for o in outs]
        wrapped = _wrap(ctx.cls, plain, spec)
        ctx.layouts = [w._layout if isinstance(w, ctx.cls) else None for w in wrapped]
        ctx.mark_non_differentiable(
            *(
                w
                for w, o in zip(wrapped, outs, strict=True)
                if isinstance(w, ctx.cls) and not o.requires_grad
            )
        )
        return tuple(wrapped)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        refuse_create_graph("DTensor op")
        saved = ctx.saved_tensors
        inner = saved[0].inner if saved else ctx.inner
        if inner is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: its saved tensors were freed."
                " Specify retain_graph=True at the first backward."
            )
        leaves, outs = inner
        keep = engine._get_current_graph_task_keep_graph()
        pairs = _cotangents(ctx, outs, grads)
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        found: Any = iter([None] * len(asked))
        if pairs:
            found = iter(
                torch.autograd.grad(
                    [out for out, _ in pairs],
                    asked,
                    [grad for _, grad in pairs],
                    retain_graph=keep,
                    allow_unused=True,
                )
            )
        if not keep:
            ctx.inner = None
        result = [
            _hand_on(ctx, i, _settled(ctx, leaf, next(found))) if leaf.requires_grad else None
            for i, leaf in enumerate(leaves)
        ]
        return None, None, *result


def _in_checkpoint() -> bool:
    """Tell whether torch.utils.checkpoint keeps what is saved now; see [Note: checkpoint]."""
    hooks = engine._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _cotangents(
    ctx: Any, outs: list[Any], grads: Sequence[torch.Tensor | None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the inner results with their local cotangents."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    position = -1
    for out, grad, layout in zip(outs, grads, ctx.layouts, strict=True):
        position += layout is not None
        if grad is None or layout is None or not out.requires_grad:
            continue
        local = grad
        if isinstance(grad, ctx.cls):
            local = move(grad._local, grad._layout, layout.cotangent)  # type: ignore[attr-defined]
        divisor = ctx.spec.divisors[position] if ctx.spec.divisors else 1
        pairs.append((out, local / divisor if divisor > 1 else local))
    return pairs


def _settled(ctx: Any, leaf: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Give zeros where only ranks with elements may have a gradient: moves need every rank."""
    return torch.zeros_like(leaf) if grad is None and ctx.spec.has_empty else grad


def _hand_on(ctx: Any, i: int, grad: torch.Tensor | None) -> Any:
    """Give an operand's gradient: in the cotangent layout and plain for a leaf, else as it lies."""
    if grad is None:
        return None
    lies, target = ctx.spec.gradients[i], ctx.spec.inputs[i].cotangent
    if ctx.to_leaf[i]:
        return move(grad, lies, target)
    return ctx.cls(grad, lies)
