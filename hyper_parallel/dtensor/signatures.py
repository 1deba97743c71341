# SPDX-License-Identifier: Apache-2.0
"""What a torch call is to a rule: the op's name, operands, and static arguments by name.

Torch's builtins have no Python signature, so positional arguments are named from the table in
parameters.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from hyper_parallel.dtensor.parameters import ALIASES, COPIES, PARAMETERS, PREFIXES

__all__ = ["BoundCall", "Parameter", "bind_call", "by_name", "op_name"]

# Names that torch takes from NumPy, besides its own.
_RENAMED = {"axis": "dim", "keepdims": "keepdim", "x": "input", "x1": "input", "x2": "other"}

_CASTS: dict[str, torch.dtype] = {
    **{
        name: getattr(torch, name)
        for name in "float double half bfloat16 long int short bool cfloat cdouble chalf".split()
    },
    "char": torch.int8,
    "byte": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an op; see parameters.py."""

    names: tuple[str, ...]
    is_operand: bool
    is_static_too: bool
    """Whether it is a static argument where it is no tensor."""
    takes_rest: bool


def _read(text: str) -> Parameter:
    plain = text.removesuffix("...")
    return Parameter(
        names=tuple(plain.rstrip("*?").split("|")),
        is_operand=plain[-1] in "*?",
        is_static_too=plain.endswith("?"),
        takes_rest=text.endswith("..."),
    )


_SIGNATURES: dict[str, tuple[Parameter, ...]] = {
    name: tuple(map(_read, parameters.split()))
    for names, parameters in (
        line.split(":") for line in PARAMETERS.strip().replace("\n    ", " ").splitlines()
    )
    for name in names.split()
}
_ONE = (Parameter(("input",), True, False, False),)


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A call with its operands told from its static arguments."""

    operands: tuple[Any, ...]
    """Tensors, and None for a python scalar in an operand's place; absent ones are left out."""
    static: tuple[tuple[str, Any], ...]
    """The other arguments by name, hashable."""


def _is_device_type(name: str) -> bool:
    """Tell whether a method moves to a device, such as Tensor.cpu."""
    if not hasattr(torch.Tensor, name) or name.startswith("_"):
        return False
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


@lru_cache(maxsize=4096)
def op_name(func: Any) -> str:
    """Give the rule-table name of a torch function or method."""
    name = getattr(func, "__name__", str(func)).partition(".")[0]  # torch.ops.aten.mul.Scalar
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    if name in _CASTS or _is_device_type(name):
        return "to"
    if name == "unfold" and getattr(func, "__module__", "") == "torch.nn.functional":
        return "im2col"  # Tensor.unfold is another op
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    base = name.removesuffix("_copy")
    name = base if base in COPIES else name
    return ALIASES.get(name, name)


def _renamed(params: Sequence[Parameter], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace names from NumPy, unless the op has them itself."""
    if not kwargs or _RENAMED.keys().isdisjoint(kwargs):
        return kwargs
    known = {name for param in params for name in param.names}
    return {k if k in known else _RENAMED.get(k, k): value for k, value in kwargs.items()}


def by_name(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Give a call's arguments by the names in the table; those of an unknown op as they come."""
    params = _SIGNATURES.get(name, _ONE)
    left = dict(_renamed(params, kwargs))
    found: dict[str, Any] = {}
    for i, param in enumerate(params):
        if i < len(args):
            found[param.names[0]] = _spread(args[i:]) if param.takes_rest else args[i]
            continue
        for other in param.names:
            if other in left:
                found[param.names[0]] = left.pop(other)
    return {**left, **found}


def bind_call(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundCall:
    """Tell a call's operands, in the order of the op's parameters, from its static arguments."""
    params = _SIGNATURES.get(name)
    if params is None and name != "to":
        return _bind_unnamed(args, kwargs)
    params = params or _ONE
    given = by_name(name, args, kwargs)
    given.pop("self", None)
    if not params[-1].takes_rest:
        given.update({f"arg{i}": value for i, value in enumerate(args) if i >= len(params)})
    operands: list[Any] = []
    for param in params:
        value = given.get(param.names[0])
        is_tensor = isinstance(value, torch.Tensor)
        if not param.is_operand or (param.is_static_too and not is_tensor):
            continue
        given.pop(param.names[0], None)
        if isinstance(value, (list, tuple)):
            operands.extend(value)
        elif value is not None:
            operands.append(value if is_tensor else None)
    static = {key: _hashable(value) for key, value in given.items()}
    if name == "__getitem__":
        static["index"] = _index(args[1], operands)
    if name == "index_put":
        static["has_mask"] = any(
            t.dtype in (torch.bool, torch.uint8) for t in operands[1:-1] if t is not None
        )
    if name == "to":
        static["is_linear"] = _is_linear_cast(func, args, kwargs)
    return BoundCall(tuple(operands), tuple(sorted(static.items())))


def _index(index: Any, operands: list[Any]) -> tuple[Any, ...]:
    """Write an index as the rule reads it, and add its tensors to the operands."""
    entries: list[Any] = []
    for entry in index if isinstance(index, tuple) else (index,):
        if entry is Ellipsis:
            entries.append("...")
        elif isinstance(entry, slice):
            entries.append(("slice", entry.start, entry.stop, entry.step))
        elif isinstance(entry, torch.Tensor) and entry.dtype in (torch.int64, torch.int32):
            operands.append(entry)
            entries.append("tensor")
        elif isinstance(entry, list) and entry and all(type(one) is int for one in entry):
            entries.append(("list", len(entry)))
        elif entry is None or type(entry) is int:
            entries.append(entry)
        else:
            entries.append("other")
    return tuple(entries)


def _bind_unnamed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundCall:
    """Bind an op that is not in the table: every tensor is an operand, in the order of the call."""
    operands: list[Any] = []
    static: dict[str, Any] = {}
    named = [(f"arg{i}", value) for i, value in enumerate(args)]
    for name, value in [*named, *kwargs.items()]:
        values = value if isinstance(value, (list, tuple)) else (value,)
        if values and all(isinstance(v, torch.Tensor) for v in values):
            operands.extend(values)
        elif value is not None:
            static[_RENAMED.get(name, name)] = _hashable(value)
    return BoundCall(tuple(operands), tuple(sorted(static.items())))


def _spread(values: Sequence[Any]) -> Any:
    """Read `f(x, 2, 3)` and `f(x, (2, 3))` alike."""
    is_one = len(values) == 1 and isinstance(values[0], (list, tuple))
    return values[0] if is_one else tuple(values)


def _hashable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [value]  # a call with a tensor where the rule sees none cannot be a key
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    return value


def _is_linear_cast(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a sum of casts is the cast of the sum: to floating and no fewer bytes."""
    named = _CASTS.get(getattr(func, "__name__", ""))
    targets = [named, *args[1:], *kwargs.values()]
    if func.__name__ == "type" and any(isinstance(t, str) for t in targets):
        return False  # the name of a type: not worth reading
    dtypes = [t if isinstance(t, torch.dtype) else None for t in targets]
    dtypes += [t.dtype for t in targets if isinstance(t, torch.Tensor)]
    size = getattr(args[0], "dtype", torch.float64).itemsize if args else 8
    return all(
        d is None or ((d.is_floating_point or d.is_complex) and d.itemsize >= size) for d in dtypes
    )
