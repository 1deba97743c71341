# SPDX-License-Identifier: Apache-2.0
"""local_map: run a function that wants plain tensors on the local parts of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.read import read_mesh, read_placements
from hyper_parallel.dtensor.tensor import DTensor
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh

__all__ = ["local_map"]

_WHERE = "local_map"


def local_map(  # torch's signature
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Any = None,
    in_grad_placements: Any = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Make a function on DTensors of one on plain local tensors; also a decorator.

    The function is called with this rank's parts in place of the DTensors. What it returns is
    declared to be parts of DTensors. Without DTensors among its arguments it is called as it is.

    Args:
        func: the function. DTensors are passed by position; plain tensors go to it as they are.
        out_placements: the placements of the result; of several, a tuple of such, None for what is
            no tensor.
        in_placements: for each argument, flattened, the placements that it must have, None for what
            is no DTensor; default any.
        in_grad_placements: likewise those that the gradients of the local parts have; default
            the cotangent's (see `DTensor.to_local`).
        device_mesh: the mesh of the results; default that of the first DTensor.
        redistribute_inputs: move arguments that lie elsewhere, in place of an error.

    Returns:
        The function on DTensors.

    Communicates:
        Forward: with `redistribute_inputs` the moves of the arguments; where a DTensor among them
        is unevenly cut, the sizes of the results' shards. Backward: the way back.

    Raises:
        LayoutError: placements that do not fit the arguments or the results, or a rank outside the
            mesh.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, distribute_tensor, init_device_mesh, local_map
        >>> from hyper_parallel import simulate
        >>> @local_map(out_placements=[Shard(0)], in_placements=([Shard(0)],))
        ... def flipped(rows):
        ...     return rows.flip(1)
        >>> @simulate(2)
        ... def run():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
        ...     return flipped(x).tolist()
        >>> run()[0]
        [[1.0, 0.0], [3.0, 2.0], [5.0, 4.0]]
    """
    wanted = _Wanted(
        out_placements, in_placements, in_grad_placements, device_mesh, redistribute_inputs
    )
    if func is None:
        return lambda func: functools.wraps(func)(functools.partial(_call, func, wanted))
    return functools.partial(_call, func, wanted)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What was asked for, as it was given."""

    outputs: Any
    inputs: Any
    gradients: Any
    mesh: Any
    may_move: bool


def _call(func: Callable[..., Any], wanted: _Wanted, *args: Any, **kwargs: Any) -> Any:
    flat, tree = tree_flatten(args)
    if any(isinstance(value, DTensor) for value in tree_flatten(kwargs)[0]):
        must = "DTensors must be passed by position"
        raise LayoutError(_WHERE, must, "Pass them so", kwargs=sorted(kwargs))
    for name, given in (("in_placements", wanted.inputs), ("in_grad_placements", wanted.gradients)):
        if given is not None and len(given) != len(flat):
            must = f"{name} must have one entry per argument ({len(flat)})"
            raise LayoutError(_WHERE, must, "Use None for what is no DTensor", got=given)
    layouts: list[Layout] = []
    local_args = [_enter(wanted, i, value, layouts) for i, value in enumerate(flat)]
    result = func(*tree_unflatten(local_args, tree), **kwargs)
    return _leave(wanted, result, layouts) if layouts else result


def _enter(wanted: _Wanted, index: int, value: Any, layouts: list[Layout]) -> Any:
    """Give one argument as the function takes it."""
    asked = None if wanted.inputs is None else wanted.inputs[index]
    if not isinstance(value, DTensor):
        if asked is not None and not isinstance(value, torch.Tensor):
            must = f"the placements of argument {index}, which is no tensor, must be None"
            raise LayoutError(_WHERE, must, "Pass None there", placements=asked)
        return value
    mesh = value.device_mesh
    if mesh.get_coordinate() is None:
        must = "only a rank of the mesh may run the function"
        fix = "Guard it with `mesh.get_coordinate() is not None`"
        raise LayoutError(_WHERE, must, fix, mesh=mesh)
    if wanted.inputs is not None:
        placements = value.layout.with_placements(_placements(asked, mesh, index)).placements
        if placements != value.placements and not wanted.may_move:
            raise LayoutError(
                _WHERE,
                f"argument {index} must have the placements {placements}",
                "Redistribute it, or pass redistribute_inputs=True",
                placements=value.placements,
            )
        value = value.redistribute(mesh, placements)
    layouts.append(value.layout)
    if wanted.gradients is None:
        return value.to_local()
    return value.to_local(grad_placements=_placements(wanted.gradients[index], mesh, index))


def _placements(given: Any, mesh: DeviceMesh, index: int) -> Any:
    if given is None:
        must = f"argument {index}, a DTensor, must have placements"
        raise LayoutError(_WHERE, must, "Pass one per mesh axis", placements=None)
    return read_placements(given, mesh, _WHERE)


def _leave(wanted: _Wanted, result: Any, layouts: list[Layout]) -> Any:
    """Declare the results to be parts of DTensors."""
    flat, tree = tree_flatten(result)
    outputs = wanted.outputs if isinstance(wanted.outputs, tuple) else (wanted.outputs,)
    if len(outputs) != len(flat):
        must = f"out_placements must be a tuple with one entry per result ({len(flat)})"
        fix = "Use None for what is no tensor"
        raise LayoutError(_WHERE, must, fix, out_placements=wanted.outputs)
    mesh: Any = layouts[0].mesh if wanted.mesh is None else read_mesh(wanted.mesh, _WHERE)
    is_uneven = any(not _is_even(layout) for layout in layouts)
    for i, (value, placements) in enumerate(zip(flat, outputs, strict=True)):
        if isinstance(value, torch.Tensor) != (placements is not None):
            must = f"the placements of result {i} must be given for a tensor, and None otherwise"
            fix = "Pass one per mesh axis for each tensor"
            raise LayoutError(_WHERE, must, fix, result=type(value).__name__)
        if placements is not None:
            read = read_placements(placements, mesh, _WHERE)
            shape = _whole_shape(value, mesh, read) if is_uneven else None
            flat[i] = DTensor.from_local(value, mesh, read, shape=shape, run_check=is_uneven)
    return tree_unflatten(flat, tree)


def _is_even(layout: Layout) -> bool:
    """Tell whether every rank's part has the same shape: the first has the most, the last least."""
    ranks = layout.mesh.ranks
    return layout.local_shape(ranks[0]) == layout.local_shape(ranks[-1])


def _whole_shape(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> list[int]:
    """Add up the sizes of all ranks' parts, from the axis that cuts last."""
    shape = list(local.shape)
    for axis in reversed(range(mesh.ndim)):
        dim = placements[axis].cut_dim
        if dim is not None:
            every = mesh.communicator(axis).all_gather_ints([shape[dim]])
            shape[dim] = sum(size for (size,) in every)
    return shape
