# SPDX-License-Identifier: Apache-2.0
"""Run a torch op on DTensors: rule -> decision -> moves -> the op on local tensors -> wrap.

[Note: lost writes] A view of a DTensor that had to be gathered is a view of a copy: an in-place op
on it would change the copy only. Such results carry a mark that views of them inherit and that the
in-place path refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.dtensor import inplace
from hyper_parallel.dtensor.composed import composed
from hyper_parallel.dtensor.decisions import Spec, decide, gathered, on_meta
from hyper_parallel.dtensor.implicit import counts_as_replicated, replicated
from hyper_parallel.dtensor.known import KnownCall, read_call, remember
from hyper_parallel.dtensor.local_op import apply, graph_parts, redistributed, wrap_results
from hyper_parallel.dtensor.outside import outside
from hyper_parallel.dtensor.random import agree, given_generator, own_draw
from hyper_parallel.dtensor.signatures import BoundCall, bind_call, by_name, op_name
from hyper_parallel.errors import LayoutError, describe

__all__ = ["run"]

_VIEWS = frozenset(
    "t mT mH transpose permute movedim view reshape flatten unflatten squeeze unsqueeze"
    " expand narrow select slice split chunk unbind tensor_split hsplit vsplit dsplit __getitem__"
    " diagonal linalg_diagonal unfold real imag as_strided detach view_as_real view_as_complex"
    " atleast_1d atleast_2d atleast_3d broadcast_tensors meshgrid".split()
)
# These copy where the local part has no view of this kind.
_MAY_COPY = frozenset("view reshape flatten unflatten".split())
# Views that are not contiguous, though their local part may be.
_SCATTERING = _VIEWS - _MAY_COPY - frozenset("detach squeeze unsqueeze".split())


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
    raw = read_call(cls, func, args, kwargs)
    if raw is not None:
        key, tensors = raw
        known = tensors[0]._layout.mesh.decisions.get(key)
        if known is not None:
            is_recorded = key[-1]
            return _run_known(cls, known, tensors, is_recorded, func, args, kwargs)
    if kwargs.get("out") is not None:
        return inplace.run(cls, func, func.__name__.partition(".")[0], args, kwargs)
    name = op_name(func)
    made = composed(name, func, args, kwargs)
    if made is not NotImplemented:
        return made
    if kwargs.get("requires_grad"):  # of torch.zeros_like and the like
        rest = {key: value for key, value in kwargs.items() if key != "requires_grad"}
        return run(cls, func, args, rest).detach().requires_grad_()
    return _run_first(cls, name, func, args, kwargs, raw)


def _run_first(
    cls: type[Any],
    name: str,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    raw: tuple[Any, list[Any]] | None,
) -> Any:
    """Decide a call, run it, and remember what was decided."""
    flat, tree = tree_flatten((args, kwargs))
    if _lift_plain(cls, flat):
        args, kwargs = tree_unflatten(flat, tree)
    written = slots = [i for i, leaf in enumerate(flat) if isinstance(leaf, cls)]
    _refuse_plain(cls, name, flat)
    if kwargs:
        _refuse_options(name, kwargs)
    _one_mesh(name, [flat[i] for i in slots])
    bound = bind_call(name, func, args, kwargs)
    ordered = _order(flat, slots, [t for t in bound.operands if isinstance(t, cls)])
    slots = ordered or slots
    tensors = [flat[i] for i in slots]
    spec = decide(name, func, args, kwargs, bound=bound, tensors=tensors) if ordered else None
    has_rule = spec is not None
    if spec is None:
        spec = gathered(name, tensors)
    moved = [
        t if t._layout == layout else redistributed(t, layout)
        for t, layout in zip(tensors, spec.inputs, strict=True)
    ]

    def with_operands(given: Sequence[torch.Tensor]) -> Any:
        return tree_unflatten(_replaced(flat, slots, given), tree)

    def call(locals_: Sequence[torch.Tensor]) -> Any:
        call_args, call_kwargs = with_operands(locals_)
        if spec.local is not None:
            return spec.local.run(func, call_args, call_kwargs)
        return func(*call_args, **call_kwargs)

    is_view = name in _VIEWS and _has_no_positions(bound)
    if name in ("batch_norm", "instance_norm"):
        _refuse_moved_statistics(name, by_name(name, args, kwargs), tensors, moved)
    if tensors[0]._layout.mesh.get_coordinate() is None:
        return outside(cls, name, lambda x: on_meta(func, *with_operands(x)), spec, moved)
    if spec.random:
        result = _draw(cls, call, spec, moved, name, given_generator(flat))
    elif has_rule:
        result = apply(cls, call, spec, moved)
        if raw is not None:
            order = [written.index(slot) for slot in slots]
            remember(raw, args, kwargs, name=name, spec=spec, order=order, is_view=is_view)
    else:
        with _Watch(name, tensors, moved):
            result = apply(cls, call, spec, moved)
    if is_view or not has_rule:
        may_copy = is_view and (spec.local is not None or name in _MAY_COPY)
        _mark_copies(cls, may_copy, spec, tensors, moved, result)
    if (is_view and name in _SCATTERING) or tensors[0]._is_scattered:
        result = _own_memory(cls, name, tensors[0], result)
    return result


def _replaced(flat: list[Any], slots: Sequence[int], given: Sequence[Any]) -> list[Any]:
    leaves = list(flat)
    for slot, operand in zip(slots, given, strict=True):
        leaves[slot] = operand
    return leaves


def _run_known(  # noqa: PLR0913  # the call, as it was given
    cls: type[Any],
    known: KnownCall,
    given: list[Any],
    is_recorded: bool,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a call that was decided before; see [Note: known calls]."""
    moved, name, spec = given, known.name, known.spec
    if known.moves is not None:
        moved = [
            t if layout is None else redistributed(t, layout)
            for t, layout in zip(given, known.moves, strict=True)
        ]
    parts = graph_parts(moved, known.pending) if is_recorded else [t._local for t in moved]
    local_args, local_kwargs = known.filled(cls, args, kwargs, parts)
    if spec.local is None:
        result = func(*local_args, **local_kwargs)
    else:
        result = spec.local.run(func, tuple(local_args), local_kwargs)
    result = wrap_results(cls, result, spec, parts if is_recorded else ())
    if known.is_view:
        may_copy = spec.local is not None or name in _MAY_COPY
        _mark_copies(cls, may_copy, spec, given, moved, result)
    if given[0]._is_scattered or (known.is_view and name in _SCATTERING):
        result = _own_memory(cls, name, given[0], result)
    return result


