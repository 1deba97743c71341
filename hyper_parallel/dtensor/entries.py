# SPDX-License-Identifier: Apache-2.0
"""How the autograd engine is entered with DTensors: backward and grad, through graph nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hyper_parallel.dtensor.moves import move
from hyper_parallel.dtensor.pending import without_torch_function
from hyper_parallel.errors import HyperParallelError, LayoutError, describe

__all__ = ["backward", "grad"]


def _edges(tensors: Any) -> list[Any]:
    """Name graph nodes in place of tensors, so that the engine is entered without us."""
    return [_edge(t) if isinstance(t, torch.Tensor) else t for t in _as_list(tensors)]


def _accumulating_edges(cls: type[Any], tensors: Any) -> list[Any] | None:
    """Name nodes whose gradients are accumulated; a tensor that is no leaf retains its own."""
    if tensors is None:
        return None
    edges: list[Any] = []
    for tensor in _as_list(tensors):
        if not isinstance(tensor, cls):
            edges.append(tensor)
            continue
        if not tensor.is_leaf:
            tensor.retain_grad()
        edges.append(_edge(tensor))
    return edges


def _edge(tensor: torch.Tensor) -> GradientEdge:
    with without_torch_function():
        node = tensor.grad_fn
        if node is None:
            return get_gradient_edge(tensor)
        # The caller's tensor keeps the graph alive, so the edge needs no token of its own, which
        # would be a view made through our dispatch.
        return GradientEdge(node, tensor.output_nr)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _seeds(cls: type[Any], tensors: Any, grads: Any) -> list[Any]:
    """Give the local cotangent that each output starts with."""
    outputs = _as_list(tensors)
    given = [None] * len(outputs) if grads is None else _as_list(grads)
    seeds: list[Any] = []
    for output, grad in zip(outputs, given, strict=True):
        if not isinstance(output, cls):
            seeds.append(grad if grad is not None else _one(output))
            continue
        layout = output._layout.cotangent
        if grad is None:
            seeds.append(_one(output))
        elif isinstance(grad, cls):
            seeds.append(move(grad._local, grad._layout, layout))
        elif layout.is_replicated:
            seeds.append(grad)
        else:
            raise LayoutError(
                describe(
                    "backward",
                    "the gradient of a DTensor must be a DTensor",
                    "Distribute it as the output is",
                    gradient=type(grad).__name__,
                )
            )
    return seeds


def _one(output: Any) -> Any:
    if isinstance(output, GradientEdge):
        return None
    if output.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return torch.ones_like(getattr(output, "_local", output).detach())


def backward(  # noqa: PLR0913  # torch's signature
    cls: type[Any],
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Serve torch.autograd.backward."""
    del grad_variables
    torch.autograd.backward(
        _edges(tensors),
        _seeds(cls, tensors, grad_tensors),
        retain_graph=retain_graph,
        create_graph=create_graph,
        inputs=_accumulating_edges(cls, inputs),
    )


def grad(
    cls: type[Any], outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """Serve torch.autograd.grad; gradients of DTensors are DTensors in the cotangent layout."""
    if kwargs.get("is_grads_batched"):
        raise HyperParallelError(
            describe(
                "torch.autograd.grad",
                "gradients of DTensors must not be batched",
                "Call it once for each of grad_outputs",
                is_grads_batched=True,
            )
        )
    is_materialized = kwargs.pop("materialize_grads", False)
    if is_materialized:
        kwargs["allow_unused"] = True
    asked = _as_list(inputs)
    seeds = _seeds(cls, outputs, grad_outputs)
    found = torch.autograd.grad(_edges(outputs), _edges(asked), seeds, *args, **kwargs)
    pairs = zip(asked, found, strict=True)
    if is_materialized:
        pairs = ((t, torch.zeros_like(t).detach() if g is None else g) for t, g in pairs)
    return tuple(_as_asked(cls, tensor, grad) for tensor, grad in pairs)


def _as_asked(cls: type[Any], tensor: Any, grad: Any) -> Any:
    if grad is None or not isinstance(tensor, cls):
        return grad
    layout = tensor._layout.cotangent
    local = move(grad._local, grad._layout, layout) if isinstance(grad, cls) else grad
    return cls(local, layout)
