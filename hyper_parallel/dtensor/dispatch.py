# SPDX-License-Identifier: Apache-2.0
"""Where every torch call with a DTensor goes: native, autograd entry, in-place, list op, or rule.

`torch_function` serves what Python calls, above autograd. `engine_call` serves the few calls that
the autograd engine itself makes below it (sums of gradients, detached copies).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from hyper_parallel.core import Replicate
from hyper_parallel.dtensor import inplace, ops
from hyper_parallel.dtensor.moves import move
from hyper_parallel.dtensor.signatures import op_name
from hyper_parallel.errors import HyperParallelError, LayoutError, describe

__all__ = ["REPLICATE", "engine_call", "torch_function", "without_torch_function"]

REPLICATE = Replicate()

# Inside this context torch's own methods see a DTensor as the plain tensor it is made of.
without_torch_function = torch._C.DisableTorchFunctionSubclass

# Getters that compute a tensor, so they are ops; every other getter is answered by torch.
_OP_GETTERS = frozenset(("T", "mT", "H", "mH", "real", "imag"))
_NATIVE = frozenset(
    "__set__ requires_grad_ retain_grad detach_ data_ptr untyped_storage storage_offset is_contiguous"
    " element_size is_floating_point is_complex is_signed is_tensor is_inference is_shared is_pinned"
    " _has_compatible_shallow_copy_type get_device register_post_accumulate_grad_hook"
    " _is_view is_set_to is_conj is_neg is_same_size type __hash__".split()
)


def torch_function(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve one torch call that has a DTensor among its arguments."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        attribute = getattr(func.__self__, "__name__", "")
        if attribute == "data":
            return _data(cls, name, *args)
        if attribute not in _OP_GETTERS:
            name = "__set__"
    if name in _NATIVE:
        with without_torch_function():
            return func(*args, **kwargs)
    special = _SPECIAL.get(func)
    if special is not None:
        return special(cls, *args, **kwargs)
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return inplace.list_op(cls, func, name, args, kwargs)
    if inplace.is_in_place(name, kwargs):
        return inplace.run(cls, func, name, args, kwargs)
    return ops.run(cls, func, args, kwargs)


def _data(cls: type[Any], which: str, tensor: Any, value: Any = None) -> Any:
    """Serve `tensor.data` and `tensor.data = value`."""
    if which == "__get__":
        return cls(tensor._local, tensor._layout)
    if not isinstance(value, cls):
        raise LayoutError(
            describe(
                "DTensor.data",
                "the new data must be a DTensor",
                "Distribute it first with distribute_tensor",
                data=type(value).__name__,
            )
        )
    with without_torch_function():
        torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    tensor._local, tensor._layout = value._local, value._layout
    tensor.__dict__.pop("_shown_grad", None)
    return None


def _detach(cls: type[Any], tensor: Any) -> Any:
    return cls(tensor._local, tensor._layout)


# ---------------------------------------------------------------------- autograd entries


def _edges(tensors: Any) -> Any:
    """Name graph nodes in place of DTensors, so that the engine is entered without us."""
    if tensors is None or isinstance(tensors, GradientEdge):
        return tensors
    if isinstance(tensors, torch.Tensor):
        return _edge(tensors)
    return [_edge(t) if isinstance(t, torch.Tensor) else t for t in tensors]


def _edge(tensor: torch.Tensor) -> GradientEdge:
    with without_torch_function():
        return get_gradient_edge(tensor)


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


def _backward(
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
        _edges(_as_list(tensors)),
        _seeds(cls, tensors, grad_tensors),
        retain_graph=retain_graph,
        create_graph=create_graph,
        inputs=_edges(inputs),
    )


def _tensor_backward(
    cls: type[Any],
    tensor: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Serve Tensor.backward."""
    _backward(cls, [tensor], [gradient], retain_graph, create_graph, None, inputs)


def _grad(
    cls: type[Any],
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Serve torch.autograd.grad; gradients of DTensors are DTensors in the cotangent layout."""
    asked = _as_list(inputs)
    found = torch.autograd.grad(
        _edges(_as_list(outputs)),
        _edges(asked),
        _seeds(cls, outputs, grad_outputs),
        retain_graph,
        create_graph,
        *args,
        **kwargs,
    )
    return tuple(_as_asked(cls, tensor, grad) for tensor, grad in zip(asked, found, strict=True))


def _as_asked(cls: type[Any], tensor: Any, grad: Any) -> Any:
    if grad is None or not isinstance(tensor, cls):
        return grad
    layout = tensor._layout.cotangent
    local = move(grad._local, grad._layout, layout) if isinstance(grad, cls) else grad
    return cls(local, layout)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.detach: _detach,
    torch.detach: _detach,
    torch.autograd.backward: _backward,
    torch.Tensor.backward: _tensor_backward,
    torch.autograd.grad: _grad,
}


# ---------------------------------------------------------------------- below autograd

_ENGINE_UNARY = frozenset(
    "detach alias clone zeros_like ones_like empty_like _to_copy view neg".split()
)


def engine_call(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve one call that torch's C++ makes on a DTensor."""
    name = op_name(func).split(".")[0]
    if name in ("add", "add_") and not kwargs:
        return _sum(cls, name, *args)
    if name not in _ENGINE_UNARY:
        raise HyperParallelError(
            describe(
                f"aten.{name}",
                "torch must not run this op on the local part of a DTensor behind its back",
                "Call it on the DTensor from Python, or on to_local()",
            )
        )
    source = args[0]
    local_args = tree_map(lambda x: x._local if isinstance(x, cls) else x, args)
    result = func(*local_args, **kwargs)
    layout = source._layout.cotangent if name == "ones_like" else source._layout
    return cls(result, layout)


def _sum(cls: type[Any], name: str, a: Any, b: Any) -> Any:
    """Add two gradients; pieces of different layouts are moved first, never added as they are.

    A plain one is in the cotangent layout already; see [Note: gradients] in tensor.py.
    """
    layouts = [t._layout for t in (a, b) if isinstance(t, cls)]  # type: ignore[attr-defined]
    target = layouts[0]
    if len(layouts) == 1 or layouts[0] != layouts[1]:
        target = next((layout for layout in layouts if not layout.has_partial), target).cotangent
    parts = [move(t._local, t._layout, target) if isinstance(t, cls) else t for t in (a, b)]  # type: ignore[attr-defined]
    if name == "add":
        return cls(parts[0] + parts[1], target)
    if not isinstance(a, cls):
        return a.add_(parts[1])
    if parts[0] is a._local:  # type: ignore[attr-defined]
        a._local.add_(parts[1])  # type: ignore[attr-defined]
    else:
        a._local.copy_(parts[0] + parts[1])  # type: ignore[attr-defined]
        a._layout = target  # type: ignore[attr-defined]
    return a
