# SPDX-License-Identifier: Apache-2.0
"""Where every torch call with a DTensor goes: native, autograd entry, in-place, list op, or rule.

A route of `ROUTES` serves what Python calls, above autograd. `engine_call` serves the few calls
that the autograd engine itself makes below it (sums of gradients, detached copies).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from operator import methodcaller
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from hyper_parallel.dtensor import entries, inplace, lists, ops, views
from hyper_parallel.dtensor.moves import move
from hyper_parallel.dtensor.pending import bare, is_pending, settle, without_torch_function
from hyper_parallel.dtensor.signatures import op_name
from hyper_parallel.errors import HyperParallelError, LayoutError

__all__ = ["ROUTES", "engine_call", "find_route", "served_by"]

# Getters that compute a tensor, so they are ops; every other getter is answered by torch.
_OP_GETTERS = frozenset(("T", "mT", "H", "mH", "real", "imag"))
# Said of, or to, the tensor that all gradients pass.
_RECORDED = frozenset(("grad_fn", "output_nr", "retain_grad"))
_NATIVE = frozenset(
    "__set__ requires_grad_ element_size is_signed is_tensor is_inference is_conj is_neg _is_view"
    " _has_compatible_shallow_copy_type get_device register_post_accumulate_grad_hook"
    " __hash__".split()
)
# What a result that is still on its way cannot answer.
_READING = frozenset(
    "data_ptr untyped_storage storage_offset is_contiguous is_shared is_pinned is_set_to".split()
)


_Functions = Mapping[str, Callable[..., Any]]
_served: ContextVar[_Functions] = ContextVar("served", default=MappingProxyType({}))


@contextmanager
def served_by(functions: _Functions) -> Generator[None]:
    """Within it, calls of these names go to the functions, which may give NotImplemented."""
    token = _served.set({**_served.get(), **functions})
    try:
        yield
    finally:
        _served.reset(token)


Route = Callable[[type[Any], Any, tuple[Any, ...], dict[str, Any]], Any]
# Who serves a function, for those that were called; a dict is twice as fast as lru_cache.
ROUTES: dict[Any, Route] = {}
_MAX_ROUTES = 4096


def _name(func: Any) -> str:
    return getattr(func, "__name__", "").partition(".")[0]


def find_route(func: Any) -> Route:
    """Tell who serves a torch function that has a DTensor among its arguments, and keep it."""
    if len(ROUTES) >= _MAX_ROUTES:
        ROUTES.clear()
    route = ROUTES[func] = _route_of(func)
    return route


def _route_of(func: Any) -> Route:
    """Tell who serves a function; by its name, as no argument changes that."""
    name = _name(func)
    if name in ("__get__", "__set__"):
        attribute = getattr(func.__self__, "__name__", "")
        if attribute == "data":
            return partial(_data, name)
        name = attribute if attribute in _OP_GETTERS | _RECORDED else "__set__"
    if name in _RECORDED:
        return _of_recorded
    if name in ("is_complex", "is_floating_point"):
        ask = methodcaller(name)
        return lambda cls, func, args, kwargs: ask(bare(args[0]))
    if name in _NATIVE:
        return _native
    if name in _READING:
        return _reading
    if getattr(func, "__module__", "").startswith("torch.distributed."):
        return partial(_refuse_collective, name)
    special = _SPECIAL.get(func)
    if special is not None:
        return lambda cls, func, args, kwargs: special(cls, *args, **kwargs)
    if name in _SAID_OTHERWISE:
        return partial(_said_otherwise, _SAID_OTHERWISE[name])
    if name == "to":
        return _to
    if name.startswith("new_"):
        return lambda cls, func, args, kwargs: _new(cls, func, *args, **kwargs)
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return lambda cls, func, args, kwargs: lists.list_op(cls, func, name, args, kwargs)
    if inplace.is_in_place(name):
        return lambda cls, func, args, kwargs: inplace.run(cls, func, name, args, kwargs)
    return _op


def _op(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (served := _served.get()) and (function := served.get(_name(func))) is not None:
        result = function(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return ops.run(cls, func, args, kwargs)


def _native(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve what torch answers itself, from the tensor that a DTensor is."""
    with without_torch_function():
        return func(*args, **kwargs)


