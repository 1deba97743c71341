# SPDX-License-Identifier: Apache-2.0
"""clip_grad_norm_ and get_total_norm over sharded, replicated and plain gradients, mixed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.entries import accumulated
from hyper_parallel.dtensor.interop import local_of, sharded_axes
from hyper_parallel.dtensor.tensor import DTensor
from hyper_parallel.errors import HyperParallelError, LayoutError
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.rows import reduce

__all__ = ["clip_grad_norm_", "get_total_norm"]

Cut = tuple[DeviceMesh | None, tuple[int, ...]]  # a mesh, and the axes that cut a tensor
Where = Cut | Layout
Groups = list[tuple[Cut, list[torch.Tensor]]]


def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Give the norm of all tensors taken together, the same on every rank.

    Args:
        tensors: plain tensors, DTensors, and torch's DTensors (FSDP2), on one mesh or several; a
            replicated one counts once.
        norm_type: the order of the norm; may be infinite.
        error_if_nonfinite: raise if the norm is infinite or not a number.
        foreach: as torch's get_total_norm.

    Returns:
        A plain 0-d tensor.

    Communicates:
        For each mesh, one all-reduce of one number per axis that cuts some tensor of it.

    Raises:
        LayoutError: a pending reduction among the tensors.
        HyperParallelError: the norm is not finite and `error_if_nonfinite`.
    """
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    with torch.no_grad():
        groups = _grouped(list(map(_lying, listed)))
        return _total(groups, float(norm_type), error_if_nonfinite, foreach)  # it takes "inf", too


