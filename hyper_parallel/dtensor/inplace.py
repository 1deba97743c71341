# SPDX-License-Identifier: Apache-2.0
"""In-place ops on DTensors, and `out=`.

The target's layout is fixed, so the other operands of an element-wise op come to it. Any other op
runs as the op that is not in-place, and what it gives is copied into the target. An op that would
change the target's shape or layout, or lose a write to a view, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hyper_parallel.core import Layout, Placement, Replicate
from hyper_parallel.dtensor import setitem
from hyper_parallel.dtensor.implicit import counts_as_replicated, plain_operand, replicated
from hyper_parallel.dtensor.local_op import graph_part, redistributed
from hyper_parallel.dtensor.moves import move
from hyper_parallel.dtensor.parameters import ALIASES
from hyper_parallel.dtensor.random import FILLS, fill
from hyper_parallel.dtensor.read import refuse_other_meshes, whole_of
from hyper_parallel.dtensor.result_shapes import on_meta
from hyper_parallel.dtensor.wrapping import is_tied
from hyper_parallel.errors import LayoutError, RuleError
from hyper_parallel.rules.pointwise import ELEMENTWISE

__all__ = ["brought", "is_in_place", "is_pointwise", "refuse_gradient", "refuse_lost_write", "run"]

_OPERATORS = {
    "__iadd__": "add",
    "__isub__": "sub",
    "__imul__": "mul",
    "__idiv__": "div",
    "__itruediv__": "div",
    "__ifloordiv__": "floor_divide",
    "__imod__": "remainder",
    "__ipow__": "pow",
}
# These change what a tensor is, not its values.
_RESHAPING = frozenset("as_strided rename resize resize_as set".split())
# On a pending sum only these, with scalars or equal pending sums, keep their meaning.
_LINEAR = frozenset("zero neg negative".split())
_SCALING = frozenset("mul multiply div divide true_divide".split())
_ADDING = frozenset("add sub subtract copy".split())


def is_in_place(name: str) -> bool:
    """Tell whether an op of this name writes into its first argument."""
    if name == "__setitem__":
        return True
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__index__", "__int__", "__invert__")
    return name.endswith("_") and not name.endswith("__")


def is_pointwise(base: str) -> bool:
    """Tell whether an op, named without its `_`, works element by element."""
    return base in ("copy", "zero") or ALIASES.get(base, base) in ELEMENTWISE


def run(cls: type[Any], func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one in-place op on its target's local part, and give the target.

    Communicates:
        What brings the other operands to the target's layout.

    Raises:
        LayoutError: the target is plain, the write would be lost, or a gradient would be.
        RuleError: the op cannot run on shards in place.
    """
    where = f"DTensor op {name!r}"
    target, others, named = _split_target(args, kwargs)
    if "out" not in kwargs and _is_scaled(cls, target, (*others, *named.values())):
        refuse_gradient(where, [target, *others, *named.values()])
        named = {key: whole_of(cls, value) for key, value in named.items()}
        return func(target, *[whole_of(cls, value) for value in others], **named)
    for one in target if type(target) in (list, tuple) else (target,):
        _refuse_target(cls, where, one)
    base = _OPERATORS.get(name, name.rstrip("_"))
    operands = (*others, *named.values())
    is_recorded = "out" not in kwargs and _is_recordable(cls, base, target)
    if not is_recorded and getattr(func, "__module__", "") != "torch.nn.init":
        refuse_gradient(where, [target, *operands])  # torch.nn.init turns gradients off itself
    if base in FILLS and kwargs.get("out") is None:
        fill(func, target, others, named)
        return target
    if name == "__setitem__":
        return setitem.run(cls, target, *others)
    if not (
        is_recorded or (is_pointwise(base) and _runs_on_parts(cls, where, base, target, operands))
    ):
        return _by_way_of_result(cls, func, name, args, kwargs)
    if not is_recorded and target._layout.mesh.get_coordinate() is None:
        return target
    part = partial(_operand, cls, where, target, base == "copy", is_recorded)
    local_others, local_named = map(part, others), {k: part(v) for k, v in named.items()}
    if "out" in kwargs:
        func(*local_others, **local_named, out=target._local)
    elif is_recorded:  # torch tells aliases and views, and finds what was saved for backward
        func(target._graph, *local_others, **local_named)
    else:
        func(target._local, *local_others, **local_named)
    return target