def _of_recorded(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with without_torch_function():
        return func(args[0]._recorded, *args[1:], **kwargs)


def _reading(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve what torch answers itself of a result that is there."""
    if is_pending(args[0]):
        settle(args[0])
    return _native(cls, func, args, kwargs)


def _said_otherwise(
    said: Any, cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if args and isinstance(args[0], cls):
        return said(*args, **kwargs)
    return ops.run(cls, func, args, kwargs)


def _to(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        args = (args[0], args[1].dtype, *args[2:])  # the mesh says the device
    return ops.run(cls, func, args, kwargs)


def _refuse_collective(
    name: str, cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NoReturn:
    """Refuse torch's own collectives, which would run on a copy and lose the result."""
    raise LayoutError(
        f"torch.distributed.{name}",
        "the tensor must be plain",
        "Call it on to_local() to work on this rank's part; to reduce or gather a DTensor,"
        " use redistribute",
        tensor="DTensor",
    )


def _data(
    which: str, cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Serve `tensor.data` and `tensor.data = value`."""
    if which == "__get__":
        return _detach(cls, args[0])
    tensor, value = args
    if not isinstance(value, cls):
        raise LayoutError(
            "DTensor.data",
            "the new data must be a DTensor",
            "Distribute it first with distribute_tensor",
            data=type(value).__name__,
        )
    own, given = tensor._local, value._local
    with without_torch_function():
        torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    # Not another object: a gradient is shown as a DTensor whose local part is the real gradient.
    own.data = given
    tensor._layout = value._layout
    tensor._shown_grad = tensor._graph = tensor._parts = None
    return None


def _detach(cls: type[Any], tensor: Any) -> Any:
    """Give the same part as a tensor of its own: `.data =` on one must not change the other."""
    detached = cls(tensor._local.detach(), tensor._layout)
    if tensor._write_is_lost:
        detached._write_is_lost = True
    if tensor._is_scattered:
        detached._is_scattered = True
    return detached


def _new(cls: type[Any], func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Serve `tensor.new_zeros(...)` and its like: a replicated tensor on the same mesh."""
    local = func(tensor._local, *args, **kwargs)
    layout = tensor._layout.replicated.with_shape(local.shape)
    return cls(local, layout, requires_grad=local.requires_grad)


def _constant(cls: type[Any], tensor: Any, val: float) -> Any:
    """Serve torch.nn.init.constant_, which turns gradients off itself."""
    with torch.no_grad():
        return tensor.fill_(val)


def _detach_in_place(tensor: Any) -> Any:
    """Serve `tensor.detach_()`; torch's own refuses results of ops, which are aliases for it."""
    if tensor.is_leaf:
        return tensor.requires_grad_(False)
    try:
        torch.utils.swap_tensors(tensor, _detach(type(tensor), tensor))
    except RuntimeError as error:
        must = "the tensor must not be kept for backward by a torch.autograd.Function"
        raise LayoutError("DTensor op 'detach_'", must, "Use detach()") from error
    return tensor


def _view_in_place(name: str, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Serve `tensor.t_()` and the like, which change no element."""
    inplace.refuse_gradient(f"DTensor op '{name}_'", [tensor])
    view = getattr(tensor.detach(), name)(*args, **kwargs)
    _data("__set__", type(tensor), None, (tensor, view), {})
    tensor._is_scattered = view._is_scattered
    tensor._write_is_lost = view._write_is_lost
    return tensor


# Calls that are another call, which has a rule.
_SAID_OTHERWISE: dict[str, Callable[..., Any]] = {
    "dim": lambda x: x.ndim,  # Tensor.ndimension
    "detach_": _detach_in_place,
    "view_as": views.view_as,
    "reshape_as": lambda x, other: x.reshape(other.shape),
    "expand_as": lambda x, other: x.expand(other.shape),
    "broadcast_to": lambda x, size: x.expand(size),
    "type_as": lambda x, other: x.to(other.dtype),
    "ravel": lambda x: x.reshape(-1),
    "is_same_size": lambda x, other: x.shape == other.shape,
    **{
        f"{name}_": partial(_view_in_place, name)
        for name in "squeeze swapaxes swapdims t transpose unsqueeze".split()
    },
}


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.detach: _detach,
    torch.detach: _detach,
    torch.autograd.backward: entries.backward,
    torch.Tensor.backward: lambda cls, *args, **kwargs: entries.backward_of(*args, **kwargs),
    torch.Tensor.register_hook: entries.register_hook,
    torch.autograd.grad: entries.grad,
    torch.nn.init.constant_: _constant,
}


# ---------------------------------------------------------------------- below autograd

_ENGINE_UNARY = frozenset(
    "detach alias clone zeros_like ones_like empty_like new_empty_strided _to_copy view neg"
    " isnan _has_compatible_shallow_copy_type".split()
)


def engine_call(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve one call that torch's C++ makes on a DTensor."""
    name = op_name(func).split(".")[0]
    if name in ("add", "add_") and not kwargs:
        return _sum(cls, name, *args)
    if name == "set_" and len(args) == 2 and not kwargs:  # torch.nn.utils.parametrize
        _data("__set__", cls, func, args, kwargs)
        return args[0]
    is_copy = name == "copy_" and len({getattr(x, "_layout", None) for x in args[:2]}) == 1
    if name not in _ENGINE_UNARY and not is_copy:
        raise HyperParallelError(
            f"aten.{name}",
            "torch must not run this op on the local part of a DTensor behind its back",
            "Call it on the DTensor from Python, outside of torch.func, or on to_local()",
        )
    source = args[0]
    result = func(*[x._local if isinstance(x, cls) else x for x in args], **kwargs)
    if not isinstance(result, torch.Tensor) or name == "isnan":  # of this rank's part
        return result
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
