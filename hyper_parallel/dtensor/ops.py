# SPDX-License-Identifier: Apache-2.0
"""Run a torch op on DTensors: rule -> decision -> moves -> the op on local tensors -> wrap."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.dtensor import inplace
from hyper_parallel.dtensor.composed import composed
from hyper_parallel.dtensor.decisions import decide, gathered
from hyper_parallel.dtensor.implicit import counts_as_replicated, plain_operand, replicated
from hyper_parallel.dtensor.known import KnownCall, RawCall, read_call, remember
from hyper_parallel.dtensor.local_op import needs_grad
from hyper_parallel.dtensor.moves import move
from hyper_parallel.dtensor.outside import outside
from hyper_parallel.dtensor.pending import bare
from hyper_parallel.dtensor.random import agree
from hyper_parallel.dtensor.read import refuse_other_meshes
from hyper_parallel.dtensor.signatures import BoundCall, bind_call, by_name, op_name
from hyper_parallel.dtensor.views import gives_views, memory_of
from hyper_parallel.errors import LayoutError

__all__ = ["run"]


def run(cls: type[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one out-of-place op, of DTensors, numbers and plain tensors without dims.

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
            if known.moves is not None:
                tensors = known.moved(tensors)
            return known.run(cls, func, args, kwargs, tensors, key[-1])
    if kwargs.get("out") is not None:
        return inplace.run(cls, func, func.__name__.partition(".")[0], args, kwargs)
    name = op_name(func)
    if kwargs.get("inplace") and inplace.is_pointwise(name):
        return inplace.run(cls, func, name, args, kwargs)
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
    raw: RawCall | None,
) -> Any:
    """Decide a call, run it, and remember what was decided."""
    flat, tree = tree_flatten((args, kwargs))
    if _lift_plain(cls, flat):
        return run(cls, func, *tree_unflatten(flat, tree))
    for i, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, cls) and leaf.ndim:
            raise plain_operand(f"DTensor op {name!r}", leaf, argument=i)
    tensors = [leaf for leaf in flat if isinstance(leaf, cls)]
    if kwargs:
        _refuse_options(name, kwargs)
    refuse_other_meshes(f"DTensor op {name!r}", [t._layout.mesh for t in tensors])
    bound, order = _bind(cls, name, func, flat, tree)
    spec = None if order is None else decide(cls, name, func, args, kwargs, bound=bound)
    has_rule = spec is not None
    if spec is None:
        spec, order = gathered(name, tensors), range(len(tensors))
    is_view = gives_views(name, bound)
    known = KnownCall.of(
        tensors, args, kwargs, name=name, spec=spec, order=order or (), is_view=is_view
    )
    moved = known.moved(tensors)
    updated = _moved_statistics(name, args, kwargs, tensors, moved)
    if tensors[0]._layout.mesh.get_coordinate() is None:
        return outside(cls, known, func, args, kwargs, moved)
    with nullcontext() if has_rule else _Watch(name, tensors, moved):
        result = known.run(cls, func, args, kwargs, moved, needs_grad(moved))
    for was, now in updated:
        was._local.copy_(move(now._local, now._layout, was._layout))
    if has_rule and raw is not None and not updated:
        remember(raw, known)
    return result


def _bind(
    cls: type[Any], name: str, func: Any, flat: list[Any], tree: Any
) -> tuple[BoundCall, Sequence[int] | None]:
    """Tell operands from static arguments, and each operand's place among the DTensors.

    None for the places if the operands are not all of the DTensors.
    """
    # Stand-ins, for a tensor that is given twice has two places.
    flat = [
        cls(bare(x), x._layout, requires_grad=x.requires_grad) if isinstance(x, cls) else x  # type: ignore[call-arg]
        for x in flat
    ]
    places = {id(x): i for i, x in enumerate(x for x in flat if isinstance(x, cls))}
    args, kwargs = tree_unflatten(flat, tree)
    bound = bind_call(name, func, args, kwargs)
    order = [places[id(x)] for x in bound.operands if isinstance(x, cls)]
    return bound, order if order and sorted(order) == [*places.values()] else None


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


class _Watch(TorchDispatchMode):
    """While an op without a rule runs: compare random states, refuse writes to copies."""

    def __init__(self, name: str, given: Sequence[Any], moved: Sequence[Any]) -> None:
        super().__init__()
        self.name = name
        self.mesh, self.device = given[0].device_mesh, given[0].device
        pairs = zip(given, moved, strict=True)
        self.copies = {memory_of(now._local) for was, now in pairs if now is not was}

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
        if any(isinstance(t, torch.Tensor) and memory_of(t) in self.copies for t in written):
            raise LayoutError(
                f"DTensor op {self.name!r}",
                "an op without a rule must not write into a DTensor that is not replicated",
                "Call it on the local part, to_local(), or on a plain tensor",
                writes=str(func),
            )


def _moved_statistics(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Any],
    moved: Sequence[Any],
) -> list[tuple[Any, Any]]:
    """List running statistics that are updated elsewhere than they lie, as they were and are."""
    if name not in ("batch_norm", "instance_norm"):
        return []
    given = by_name(name, args, kwargs)
    statistics = [given.get("running_mean"), given.get("running_var")]
    if not given.get("training", given.get("use_input_stats", name == "instance_norm")):
        return []
    pairs = zip(tensors, moved, strict=True)
    return [(t, now) for t, now in pairs if now is not t and any(t is one for one in statistics)]


def _refuse_options(name: str, kwargs: dict[str, Any]) -> None:
    """Refuse options that write into an operand, or whose gradient is not dense."""
    for option in ("inplace", "max_norm", "sparse"):
        if kwargs.get(option):
            instead = ", and use Adam in place of SparseAdam" if option == "sparse" else ""
            raise LayoutError(
                f"DTensor op {name!r}",
                f"{option} is not supported on DTensors",
                f"Leave {option} out{instead}",
                **{option: kwargs[option]},
            )
