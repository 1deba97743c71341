# SPDX-License-Identifier: Apache-2.0
"""How autograd is entered with DTensors: backward, grad, `.grad` and hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hyper_parallel.dtensor.local_op import graph_part, plain_gradient
from hyper_parallel.dtensor.pending import without_torch_function
from hyper_parallel.dtensor.wrapping import wrap
from hyper_parallel.errors import HyperParallelError, LayoutError

__all__ = [
    "accumulated",
    "backward",
    "backward_of",
    "grad",
    "read_grad",
    "register_hook",
    "write_grad",
]

_get_grad = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_set_grad = torch.Tensor.grad.__set__  # type: ignore[attr-defined]
_run_engine = torch.autograd.graph._engine_run_backward
_graph_task = torch._C._current_graph_task_id
_ACCUMULATING = {"allow_unreachable": True, "accumulate_grad": True}


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
        source = tensor._recorded if isinstance(tensor, cls) else tensor  # type: ignore[attr-defined]
        node = source.grad_fn
        if node is None:
            return get_gradient_edge(source)
        # The caller's tensor keeps the graph alive, so the edge needs no token of its own, which
        # would be a view made through our dispatch.
        return GradientEdge(node, source.output_nr)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _starts(cls: type[Any], tensors: Any, grads: Any) -> tuple[list[Any], list[Any]]:
    """Give plain tensors, so that the engine is entered without us, and what each starts with."""
    outputs = _as_list(tensors)
    given = [None] * len(outputs) if grads is None else _as_list(grads)
    if len(given) != len(outputs):
        raise RuntimeError(f"got {len(outputs)} tensors and {len(given)} gradients")
    parts: list[Any] = []
    seeds: list[Any] = []
    for output, grad in zip(outputs, given, strict=True):
        if not isinstance(output, cls):
            parts.append(output)
            seeds.append(grad if grad is not None else _one(output))
            continue
        part, layout = output._graph, output._layout.cotangent
        if part is None:
            with torch.enable_grad():
                part = graph_part(output)
        parts.append(part)
        if grad is None:
            seeds.append(_one(output))
        elif isinstance(grad, cls):
            if grad.shape != output.shape:
                _refuse_shape("backward", output, grad)
            seeds.append(plain_gradient(grad, layout))
        elif layout.is_replicated or _is_in_backward():
            # There it is local: torch's zeros for an unused result of a Function.
            seeds.append(grad)
        else:
            raise LayoutError(
                "backward",
                "the gradient of a DTensor must be a DTensor",
                "Distribute it as the output is",
                gradient=type(grad).__name__,
            )
    return parts, seeds


def _is_in_backward() -> bool:
    """Tell whether a Function's backward asks, as that of a reentrant checkpoint does."""
    return _graph_task() >= 0


def _one(output: Any) -> Any:
    if isinstance(output, GradientEdge):
        return None
    if output.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    if not output.dtype.is_floating_point:
        raise RuntimeError(
            f"grad can be implicitly created only for real scalar outputs but got {output.dtype}"
        )
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
    parts, seeds = _starts(cls, tensors, grad_tensors)
    if inputs is None and all(map(_fits, parts, seeds)):
        keep = create_graph if retain_graph is None else retain_graph
        _run_engine(tuple(parts), tuple(seeds), keep, create_graph, (), **_ACCUMULATING)
        return
    torch.autograd.backward(
        parts,
        seeds,
        retain_graph=retain_graph,
        create_graph=create_graph,
        inputs=_accumulating_edges(cls, inputs),
    )


def backward_of(
    tensor: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Compute the gradients of the graph's leaves, as torch.Tensor.backward does."""
    backward(type(tensor), [tensor], [gradient], retain_graph, create_graph, None, inputs)


def _fits(part: Any, seed: Any) -> bool:
    """Tell whether a seed is one that torch takes as it is, which it is slow to find out."""
    is_plain = type(part) is type(seed) is torch.Tensor
    return is_plain and part.shape == seed.shape and part.dtype == seed.dtype


def grad(
    cls: type[Any], outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """Serve torch.autograd.grad; gradients of DTensors are DTensors in the cotangent layout."""
    if kwargs.get("is_grads_batched"):
        raise HyperParallelError(
            "torch.autograd.grad",
            "gradients of DTensors must not be batched",
            "Call it once for each of grad_outputs",
            is_grads_batched=True,
        )
    is_materialized = kwargs.pop("materialize_grads", False)
    if is_materialized:
        kwargs["allow_unused"] = True
    asked = _as_list(inputs)
    parts, seeds = _starts(cls, outputs, grad_outputs)
    edges = [_edge(cls, tensor) for tensor in asked]
    found = torch.autograd.grad(parts, edges, seeds, *args, **kwargs)
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


# ---------------------------------------------------------------------- gradients of one tensor


def read_grad(tensor: Any) -> Any:
    """The gradient: a DTensor in this tensor's cotangent layout, or None.

    Communicates:
        Nothing, but where a user's own autograd.Function left a gradient in another layout: then
        the first reading moves it, so read it on every rank.
    """
    with without_torch_function():
        raw = _get_grad(tensor if tensor._graph is None else tensor._graph)
    if raw is None:
        return None
    shown = tensor._shown_grad
    if shown is not None and shown[0] is raw:  # one object as long as autograd holds the same
        return shown[1]
    cls = type(tensor)
    if isinstance(raw, cls):  # keep the local part, in the right layout
        write_grad(tensor, raw)
        return read_grad(tensor)
    grad = wrap(cls, raw, tensor._layout.cotangent)
    tensor._shown_grad = (raw, grad)
    return grad


def accumulated(tensors: Sequence[Any]) -> list[Any]:
    """Give what autograd has accumulated, which is plain but for what a user's Function gave."""
    with without_torch_function():
        return [_get_grad(tensor) for tensor in tensors]


def write_grad(tensor: Any, value: Any = None) -> None:
    """Serve `tensor.grad = value`, and `del tensor.grad`.

    Raises:
        LayoutError: not a DTensor of the tensor's global shape, or None.
    """
    local = None
    if value is not None:
        if not isinstance(value, type(tensor)) or value.shape != tensor.shape:
            _refuse_shape("DTensor.grad", tensor, value)
        local = value.local_in(tensor._layout.cotangent)
    tensor._shown_grad = None
    with without_torch_function():
        _set_grad(tensor if tensor._graph is None else tensor._graph, local)


def _refuse_shape(where: str, tensor: Any, grad: Any) -> NoReturn:
    raise LayoutError(
        where,
        f"the gradient must be a DTensor of global shape {tuple(tensor.shape)}",
        "Wrap a local gradient with DTensor.from_local",
        grad=type(grad).__name__,
        shape=tuple(getattr(grad, "shape", ())),
    )


def register_hook(cls: type[Any], tensor: Any, hook: Callable[[Any], Any]) -> Any:
    """Serve `tensor.register_hook`: the hook sees DTensors in the cotangent layout.

    Communicates:
        Backward: a gradient that is still a pending sum is reduced for the hook.
    """
    layout = tensor._layout.cotangent

    def on_gradient(raw: Any) -> Any:
        local = plain_gradient(raw, layout) if isinstance(raw, cls) else raw
        seen = wrap(cls, local, layout)
        result = hook(seen)
        changed = seen if result is None else result
        if isinstance(changed, cls):
            changed = plain_gradient(changed, layout)
        return wrap(cls, changed, layout) if isinstance(raw, cls) else changed

    with without_torch_function():
        return torch.Tensor.register_hook(tensor._recorded, on_gradient)