def _is_scaled(cls: type[Any], target: Any, operands: Sequence[Any]) -> bool:
    """Tell whether a plain tensor meets no DTensors but numbers, such as a norm to clip with."""
    return (
        isinstance(target, torch.Tensor)
        and not isinstance(target, cls)
        and not any(isinstance(o, cls) and o.ndim for o in operands)  # type: ignore[attr-defined]
    )


def _runs_on_parts(
    cls: type[Any], where: str, base: str, target: Any, operands: tuple[Any, ...]
) -> bool:
    """Tell whether an element-wise op may run on the target's local part."""
    if not isinstance(target, cls):
        return False  # several results
    layout = target._layout  # type: ignore[attr-defined]
    if layout.has_partial:
        return _allowed_on_pending(cls, base, target, operands)
    others = [o._layout for o in operands if isinstance(o, cls)]  # type: ignore[attr-defined]
    for lies in others:
        if lies is layout:
            continue
        refuse_other_meshes(where, (layout.mesh, lies.mesh))
        if _broadcast(lies, layout) is None:
            return False
    return True


def _is_recordable(cls: type[Any], base: str, target: Any) -> bool:
    """Tell whether autograd can know of the change: that of the plain result of an op.

    See [Note: above autograd].
    """
    return (
        torch.is_grad_enabled()
        and isinstance(target, cls)
        and target._graph is not None  # type: ignore[attr-defined]
        and is_pointwise(base)
        and not target._layout.has_partial  # type: ignore[attr-defined]
        and not is_tied(target._graph)  # type: ignore[attr-defined]
    )


def _by_way_of_result(
    cls: type[Any], func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the op that is not in-place, and copy what it gives into the target."""
    target, others, named = _split_target(args, kwargs)
    base = _OPERATORS.get(name, name.rstrip("_"))
    plain = func if kwargs.get("out") is not None else getattr(torch.Tensor, base, None)
    on_meta(func, args, kwargs)  # refuses what torch refuses, such as a wrong dtype
    if named.pop("inplace", False):
        result: Any = func(target, *others, **named)
    elif base == "copy":
        result = others[0].expand(target.shape)
    elif base == "fill":
        result = torch.fill(target, *others, **named)
    elif plain is None or base in _RESHAPING:
        raise RuleError(
            f"DTensor op {name!r}",
            "an in-place op on a DTensor must keep its shape, and exist not in-place",
            "Use another op, or write to the local part with to_local()",
            layout=target._layout,
        )
    elif plain is func:
        result = func(*others, **named)
    else:
        result = plain(target, *others, **named)
    pairs = [(target, result)] if isinstance(target, cls) else zip(target, result, strict=True)
    for written, value in pairs:
        if value.shape != written.shape:
            raise LayoutError(
                f"DTensor op {name!r}",
                f"the tensor that is written to must have the result's shape {value.shape}",
                "Pass one of that shape; a DTensor is not resized",
                shape=written.shape,
            )
        layout = written._layout
        if layout.mesh.get_coordinate() is not None:
            lies = getattr(value, "_layout", layout.replicated)
            written._local.copy_(move(getattr(value, "_local", value).detach(), lies, layout))
    return target


def _split_target(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Tell what is written to (`out=`, or the first) from the other arguments."""
    if kwargs.get("out") is not None:
        return kwargs["out"], args, {k: v for k, v in kwargs.items() if k != "out"}
    if args:
        return args[0], args[1:], kwargs
    # torch.nn.init calls with keywords only.
    name = next((key for key in ("tensor", "input", "self") if key in kwargs), None)
    return kwargs.get(name or ""), (), {k: v for k, v in kwargs.items() if k != name}


def _refuse_target(cls: type[Any], where: str, target: Any) -> None:
    if not isinstance(target, cls):
        raise LayoutError(
            where,
            "the tensor that is written to must be a DTensor, as another operand is",
            "Assign the result of the op that is not in-place, or work on to_local()",
            target=type(target).__name__,
        )
    refuse_lost_write(where, target)


def refuse_lost_write(where: str, target: Any) -> None:
    """Refuse to write into a view of a copy; see [Note: lost writes] in views.py."""
    if target._write_is_lost:
        raise LayoutError(
            where,
            "the target must not be a view that was gathered, since the tensor that it is a"
            " view of would not change",
            "Write to the whole tensor, to to_local(), or to a clone() of the view",
            layout=target._layout,
        )


def refuse_gradient(where: str, values: Sequence[Any]) -> None:
    """Refuse an in-place op or a list op that autograd would have to know of."""
    if torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in values):
        raise LayoutError(
            where,
            "an in-place op or a list op on DTensors must not need a gradient",
            "Use the op that is neither, or torch.no_grad(). Recorded are element-wise in-place"
            " ops on results of ops",
        )


