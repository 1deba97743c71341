# SPDX-License-Identifier: Apache-2.0
"""Run a torch op on DTensors: rule -> decision -> moves -> the op on local tensors -> wrap.

[Note: above autograd] The op runs once, on local tensors under grad mode, inside one
autograd.Function whose backward differentiates that local piece. So no backward op needs a rule;
the layouts of the gradients come from the same decision.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.core import Layout, Replicate
from hyper_parallel.core.factor import bind
from hyper_parallel.core.propagate import propagate
from hyper_parallel.dtensor.masked import masked_embedding
from hyper_parallel.dtensor.moves import Redistribute, move, refuse_create_graph
from hyper_parallel.dtensor.signatures import BoundCall, bind_call, op_name
from hyper_parallel.errors import LayoutError, RuleError, describe
from hyper_parallel.rules import Call, find, names

__all__ = ["Spec", "run", "strict_rules"]

_RANDOM = frozenset(
    "dropout alpha_dropout feature_dropout bernoulli multinomial normal rand_like randn_like"
    " randint_like rrelu poisson".split()
)
_DATA_DEPENDENT = frozenset(
    "nonzero masked_select unique unique_consecutive argwhere bincount".split()
)
# These read a value out; gathering is what they ask for, so it is not worth a warning.
_READS = frozenset(
    "item tolist numpy __array__ __bool__ __float__ __int__ __index__ __format__ equal allclose"
    " isclose __contains__ cpu __str__".split()
)

_warned: set[str] = set()
_strict = threading.local()
_specs: dict[Any, Spec] = {}
_MAX_SPECS = 4096


@dataclass(frozen=True, slots=True)
class Spec:
    """A decision on concrete layouts: where operands must be, where results and gradients are."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...] | None  # None: results are whole, shapes as they come
    gradients: tuple[Layout, ...]
    divisors: tuple[int, ...] = ()
    vocab_start: int | None = None  # embedding: the first row this rank holds
    local_shape: tuple[int, ...] | None = None  # view-like: the result's local shape


@contextmanager
def strict_rules() -> Iterator[None]:
    """Within the block an op without a rule is an error, instead of a gather with a warning."""
    before = getattr(_strict, "on", False)
    _strict.on = True
    try:
        yield
    finally:
        _strict.on = before