def _order(flat: list[Any], slots: list[int], operands: list[Any]) -> list[int] | None:
    """List the slots in the order of the operands; None if they are not the same tensors."""
    if not slots or len(operands) != len(slots):
        return None
    if all(flat[i] is t for i, t in zip(slots, operands, strict=True)):
        return slots
    left = list(slots)
    ordered: list[int] = []
    for operand in operands:
        slot = next((i for i in left if flat[i] is operand), None)
        if slot is None:
            return None
        left.remove(slot)
        ordered.append(slot)
    return ordered


def _lift_plain(cls: type[Any], flat: list[Any]) -> bool:
    """Make DTensors of plain tensors that count as replicated and are more than a number.

    A tensor without dims is a number, but where it needs a gradient, so that it gets it.
    """
    is_recorded = torch.is_grad_enabled()
    plain = [
        i
        for i, leaf in enumerate(flat)
        if isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, cls)
        and (
            (is_recorded and leaf.requires_grad)
            if not leaf.ndim
            else counts_as_replicated(cls, leaf)
        )
    ]
    if plain:
        mesh = next(leaf for leaf in flat if isinstance(leaf, cls))._layout.mesh  # type: ignore[attr-defined]
        for i in plain:
            flat[i] = replicated(cls, flat[i], mesh)
    return bool(plain)


def _draw(
    cls: type[Any], call: Any, spec: Spec, tensors: Sequence[Any], name: str, generator: Any
) -> Any:
    """Run a random op by its rule; see [Note: random numbers] in random.py."""
    device = tensors[0].device
    layout = (spec.outputs or spec.inputs)[0]
    if generator is None:
        agree(layout.mesh, device, name)  # type: ignore[arg-type]
    if layout.is_replicated or device.type == "meta":
        return apply(cls, call, spec, tensors)
    with own_draw(layout, device, generator):
        return apply(cls, call, spec, tensors)


