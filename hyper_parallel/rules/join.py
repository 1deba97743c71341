# SPDX-License-Identifier: Apache-2.0
"""Rules of joining, splitting and slicing: the dim that is worked on is whole."""

from __future__ import annotations

from functools import partial

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Argument, Call, Rule, alike, letters, refuse, spec

__all__ = ["RULES"]


def cat(call: Call, dim: int | None = None) -> OpRule:
    """Join along dim `dim`; an empty vector among the operands is nothing."""
    dim = call.dim("dim", 0) if dim is None else dim
    ndims = {len(shape) for shape in call.shapes if shape is not None}
    if len(ndims) > 1:
        raise refuse("cat", "all tensors must have as many dims", shapes=call.shapes)
    names = spec(len(call.shape), (dim,))
    known = [shape[dim] for shape in call.shapes if shape is not None]
    result = [f"_={sum(known)}" if name == "_" else name for name in names]
    return parse_rule(_joined(names, len(call.shapes), result), linear=True)


def stack(call: Call, dim: int | None = None) -> OpRule:
    """Join along a new dim `dim`, which is whole."""
    dim = call.dim("dim", 0, extra=1) if dim is None else dim
    names = letters(len(call.shape))
    result = [*names[:dim], f"_={len(call.shapes)}", *names[dim:]]
    return parse_rule(_joined(names, len(call.shapes), result), linear=True)


def _joined(operand: list[str], count: int, result: list[str]) -> str:
    return f"{' + '.join([' '.join(operand)] * count)} -> {' '.join(result)}"


def stack_along(dim: int, call: Call) -> OpRule:
    """Join along dim `dim`; tensors that lack the dim are stacked on it (hstack and its like)."""
    ndim = len(call.shape)
    if ndim <= 1 and dim == 1:  # hstack joins vectors
        return cat(call, 0) if ndim else stack(call, 0)
    if ndim > dim and (ndim > 1 or dim):
        return cat(call, dim)
    if ndim == 2 and dim == 2:
        return stack(call, 2)
    if ndim == 1 and dim == 0:
        return stack(call, 0)
    raise refuse("stack", "the tensors must have more dims", shapes=call.shapes)


def column_stack(call: Call) -> OpRule:
    """Join columns; vectors are columns."""
    return stack(call, 1) if len(call.shape) == 1 else cat(call, 1)


def meshgrid(call: Call) -> OpRule:
    """Spread vectors over one grid, a dim for each."""
    names = letters(len(call.shapes))
    given = [name if shape else "" for name, shape in zip(names, call.shapes, strict=True)]
    dims = [name or "1" for name in given]
    if call.get("indexing") == "xy" and len(names) > 1:
        dims[:2] = dims[1], dims[0]
    return parse_rule(f"{', '.join(given)} -> {', '.join([' '.join(dims)] * len(names))}")


def _sizes(call: Call, size: int) -> list[int]:
    """Read how a dim of `size` is split: a size, sizes, a number of chunks, or places."""
    asked = call.get("split_size")
    if isinstance(asked, tuple):
        return list(call.numbers("split_size") or ())
    if (places := call.get("indices_or_sections")) is not None:
        return _between(places, size)
    chunks = call.number("chunks", 0)
    step = max(asked if isinstance(asked, int) else -(-size // max(chunks, 1)), 1)
    return [min(step, size - start) for start in range(0, size, step)] or [0]


def _between(places: Argument, size: int) -> list[int]:
    if isinstance(places, int):
        short, longer = divmod(size, places)
        return [short + (i < longer) for i in range(places)]
    if not isinstance(places, tuple):
        raise refuse("tensor_split", "places must be ints", places=places)
    cuts = [slice(None, place).indices(size)[1] for place in places if isinstance(place, int)]
    return [max(b - a, 0) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


def pieces(dim: int | None, call: Call) -> OpRule:
    """Take dim `dim`, which is whole, apart."""
    dim = call.dim("dim", 0) if dim is None else dim
    if dim == 1 and len(call.shape) == 1:  # hsplit of a vector
        dim = 0
    if dim >= len(call.shape):
        raise refuse("split", "the tensor must have the dim", shape=call.shape, dim=dim)
    names = spec(len(call.shape), (dim,))
    results = [
        " ".join(f"_={n}" if name == "_" else name for name in names)
        for n in _sizes(call, call.shape[dim])
    ]
    return parse_rule(f"{' '.join(names)} -> {', '.join(results)}", linear=True)


def unbind(call: Call) -> OpRule:
    """Take dim `dim`, which is whole, apart in rows."""
    dim = call.dim("dim", 0)
    names = spec(len(call.shape), (dim,))
    row = " ".join(name for name in names if name != "_")
    results = ", ".join([row] * call.shape[dim])
    return parse_rule(f"{' '.join(names)} -> {results}", linear=True)


def along(name: str, call: Call, default: tuple[int, ...] | None = None) -> OpRule:
    """Take part of, or reorder, dims `name`, which are whole; all dims where none is given."""
    return alike(spec(len(call.shape), call.dims(name, default)), linear=True)


def narrow(call: Call) -> OpRule:
    """Take part of dim `dim`; a part that is all of it may be cut."""
    dim = call.dim("dim", 0)
    is_all = call.get("length") == call.shape[dim]
    names = spec(len(call.shape), () if is_all else (dim,))
    return alike(names, linear=True, local=("length",) if is_all else ())


def scattered(is_kept: bool, call: Call) -> OpRule:
    """Write a tensor into part of dim `dim`, which is whole, of a copy of another."""
    dim = call.dim("dim", 0)
    names = spec(len(call.shape), (dim,))
    part = names if is_kept else [name for name in names if name != "_"]
    text = f"{' '.join(names)} + {' '.join(part)} -> {' '.join(names)}"
    return parse_rule(text, linear=True)


RULES: dict[str, Rule] = {
    "cat": cat,
    "stack": stack,
    "vstack": partial(stack_along, 0),
    "hstack": partial(stack_along, 1),
    "dstack": partial(stack_along, 2),
    "column_stack": column_stack,
    "meshgrid": meshgrid,
    **dict.fromkeys("split chunk tensor_split".split(), partial(pieces, None)),
    "vsplit": partial(pieces, 0),
    "hsplit": partial(pieces, 1),
    "dsplit": partial(pieces, 2),
    "unbind": unbind,
    "narrow": narrow,
    "flip": partial(along, "dims"),
    "roll": partial(along, "dims"),
    "fliplr": parse_rule("a _ ... -> a _ ...", linear=True),
    "flipud": parse_rule("_ ... -> _ ...", linear=True),
    "rot90": partial(along, "dims", default=(0, 1)),
    "select_scatter": partial(scattered, False),
    "slice_scatter": partial(scattered, True),
}
