# SPDX-License-Identifier: Apache-2.0
"""In-place ops and list ops (`_foreach_*`, `_fused_*`) on DTensors, as optimizers use them.

The target's layout is fixed, so the other operands come to it. An op that would have to move the
target, lose a write to a view, or cannot be done on shards, is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.moves import move
from hyper_parallel.errors import LayoutError, RuleError, describe

__all__ = ["is_in_place", "list_op", "run"]

# Element by element, so they may run on shards of one layout.
_POINTWISE = frozenset(
    "abs add addcdiv addcmul ceil clamp clamp_min clamp_max clip copy cos cosh div divide erf exp expm1"
    " fill floor float_power frac lerp log log1p masked_fill maximum minimum mul multiply neg negative"
    " pow reciprocal relu round rsqrt sigmoid sign sin sqrt square sub subtract tanh true_divide trunc"
    " zero nan_to_num logical_and logical_or logical_not".split()
)
# On a pending sum only these, with scalars or equal pending sums, keep their meaning.
_LINEAR = frozenset("zero neg negative".split())
_SCALING = frozenset("mul multiply div divide true_divide".split())
_ADDING = frozenset("add sub subtract copy".split())
_FUSED = frozenset(
    "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"
    " _amp_foreach_non_finite_check_and_unscale_".split()
)


def is_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    """Tell whether a call writes into one of its arguments."""
    if kwargs.get("out") is not None or name == "__setitem__":
        return True
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__index__", "__int__", "__invert__")
    return name.endswith("_") and not name.endswith("__")


def run(cls: type[Any], func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one in-place op on its target's local part.

    Returns:
        The target.

    Communicates:
        What brings the other operands to the target's layout.

    Raises:
        LayoutError: the target is plain, the write would be lost, or a gradient would be.
        RuleError: the op cannot run on shards in place.
    """
    base = name.rstrip("_") if not name.startswith("__") else name
    target = args[0]
    where = f"DTensor op {name!r}"
    if kwargs.get("out") is not None or not isinstance(target, cls):
        raise LayoutError(
            describe(where, "the target must be a DTensor, without out=", "Assign the result")
        )
    if base not in _POINTWISE:
        raise RuleError(
            describe(
                where,
                "an in-place op on a DTensor must be pointwise and not random",
                "Use the op that is not in-place, or write to the local part with to_local()",
                layout=target._layout,
            )
        )
    _refuse_gradient(where, [a for a in args if isinstance(a, torch.Tensor)])
    if target._layout.has_partial and not _allowed_on_pending(cls, base, target, args[1:]):
        raise RuleError(
            describe(
                where,
                "the target must not be a pending reduction",
                "Redistribute it to Replicate first",
                layout=target._layout,
            )
        )
    others = [_operand(cls, where, target, value) for value in args[1:]]
    named = {k: _operand(cls, where, target, v) for k, v in kwargs.items()}
    func(target._local, *others, **named)
    return target


def _refuse_gradient(where: str, tensors: list[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise LayoutError(
            describe(
                where,
                "an in-place op on DTensors must not need a gradient",
                "Use the op that is not in-place, or torch.no_grad()",
            )
        )


def _allowed_on_pending(cls: type[Any], base: str, target: Any, others: tuple[Any, ...]) -> bool:
    tensors = [o for o in others if isinstance(o, torch.Tensor)]
    if base in _LINEAR:
        return True
    if base in _SCALING:
        return all(t.ndim == 0 and not isinstance(t, cls) for t in tensors)
    same = [t for t in tensors if isinstance(t, cls) and t._layout == target._layout]  # type: ignore[attr-defined]
    return base in _ADDING and len(same) == len(others) == 1


def _operand(cls: type[Any], where: str, target: Any, value: Any) -> Any:
    """Bring one operand to the target's layout."""
    if not isinstance(value, torch.Tensor):
        return value
    layout: Layout = target._layout
    if isinstance(value, cls):
        if value.ndim == 0 and not value._layout.has_partial:  # type: ignore[attr-defined]
            return value._local  # type: ignore[attr-defined]
        if value.shape == target.shape:
            return move(value._local, value._layout, layout)  # type: ignore[attr-defined]
    elif value.ndim == 0:
        return value
    elif tuple(value.shape) == layout.shape and not layout.has_partial:
        # A plain full tensor, as load_state_dict copies in: every rank takes its own part.
        return value[layout.slices(layout.mesh.get_rank())]  # type: ignore[attr-defined]
    if layout.is_replicated and isinstance(value, cls):
        whole = value._layout.with_placements(layout.placements)  # type: ignore[attr-defined]
        return move(value._local, value._layout, whole)  # type: ignore[attr-defined]
    raise LayoutError(
        describe(
            where,
            f"every operand must have the target's global shape {layout.shape}",
            "Expand and distribute it first",
            shape=tuple(value.shape),
            operand=type(value).__name__,
        )
    )


def list_op(
    cls: type[Any], func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a pointwise op over lists of tensors, DTensors and plain ones mixed, on local parts.

    Communicates:
        What brings operands to the layout of the tensor at the same place in the first list.

    Raises:
        RuleError: not pointwise, or a pending reduction among the operands.
    """
    base = name.removeprefix("_foreach_").rstrip("_")
    if name not in _FUSED and base not in _POINTWISE:
        raise RuleError(
            describe(
                f"DTensor op {name!r}",
                "a list op on DTensors must be pointwise",
                "Call the op on each tensor (for norms: hyper_parallel.clip_grad_norm_)",
            )
        )
    first: list[Any] = list(args[0])
    layouts = [t._layout if isinstance(t, cls) else None for t in first]
    if any(layout is not None and layout.has_partial for layout in layouts):
        raise RuleError(
            describe(
                f"DTensor op {name!r}",
                "operands must not be pending reductions",
                "Redistribute them to Replicate first",
            )
        )
    local_args = [_local_list(cls, arg, layouts) for arg in args]
    local_kwargs = {key: _local_list(cls, arg, layouts) for key, arg in kwargs.items()}
    result = func(*local_args, **local_kwargs)
    if name.endswith("_") or result is None:
        return args[0] if result is not None else None
    return type(result)(
        value if layout is None else cls(value, layout)
        for value, layout in zip(result, layouts, strict=True)
    )


def _local_list(cls: type[Any], values: Any, layouts: list[Layout | None]) -> Any:
    if not isinstance(values, (list, tuple)):
        return values._local if isinstance(values, cls) else values
    return [
        move(v._local, v._layout, layout or v._layout) if isinstance(v, cls) else v
        for v, layout in zip(values, layouts, strict=False)
    ] + list(values[len(layouts) :])