def run(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one out-of-place op.

    Args:
        cls: the DTensor class.
        func: the torch function.
        args: its arguments; tensors among them are DTensors, or 0-dim plain tensors.
        kwargs: its keyword arguments.

    Returns:
        What the op returns, tensors as DTensors.

    Communicates:
        Forward: what moves operands to where the decision wants them. Backward: the way back,
        and a sum for operands whose local gradients are shares.

    Raises:
        LayoutError: a plain tensor among the operands, or two meshes.
        RuleError: no rule under `strict_rules`, or an op that cannot be gathered.
    """
    name = op_name(func)
    flat, tree = tree_flatten((args, kwargs))
    slots = [i for i, leaf in enumerate(flat) if isinstance(leaf, cls)]
    _refuse_plain(cls, name, flat)
    tensors = [flat[i] for i in slots]
    _one_mesh(name, tensors)
    spec = _spec(cls, name, func, args, kwargs)
    if spec is None:
        spec = _whole(name, tensors)
    moved = [
        t if t._layout == layout else Redistribute.apply(t, layout)
        for t, layout in zip(tensors, spec.inputs, strict=True)
    ]

    def call(locals_: Sequence[torch.Tensor]) -> Any:
        leaves = list(flat)
        for slot, local in zip(slots, locals_, strict=True):
            leaves[slot] = local
        if spec.local_shape is not None:
            return _reshape(name, leaves[slots[0]], spec.local_shape)
        call_args, call_kwargs = tree_unflatten(leaves, tree)
        if spec.vocab_start is not None:
            vocab = spec.inputs[1].shape[0]
            return masked_embedding(
                call_args[0], call_args[1], spec.vocab_start, vocab, *call_args[2:], **call_kwargs
            )
        return func(*call_args, **call_kwargs)

    return _apply(cls, call, spec, moved)


def _reshape(name: str, local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return local.expand(shape) if name == "expand" else local.reshape(shape)


def _apply(
    cls: type[Any],
    call: Callable[[Sequence[torch.Tensor]], Any],
    spec: Spec,
    tensors: list[Any],
) -> Any:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        trees: list[Any] = []
        outs = _LocalOp.apply(partial(_flat, call, trees), spec, *tensors)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return tree_unflatten(list(outs), trees[0])
    result = call([t._local for t in tensors])
    flat, tree = tree_flatten(result)
    mesh_layout = spec.inputs[0]
    return tree_unflatten(_wrap(cls, flat, spec, mesh_layout), tree)


def _flat(call: Callable[..., Any], trees: list[Any], locals_: Sequence[torch.Tensor]) -> list[Any]:
    flat, tree = tree_flatten(call(locals_))
    trees.append(tree)
    return flat


def _wrap(cls: type[Any], flat: list[Any], spec: Spec, like: Layout) -> list[Any]:
    wrapped: list[Any] = []
    for i, value in enumerate(flat):
        if not isinstance(value, torch.Tensor):
            wrapped.append(value)
        elif spec.outputs is None:
            whole = Layout(like.mesh, (Replicate(),) * like.mesh.ndim, tuple(value.shape))
            wrapped.append(cls(value, whole))
        else:
            wrapped.append(cls(value, spec.outputs[i]))
    return wrapped


class _LocalOp(torch.autograd.Function):
    """One op on local tensors; see [Note: above autograd]."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., list[Any]], spec: Spec, *tensors: Any) -> Any:
        needs = ctx.needs_input_grad[2:]
        leaves = [
            t._local.detach().requires_grad_() if need else t._local
            for t, need in zip(tensors, needs, strict=True)
        ]
        with torch.enable_grad():
            outs = call(leaves)
        ctx.cls, ctx.spec = type(tensors[0]), spec
        ctx.to_leaf = [t.is_leaf for t in tensors]
        ctx.inner = (leaves, outs)
        ctx.set_materialize_grads(False)
        plain = [o.detach() if isinstance(o, torch.Tensor) else o for o in outs]
        wrapped = _wrap(ctx.cls, plain, spec, spec.inputs[0])
        ctx.layouts = [w._layout if isinstance(w, ctx.cls) else None for w in wrapped]
        ctx.mark_non_differentiable(
            *(
                w
                for w, o in zip(wrapped, outs, strict=True)
                if isinstance(w, ctx.cls) and not o.requires_grad
            )
        )
        return tuple(wrapped)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        refuse_create_graph("DTensor op")
        if ctx.inner is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: its saved tensors were freed."
                " Specify retain_graph=True at the first backward."
            )
        leaves, outs = ctx.inner
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        pairs = _cotangents(ctx, outs, grads)
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        if pairs:
            found = iter(
                torch.autograd.grad(
                    [out for out, _ in pairs],
                    asked,
                    [grad for _, grad in pairs],
                    retain_graph=keep,
                    allow_unused=True,
                )
            )
        else:
            found = iter([None] * len(asked))
        if not keep:
            ctx.inner = None
        result = [
            _hand_on(ctx, i, next(found)) if leaf.requires_grad else None
            for i, leaf in enumerate(leaves)
        ]
        return None, None, *result


