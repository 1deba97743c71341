# SPDX-License-Identifier: Apache-2.0
"""How the autograd engine is entered with DTensors: backward and grad, through graph nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hyper_parallel.dtensor.local_op import (
    graph_part,
    plain_gradient,
    without_torch_function,
    wrap,
)
from hyper_parallel.errors import HyperParallelError, LayoutError, describe

__all__ = ["backward", "grad"]


def _parts(cls: type[Any], tensors: Any) -> list[Any]:
    """Give plain tensors to start from, so that the engine is entered without us."""
    tensors = _as_list(tensors)
    parts = [t._graph if isinstance(t, cls) else t for t in tensors]  # type: ignore[attr-defined]
    if any(part is None for part in parts):
        with torch.enable_grad():
            return [graph_part(t) if isinstance(t, cls) else t for t in tensors]
    return parts


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
        edges.append(_edge(cls, tensor))
    return edges


def _edge(cls: type[Any], tensor: Any) -> Any:
    """Name a graph node in place of a tensor."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    with without_torch_function():
        return get_gradient_edge(tensor._recorded if isinstance(tensor, cls) else tensor)  # type: ignore[attr-defined]


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
            seeds.append(plain_gradient(grad, layout))
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
        _parts(cls, tensors),
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
    edges = [_edge(cls, tensor) for tensor in asked]
    found = torch.autograd.grad(_parts(cls, outputs), edges, seeds, *args, **kwargs)
    pairs = zip(asked, found, strict=True)
    if is_materialized:
        pairs = ((t, torch.zeros_like(t).detach() if g is None else g) for t, g in pairs)
    return tuple(_as_asked(cls, tensor, grad) for tensor, grad in pairs)


def _as_asked(cls: type[Any], tensor: Any, grad: Any) -> Any:
    if grad is None or not isinstance(tensor, cls):
        return grad
    layout = tensor._layout.cotangent
    local = plain_gradient(grad, layout) if isinstance(grad, cls) else grad
    return wrap(cls, local, layout)
