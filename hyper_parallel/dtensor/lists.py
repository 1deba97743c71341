# SPDX-License-Identifier: Apache-2.0
"""List ops (`_foreach_*`, `_fused_*`) on DTensors and plain tensors, as optimizers use them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.implicit import counts_as_replicated, replicated
from hyper_parallel.dtensor.inplace import (
    brought,
    is_pointwise,
    refuse_gradient,
    refuse_lost_write,
)
from hyper_parallel.dtensor.read import whole_of
from hyper_parallel.dtensor.wrapping import wrap
from hyper_parallel.errors import LayoutError, RuleError
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.rows import reduce

__all__ = ["list_op"]

# These write into other lists than the first, too.
_FUSED = frozenset(
    "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"
    " _amp_foreach_non_finite_check_and_unscale_".split()
)
_NUMBERS = frozenset((int, float))
# Reductions of each tensor.
_ONE_BY_ONE = {"_foreach_norm": torch.linalg.vector_norm, "_foreach_max": torch.max}


def list_op(
    cls: type[Any], func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a pointwise op over lists of tensors, DTensors and plain ones mixed, on local parts.

    Communicates:
        What brings operands to the layout of the tensor at the same place in the first list.

    Raises:
        RuleError: not pointwise, or a pending reduction among the operands.
    """
    if name in _ONE_BY_ONE:
        one = _ONE_BY_ONE[name]
        return tuple(one(tensor, *args[1:], **kwargs) for tensor in args[0])
    if type(args[0]) in _NUMBERS:  # _foreach_pow(number, tensors)
        return tuple(torch.pow(args[0], tensor, **kwargs) for tensor in args[1])
    _refuse_name(name)
    first: Sequence[Any] = args[0]
    layouts = _layouts_of(cls, first)
    for layout in layouts:
        if layout is not None and layout.has_partial:
            raise RuleError(
                f"DTensor op {name!r}",
                "operands must not be pending reductions",
                "Redistribute them to Replicate first",
            )
    is_in_place = name.endswith("_")
    _refuse_writes(name, args, is_in_place)
    local_args = [_local_list(cls, name, arg, layouts) for arg in args[1:]]
    if kwargs:
        kwargs = {k: _local_list(cls, name, v, layouts) for k, v in kwargs.items()}
    result = func(_locals_of(first), *local_args, **kwargs)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        _share_found(layouts, args[1])
    if is_in_place or result is None:
        return args[0] if result is not None else None
    return type(result)(
        [
            value if layout is None else wrap(cls, value, layout)
            for value, layout in zip(result, layouts, strict=True)
        ]
    )


def _layouts_of(cls: type[Any], values: Sequence[Any]) -> list[Layout | None]:
    """Give each tensor's layout; None for what is plain."""
    try:
        return [v._layout for v in values]
    except AttributeError:
        return [v._layout if isinstance(v, cls) else None for v in values]  # type: ignore[attr-defined]


def _locals_of(values: Sequence[Any]) -> list[torch.Tensor]:
    try:
        return [v._local for v in values]
    except AttributeError:  # some are plain
        return [getattr(v, "_local", v) for v in values]


@functools.cache
def _refuse_name(name: str) -> None:
    if name not in _FUSED and not is_pointwise(name.removeprefix("_foreach_").rstrip("_")):
        raise RuleError(
            f"DTensor op {name!r}",
            "a list op on DTensors must be pointwise",
            "Call the op on each tensor (for norms: hyper_parallel.clip_grad_norm_)",
        )


def _refuse_writes(name: str, args: tuple[Any, ...], is_in_place: bool) -> None:
    """Refuse what autograd would have to know of, and writes that would be lost."""
    if torch.is_grad_enabled():
        values = [v for arg in args for v in _as_list(arg)]
        refuse_gradient(f"DTensor op {name!r}", values)
    if is_in_place:
        for target in args[0]:
            if getattr(target, "_write_is_lost", False):
                refuse_lost_write(f"DTensor op {name!r}", target)


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _local_list(cls: type[Any], name: str, values: Any, layouts: list[Layout | None]) -> Any:
    """Bring a list of operands to the layouts of the first list; a single operand to all."""
    if not isinstance(values, (list, tuple)):
        return whole_of(cls, values)
    if values and type(values[0]) in _NUMBERS and _NUMBERS.issuperset(map(type, values)):
        return values
    if _layouts_of(cls, values) == layouts:  # as in an optimizer's step: nothing to be moved
        return _locals_of(values)
    if len(values) != len(layouts):  # torch refuses it, unless it is empty
        layouts = [None] * len(values)
    return [_list_operand(cls, name, v, layout) for v, layout in zip(values, layouts, strict=True)]


def _list_operand(cls: type[Any], name: str, value: Any, layout: Layout | None) -> Any:
    is_fused = name in _FUSED
    if layout is not None and counts_as_replicated(cls, value) and value.ndim:
        value = replicated(cls, value, layout.mesh)
    if isinstance(value, cls):
        if value.ndim == 0 and (layout is None or layout.shape != ()):
            return whole_of(cls, value)
        if layout is not None and not (is_fused and value._layout != layout):
            part = brought(f"DTensor op {name!r}", value, layout)
            if part is not None:
                return part
    elif layout is None or not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    raise LayoutError(
        f"DTensor op {name!r}",
        "tensors at the same place of all lists must be DTensors of one shape"
        + (" and layout" if is_fused else " (or broadcast to the first)")
        + ", or all be plain",
        "Distribute the plain ones, or call the op on each tensor",
        first=layout,
        other=getattr(value, "_layout", None) or tuple(value.shape),
    )


def _share_found(layouts: list[Layout | None], found: torch.Tensor) -> None:
    """Tell every rank that holds a part of some gradient whether any part is infinite."""
    axes = dict.fromkeys(
        (layout.mesh, axis)
        for layout in layouts
        if layout is not None
        for axis, placement in enumerate(layout.placements)
        if placement.cut_dim is not None and layout.mesh.shape[axis] > 1
    )
    # Of one rank set in the order of the list, which all its ranks have.
    for mesh, axis in sorted(axes, key=lambda entry: (entry[0].ranks, entry[1])):
        assert isinstance(mesh, DeviceMesh)  # noqa: S101
        if mesh.get_coordinate() is not None:
            found.copy_(reduce(mesh, axis, found.reshape(1).clone(), "max").reshape(found.shape))