class _Watch(TorchDispatchMode):
    """While an op without a rule runs: compare random states, refuse writes to copies."""

    def __init__(self, name: str, given: Sequence[Any], moved: Sequence[Any]) -> None:
        super().__init__()
        self.name = name
        self.mesh, self.device = given[0].device_mesh, given[0].device
        pairs = zip(given, moved, strict=True)
        self.copies = {_storage(now._local) for was, now in pairs if now is not was}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first use imports the compiler, which takes a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            agree(self.mesh, self.device, self.name)
        if self.copies and func._schema.is_mutable:
            self._refuse_lost_writes(func, args)
        return func(*args, **(kwargs or {}))

    def _refuse_lost_writes(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse an op that writes into the gathered copy of an operand."""
        written = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_flatten(value)[0]
        ]
        if any(isinstance(t, torch.Tensor) and _storage(t) in self.copies for t in written):
            raise LayoutError(
                describe(
                    f"DTensor op {self.name!r}",
                    "an op without a rule must not write into a DTensor that is not replicated",
                    "Call it on the local part, to_local(), or on a plain tensor",
                    writes=str(func),
                )
            )


def _has_no_positions(bound: BoundCall) -> bool:
    """Tell whether an index holds no positions or masks, with which indexing copies."""
    index = dict(bound.static).get("index") if len(bound.static) == 1 else None
    copies = ("tensor", "other", "list")
    entries = index if isinstance(index, tuple) else ()
    return not any((e[0] if isinstance(e, tuple) else e) in copies for e in entries)


def _mark_copies(
    cls: type[Any],
    may_copy: bool,
    spec: Spec,
    given: Sequence[Any],
    moved: Sequence[Any],
    result: Any,
) -> None:
    """Mark results that are views of a copy; see [Note: lost writes].

    Args:
        cls: the DTensor class.
        may_copy: whether the local op may give a copy in place of a view.
        spec: the decision.
        given: the operands.
        moved: the operands where the op needed them.
        result: what the op gave.
    """
    copies = [
        now for was, now in zip(given, moved, strict=True) if now is not was or was._write_is_lost
    ]
    if not copies and not may_copy:
        return
    # Where only some ranks have what it views, all results are marked.
    is_made = spec.local is not None and bool(spec.local.addressed)
    lost = {_storage(t._local) for t in copies}
    owners = {_storage(t._local) for t in given} if may_copy else None
    for value in [result] if isinstance(result, cls) else tree_flatten(result)[0]:
        if isinstance(value, cls):
            at = _storage(value._local)  # type: ignore[attr-defined]
            if is_made or at in lost or (owners is not None and at not in owners):
                value._write_is_lost = True  # type: ignore[attr-defined]


def _own_memory(cls: type[Any], name: str, source: Any, result: Any) -> Any:
    """Mark scattered views; copy where `contiguous` must, though the local part need not be."""
    if name == "contiguous" and isinstance(result, cls):
        shares = _storage(result._local) == _storage(source._local)  # type: ignore[attr-defined]
        return result.clone() if shares else result  # type: ignore[attr-defined]
    if name in _VIEWS:
        for value in tree_flatten(result)[0]:
            if isinstance(value, cls):
                value._is_scattered = True  # type: ignore[attr-defined]
    return result


def _storage(local: torch.Tensor) -> int:
    return local.untyped_storage().data_ptr()


# ---------------------------------------------------------------------- refusals


def _refuse_options(name: str, kwargs: dict[str, Any]) -> None:
    """Refuse options that write into an operand, or whose gradient is not dense."""
    for option in ("inplace", "max_norm", "sparse"):
        if kwargs.get(option):
            raise LayoutError(
                describe(
                    f"DTensor op {name!r}",
                    f"{option} is not supported on DTensors",
                    f"Leave {option} out",
                    **{option: kwargs[option]},
                )
            )


def _refuse_moved_statistics(
    name: str, given: dict[str, Any], tensors: Sequence[Any], moved: Sequence[Any]
) -> None:
    """Refuse to update running statistics that lie elsewhere than the op needs them."""
    statistics = [given.get("running_mean"), given.get("running_var")]
    updates = given.get("training", given.get("use_input_stats", name == "instance_norm"))
    for was, now in zip(tensors, moved, strict=True):
        if updates and now is not was and any(was is one for one in statistics):
            raise LayoutError(
                describe(
                    f"DTensor op {name!r}",
                    f"running statistics must be {now._layout.placements} to be updated",
                    "Redistribute them, or leave them out",
                    layout=was._layout,
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
                    " take the DTensor's part with to_local(), or, if every rank has the same,"
                    " work inside `with implicit_replication():`",
                    argument=i,
                    shape=tuple(leaf.shape),
                )
            )


def _one_mesh(name: str, tensors: Sequence[Any]) -> None:
    mesh = tensors[0]._layout.mesh
    if any(t._layout.mesh != mesh for t in tensors):
        raise LayoutError(
            describe(
                f"DTensor op {name!r}",
                "all operands must be on one mesh",
                "Redistribute them to one mesh",
                meshes=[t._layout.mesh for t in tensors],
            )
        )