def _total(
    groups: Groups, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    """Give the norm of all local tensors of all groups."""
    meshes: dict[DeviceMesh | None, list[tuple[tuple[int, ...], list[torch.Tensor]]]] = {}
    for (mesh, axes), locals_ in groups:
        meshes.setdefault(mesh, []).append((axes, locals_))
    if not meshes:
        return torch.tensor(0.0)
    parts = [_mesh_norm(mesh, held, norm_type, foreach) for mesh, held in meshes.items()]
    total = parts[0]
    if len(parts) > 1:
        dtype = _common_dtype(parts)
        stacked = torch.stack([part.to(total.device, dtype) for part in parts])
        total = torch.linalg.vector_norm(stacked, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise HyperParallelError(
            "get_total_norm",
            f"the total norm of order {norm_type} must be finite",
            "Set error_if_nonfinite=False to go on with it",
            total_norm=total.item(),
        )
    return total


def _lying(tensor: torch.Tensor) -> tuple[Where, torch.Tensor]:
    """Give where a tensor lies, pending sums reduced, and its local part."""
    if isinstance(tensor, DTensor):
        layout = tensor._layout.cotangent
        return layout, tensor.local_in(layout)
    return sharded_axes(tensor), local_of(tensor)


def _grouped(lying: Iterable[tuple[Where, torch.Tensor]]) -> Groups:
    """Sort local tensors by where they lie."""
    groups: dict[Any, tuple[Where, list[torch.Tensor]]] = {}
    for where, local in lying:
        key = where if type(where) is tuple else id(where)  # quicker than to compare layouts
        if key in groups:
            groups[key][1].append(local)
        else:
            groups[key] = (where, [local])
    return [
        (where if isinstance(where, tuple) else sharded_axes(where.cotangent), locals_)
        for where, locals_ in groups.values()
    ]


def _common_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, {tensor.dtype for tensor in tensors})


def _mesh_norm(
    mesh: DeviceMesh | None,
    held: list[tuple[tuple[int, ...], list[torch.Tensor]]],
    norm_type: float,
    foreach: bool | None,
) -> torch.Tensor:
    """Give the norm of the tensors of one mesh; a replica counts on the first rank of its axis."""
    everything = [local for _, locals_ in held for local in locals_]
    cut = {axis for axes, _ in held for axis in axes if mesh is not None and mesh.shape[axis] > 1}
    place = None if mesh is None else mesh.get_coordinate()
    if mesh is None or place is None or not cut:
        return torch.nn.utils.get_total_norm(everything, norm_type, foreach=foreach)
    if norm_type == 0:
        raise LayoutError(
            "get_total_norm",
            "norm_type must not be 0 for sharded tensors",
            "Use a positive order, or math.inf",
            norm_type=norm_type,
        )
    counted = [
        local
        for axes, locals_ in held
        if not any(place[axis] for axis in cut.difference(axes))
        for local in locals_
    ]
    dtype = _common_dtype(everything).to_real()
    is_extreme = math.isinf(norm_type)
    if is_extreme or norm_type < 0:  # torch has none of an empty tensor
        counted = [local for local in counted if local.numel()]
    value = _local_power(counted, everything[0].device, dtype, norm_type, foreach)
    op = ("max" if norm_type > 0 else "min") if is_extreme else "sum"
    for axis in sorted(cut):
        value = reduce(mesh, axis, value, op)
    value = value.reshape(())
    if not is_extreme:
        value = value.sqrt() if norm_type == 2 else value ** (1.0 / norm_type)
    return value.to(dtype)


def _local_power(
    counted: list[torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    norm_type: float,
    foreach: bool | None,
) -> torch.Tensor:
    """Give this rank's share as one number in a 1-d tensor: norm ** norm_type, or an extreme.

    At least float32: a power of a half-precision norm would soon overflow.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    if not counted:
        nothing = math.inf if norm_type == -math.inf else 0.0
        return torch.full((1,), nothing, dtype=dtype, device=device)
    norm = torch.nn.utils.get_total_norm(counted, norm_type, foreach=foreach)
    norm = norm.to(dtype).reshape(1)
    if math.isinf(norm_type):
        return norm
    return norm.square() if norm_type == 2 else norm**norm_type


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`.

    Args:
        parameters: plain parameters, DTensors, and FSDP2's parameters, mixed as they come.
        max_norm: the largest norm allowed.
        norm_type: the order of the norm; may be infinite.
        error_if_nonfinite: raise if the norm is infinite or not a number.
        foreach: as torch's clip_grad_norm_.

    Returns:
        The norm before clipping, a plain 0-d tensor.

    Communicates:
        As get_total_norm.

    Raises:
        HyperParallelError: the norm is not finite and `error_if_nonfinite`; no gradient changed.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, clip_grad_norm_, distribute_tensor
        >>> from hyper_parallel import init_device_mesh, simulate
        >>> @simulate(2)
        ... def norm():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     p = distribute_tensor(torch.ones(4, requires_grad=True), mesh, [Shard(0)])
        ...     p.grad = distribute_tensor(torch.full((4,), 2.0), mesh, [Shard(0)])
        ...     return clip_grad_norm_([p], 1.0).item()
        >>> norm()
        [4.0, 4.0]
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    groups = _gradients(listed)
    total = _total(groups, float(norm_type), error_if_nonfinite, foreach)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    _scale([grad for _, grads in groups for grad in grads], factor, foreach)
    return total


def _gradients(parameters: Sequence[torch.Tensor]) -> Groups:
    """Give the local gradients, whose storage may be written to."""
    return _grouped(
        # What is plain lies in the cotangent layout; see [Note: gradients] in tensor.py.
        (p._layout, raw) if type(raw) is torch.Tensor and type(p) is DTensor else _lying(p.grad)  # type: ignore[arg-type]
        for p, raw in zip(parameters, accumulated(parameters), strict=True)
        if raw is not None
    )


def _scale(locals_: list[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    """Multiply in place; tensors of one device and dtype together unless `foreach` is False."""
    if foreach is False:
        for local in locals_:
            local.mul_(factor.to(local.device, local.dtype))
        return
    kinds = {(local.device, local.dtype) for local in locals_}
    for kind in kinds:
        group = locals_
        if len(kinds) > 1:
            group = [local for local in locals_ if (local.device, local.dtype) == kind]
        torch._foreach_mul_(group, factor.to(*kind))  # pyright: ignore[reportPrivateImportUsage]
