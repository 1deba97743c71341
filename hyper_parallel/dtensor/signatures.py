# SPDX-License-Identifier: Apache-2.0
"""What a torch function is called in the rule tables, and the names of its parameters.

Torch's builtins have no Python signature, so positional arguments are named from this table. A
name with `*` is an operand (a tensor, a list of tensors, or a scalar in its place), `dim...` takes
all remaining positional arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BoundCall", "bind_call", "op_name"]

_TABLE = """
linear: input* weight* bias*
matmul mm bmm mv dot outer: input* other*
addmm baddbmm: input* batch1* batch2*
layer_norm: input* normalized_shape weight* bias* eps
rms_norm: input* normalized_shape weight* eps
softmax log_softmax: input* dim _stacklevel dtype
sum mean amax amin prod logsumexp argmax argmin: input* dim keepdim
var std: input* dim unbiased keepdim
vector_norm: input* ord dim keepdim
cumsum cumprod: input* dim
topk: input* k dim largest sorted
sort argsort: input* dim descending
unbind: input* dim
narrow: input* dim start length
select: input* dim index
flip: input* dims...
roll: input* shifts dims
index_select: input* dim index*
gather: input* dim index*
transpose: input* dim0 dim1
t: input*
permute: input* dims...
view reshape: input* shape...
expand: input* sizes...
flatten: input* start_dim end_dim
unflatten: input* dim sizes
unsqueeze squeeze: input* dim
cat stack: tensors* dim
split: input* split_size dim
chunk: input* chunks dim
embedding: input* weight* padding_idx max_norm norm_type scale_grad_by_freq sparse
scaled_dot_product_attention: query* key* value* attn_mask* dropout_p is_causal scale enable_gqa
cross_entropy nll_loss: input* target* weight* size_average ignore_index reduce reduction
where: condition* input* other*
lerp: input* end* weight*
addcmul addcdiv: input* tensor1* tensor2*
add sub mul maximum minimum eq ne lt le gt ge fmod remainder: input* other*
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor: input* other*
atan2 floor_divide: input* other*
div: input* other* rounding_mode
pow: input* exponent*
masked_fill: input* mask* value
dropout alpha_dropout dropout1d dropout2d dropout3d: input* p training inplace
clamp: input* min max
gelu: input* approximate
elu leaky_relu hardtanh softplus: input* first second third
"""

_ALIASES = {
    "__eq__": "eq",
    "__ne__": "ne",
    "__lt__": "lt",
    "__le__": "le",
    "__gt__": "gt",
    "__ge__": "ge",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__invert__": "bitwise_not",
    "__rsub__": "sub",
    "__rmul__": "mul",
    "__radd__": "add",
    "__rdiv__": "reciprocal",
    "__rtruediv__": "reciprocal",
    "__rpow__": "exp2",
    "__matmul__": "matmul",
    "__floordiv__": "floor_divide",
    "__rfloordiv__": "floor_divide",
    "__mod__": "remainder",
    "__rmod__": "remainder",
    "rsub": "sub",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "log_sigmoid": "logsigmoid",
    "linalg_vector_norm": "vector_norm",
    "concat": "cat",
    "concatenate": "cat",
    "type": "to",
    "T": "t",
}

# Names that torch takes from NumPy, besides its own.
_RENAMED = {"axis": "dim", "keepdims": "keepdim", "x": "input", "x1": "input", "x2": "other"}

_CASTS: dict[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}

_SIGNATURES: dict[str, tuple[str, ...]] = {
    name: tuple(params.split())
    for names, params in (line.split(":") for line in _TABLE.strip().splitlines())
    for name in names.split()
}


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A call with its operands told from its static arguments."""

    operands: tuple[Any, ...]
    """Tensors, and None for a python scalar in an operand's place; absent ones are left out."""
    static: tuple[tuple[str, Any], ...]
    """The other arguments by name, hashable."""


def op_name(func: Any) -> str:
    """Give the rule-table name of a torch function or method."""
    name = getattr(func, "__name__", str(func)).partition(".")[0]  # torch.ops.aten.mul.Scalar
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    if name in _CASTS:
        return "to"
    return _ALIASES.get(name, name)


def bind_call(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundCall:
    """Name a call's arguments.

    Args:
        name: the op's name from `op_name`.
        func: the torch function, which tells the target of a cast.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        Operands in the order of the op's parameters, and static arguments.
    """
    params = _SIGNATURES.get(name)
    if params is None and name != "to":
        return _bind_unnamed(args, kwargs)
    params = params or ("input*",)
    if kwargs and not _RENAMED.keys().isdisjoint(kwargs):
        kwargs = {_RENAMED.get(key, key): value for key, value in kwargs.items()}
    operands: list[Any] = []
    static: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for i, param in enumerate(params):
        if param.endswith("..."):
            given[param] = _spread(args[i:]) if len(args) > i else kwargs.get(param[:-3])
        elif i < len(args):
            given[param] = args[i]
        elif (plain := param.rstrip("*")) in kwargs:
            given[param] = kwargs[plain]
    for i, value in enumerate(args[len(params) :]):
        if not params[-1].endswith("..."):
            static[f"arg{i}"] = _hashable(value)
    known = {param.rstrip("*.") for param in params}
    static.update({k: _hashable(v) for k, v in kwargs.items() if k not in known and k != "self"})
    for param, value in given.items():
        if not param.endswith("*"):
            static[param.rstrip(".")] = _hashable(value)
        elif isinstance(value, (list, tuple)):
            operands.extend(value)
        elif isinstance(value, torch.Tensor):
            operands.append(value)
        elif value is not None:
            operands.append(None)
    if name in ("flip", "roll"):  # their rules know one dim
        dims = static.pop("dims", ())
        static["dim"] = dims[0] if isinstance(dims, tuple) and len(dims) == 1 else dims
    if name == "to":
        static["is_floating"] = _is_floating_cast(func, args, kwargs)
    return BoundCall(tuple(operands), tuple(sorted(static.items())))


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
    return values[0] if len(values) == 1 and not isinstance(values[0], int) else tuple(values)


def _hashable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [value]  # a call with a tensor where the rule sees none cannot be a key
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    return value


def _is_floating_cast(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    named = _CASTS.get(getattr(func, "__name__", ""))
    targets = [named, *args[1:], *kwargs.values()]
    if func.__name__ == "type" and any(isinstance(t, str) for t in targets):
        return False  # the name of a type: not worth reading
    dtypes = [t if isinstance(t, torch.dtype) else None for t in targets]
    dtypes += [t.dtype for t in targets if isinstance(t, torch.Tensor)]
    return all(d is None or d.is_floating_point or d.is_complex for d in dtypes)