def _cotangents(
    ctx: Any, outs: list[Any], grads: Sequence[torch.Tensor | None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the inner results with their local cotangents."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, (out, grad, layout) in enumerate(zip(outs, grads, ctx.layouts, strict=True)):
        if grad is None or layout is None or not out.requires_grad:
            continue
        local = grad
        if isinstance(grad, ctx.cls):
            local = move(grad._local, grad._layout, layout.cotangent)  # type: ignore[attr-defined]
        divisor = ctx.spec.divisors[i] if ctx.spec.divisors else 1
        pairs.append((out, local / divisor if divisor > 1 else local))
    return pairs


def _hand_on(ctx: Any, i: int, grad: torch.Tensor | None) -> Any:
    """Give an operand's gradient: in the cotangent layout and plain for a leaf, else as it lies."""
    if grad is None:
        return None
    lies, target = ctx.spec.gradients[i], ctx.spec.inputs[i].cotangent
    if ctx.to_leaf[i]:
        return move(grad, lies, target)
    return ctx.cls(grad, lies)


# ---------------------------------------------------------------------- decisions


def _spec(
    cls: type[Any], name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Spec | None:
    """Give the cached decision for a call, or None for an op without a rule."""
    bound = bind_call(name, func, args, kwargs)
    operands = tuple(t if isinstance(t, cls) else None for t in bound.operands)
    if name not in _known_names() or not any(t is not None for t in operands):
        return None
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in operands
    )
    key = (
        name,
        func,
        bound.static,
        needs_grad,
        tuple(None if t is None else (t._layout, t.dtype) for t in operands),
    )
    try:
        found = _specs.get(key)
    except TypeError:  # an argument that cannot be a key
        return None
    if found is None:
        found = _decide(name, func, args, kwargs, bound, operands, needs_grad)
        if len(_specs) >= _MAX_SPECS:
            _specs.clear()
        _specs[key] = found
    return found


def _known_names() -> frozenset[str]:
    return frozenset(names())


def _decide(
    name: str,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bound: BoundCall,
    operands: tuple[Any, ...],
    needs_grad: bool,
) -> Spec:
    layouts = [None if t is None else t._layout for t in operands]
    mesh = next(layout.mesh for layout in layouts if layout is not None)
    shapes = tuple(None if layout is None else layout.shape for layout in layouts)
    rule = find(name, Call(shapes, bound.static))
    if rule.random:
        _refuse_random(name)
    decision = propagate(
        bind(rule, shapes),
        [None if layout is None else layout.placements for layout in layouts],
        mesh.shape,
        itemsizes=[1 if t is None else t.dtype.itemsize for t in operands],
        needs_grad=needs_grad,
    )
    if decision.shifts and name != "embedding":
        return _whole(name, [t for t in operands if t is not None])

    def laid(placements: Any, shape: tuple[int, ...]) -> Layout:
        return Layout(mesh, placements, shape)

    present = [i for i, layout in enumerate(layouts) if layout is not None]
    out_shapes = _global_results(func, args, kwargs)
    outputs = tuple(
        laid(decision.outputs[i if i < len(decision.outputs) else 0], shape)
        for i, shape in enumerate(out_shapes)
    )
    inputs = tuple(laid(decision.inputs[i], shapes[i] or ()) for i in present)
    start = None
    if decision.shifts:
        start = inputs[1].slices(mesh.get_rank())[0].start
    return Spec(
        inputs=inputs,
        outputs=outputs,
        gradients=tuple(laid(decision.gradients[i], shapes[i] or ()) for i in present),
        divisors=decision.divisors,
        vocab_start=start,
        local_shape=outputs[0].local_shape(mesh.get_rank()) if rule.local else None,
    )


def _global_results(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[int, ...]]:
    """Run the op on meta tensors of the global shapes, to learn the shapes of its results."""
    flat, tree = tree_flatten((args, kwargs))
    metas = [
        torch.empty(tuple(t.shape), dtype=t.dtype, device="meta")
        if isinstance(t, torch.Tensor)
        else t
        for t in flat
    ]
    meta_args, meta_kwargs = tree_unflatten(metas, tree)
    meta_kwargs.pop("device", None)
    with torch.no_grad():
        results, _ = tree_flatten(func(*meta_args, **meta_kwargs))
    return [tuple(r.shape) for r in results if isinstance(r, torch.Tensor)]


def _whole(name: str, tensors: Sequence[Any]) -> Spec:
    """Decide for an op without a rule: every operand is gathered, the result is replicated."""
    if name in _RANDOM:
        _refuse_random(name)
    if name in _DATA_DEPENDENT or getattr(_strict, "on", False):
        raise RuleError(
            describe(
                f"DTensor op {name!r}",
                "the op must have a rule",
                f"Teach it: register_op_rule({name!r}, '... -> ...'), or run it on"
                " full_tensor() or to_local()",
                layouts=[t._layout for t in tensors],
            )
        )
    if name not in _warned and name not in _READS and any(not t._layout.is_replicated for t in tensors):
        _warned.add(name)
        warnings.warn(
            f"DTensor op {name!r} has no sharding rule: its operands are gathered on every rank."
            f" Teach it with register_op_rule({name!r}, '... -> ...').",
            stacklevel=4,
        )
    whole = tuple(
        t._layout.with_placements((Replicate(),) * t._layout.mesh.ndim) for t in tensors
    )
    return Spec(inputs=whole, outputs=None, gradients=whole)


# ---------------------------------------------------------------------- refusals


def _refuse_random(name: str) -> None:
    raise RuleError(
        describe(
            f"DTensor op {name!r}",
            "random ops on DTensors must draw the same on replicas and differ between shards,"
            " which is not supported yet",
            "Draw a plain tensor and distribute it, or work on to_local()",
        )
    )


def _refuse_plain(cls: type[Any], name: str, flat: list[Any]) -> None:
    for i, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, cls) and leaf.ndim:
            raise LayoutError(
                describe(
                    f"DTensor op {name!r}",
                    "every tensor operand must be a DTensor",
                    "Say where the plain tensor is with DTensor.from_local or distribute_tensor,"
                    " or take the DTensor's part with to_local()",
                    argument=i,
                    shape=tuple(leaf.shape),
                )
            )


def _one_mesh(name: str, tensors: Sequence[Any]) -> None:
    meshes = {t._layout.mesh for t in tensors}
    if len(meshes) > 1:
        raise LayoutError(
            describe(
                f"DTensor op {name!r}",
                "all operands must be on one mesh",
                "Redistribute them to one mesh",
                meshes=list(meshes),
            )
        )