def _allowed_on_pending(cls: type[Any], base: str, target: Any, others: tuple[Any, ...]) -> bool:
    tensors = [o for o in others if isinstance(o, torch.Tensor)]
    if base in _LINEAR:
        return True
    if base in _SCALING:
        return all(t.ndim == 0 and not isinstance(t, cls) for t in tensors)
    same = [t for t in tensors if isinstance(t, cls) and t._layout == target._layout]  # type: ignore[attr-defined]
    return base in _ADDING and len(same) == len(others) == 1


def _operand(
    cls: type[Any], where: str, target: Any, is_copy: bool, is_recorded: bool, value: Any
) -> Any:
    """Bring one operand to the target's layout."""
    if not isinstance(value, torch.Tensor):
        return value
    layout: Layout = target._layout
    if isinstance(value, cls):
        own: Layout = value._layout  # type: ignore[attr-defined]
        if is_recorded and (value.requires_grad or (value.ndim and own.shape != layout.shape)):
            refuse_other_meshes(where, (layout.mesh, own.mesh))
            value = value if own.shape == layout.shape else value.expand(layout.shape)
            here = value._layout == layout  # type: ignore[attr-defined]
            return graph_part(value if here else redistributed(value, layout))
        return brought(where, value, layout)
    if value.ndim == 0 and not (is_recorded and value.requires_grad):
        return value
    if value.ndim == 0 or counts_as_replicated(cls, value):
        lifted = replicated(cls, value, layout.mesh)
        return _operand(cls, where, target, is_copy, is_recorded, lifted)
    if not is_copy:
        raise plain_operand(where, value)
    if tuple(value.shape) == layout.shape and not layout.has_partial:
        # A plain full tensor, as load_state_dict copies in: every rank takes its own part.
        return move(value, layout.replicated, layout)
    raise LayoutError(
        where,
        f"every operand must have the target's global shape {layout.shape}",
        "Expand and distribute it first",
        shape=tuple(value.shape),
        operand=type(value).__name__,
    )


def brought(where: str, value: Any, layout: Layout) -> torch.Tensor | None:
    """Give a DTensor's part as it meets one that lies in `layout`; None: its shape does not fit."""
    own: Layout = value._layout
    if own == layout:
        return value._local
    refuse_other_meshes(where, (layout.mesh, own.mesh))
    target = _broadcast(own, layout)
    return None if target is None else move(value._local, own, target)


def _broadcast(own: Layout, layout: Layout) -> Layout | None:
    """Give where an operand must lie to be broadcast to `layout`; None: its shape does not fit."""
    if own.shape == layout.shape:
        return layout
    missing = len(layout.shape) - len(own.shape)
    pairs = zip(own.shape, layout.shape[max(missing, 0) :], strict=False)
    if missing < 0 or any(size not in (1, whole) for size, whole in pairs):
        return None

    def placed(p: Placement) -> Placement:
        cut = p.cut_dim
        if cut is None or cut < missing or own.shape[cut - missing] != layout.shape[cut]:
            return Replicate()
        return replace(p, dim=cut - missing)  # type: ignore[type-var]

    return own.with_placements([placed(p) for p in layout.placements])
