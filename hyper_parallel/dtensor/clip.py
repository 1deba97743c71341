# SPDX-License-Identifier: Apache-2.0
"""clip_grad_norm_ and get_total_norm over sharded, replicated and plain gradients, mixed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch

from hyper_parallel.dtensor.interop import is_torch_dtensor, local_of, sharded_axes
from hyper_parallel.dtensor.tensor import DTensor
from hyper_parallel.errors import HyperParallelError, LayoutError, describe
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.rows import reduce

__all__ = ["clip_grad_norm_", "get_total_norm"]


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
        One all-reduce of one number per mesh axis that cuts some tensor, for each different set
        of such axes.

    Raises:
        LayoutError: a pending reduction among the tensors.
        HyperParallelError: the norm is not finite and `error_if_nonfinite`.
    """
    norm_type = float(norm_type)  # torch takes "inf", too
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    buckets: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[torch.Tensor]] = {}
    for tensor in map(_reduced, listed):
        buckets.setdefault(sharded_axes(tensor), []).append(local_of(tensor))
    if not buckets:
        return torch.tensor(0.0)
    parts = [
        _bucket_norm(mesh, axes, locals_, norm_type, foreach)
        for (mesh, axes), locals_ in buckets.items()
    ]
    total = parts[0]
    if len(parts) > 1:
        dtype = _common_dtype(parts)
        stacked = torch.stack([part.to(total.device, dtype) for part in parts])
        total = torch.linalg.vector_norm(stacked, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise HyperParallelError(
            describe(
                "get_total_norm",
                f"the total norm of order {norm_type} must be finite",
                "Set error_if_nonfinite=False to go on with it",
                total_norm=total.item(),
            )
        )
    return total


def _reduced(tensor: torch.Tensor) -> torch.Tensor:
    """Reduce what is still a pending sum of ours."""
    if isinstance(tensor, DTensor) and tensor.layout.has_partial:
        layout = tensor.layout.cotangent
        return DTensor(tensor.local_in(layout), layout)
    return tensor


def _common_dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _bucket_norm(
    mesh: DeviceMesh | None,
    axes: tuple[int, ...],
    locals_: list[torch.Tensor],
    norm_type: float,
    foreach: bool | None,
) -> torch.Tensor:
    """Give the norm of tensors that the same axes cut."""
    if mesh is None or not axes:
        return torch.nn.utils.get_total_norm(locals_, norm_type, foreach=foreach)
    if norm_type == 0:
        raise LayoutError(
            describe(
                "get_total_norm",
                "norm_type must not be 0 for sharded tensors",
                "Use a positive order, or math.inf",
                norm_type=norm_type,
            )
        )
    is_extreme = math.isinf(norm_type)
    value = _local_power(locals_, norm_type, foreach)
    op = ("max" if norm_type > 0 else "min") if is_extreme else "sum"
    for axis in axes:
        if mesh.shape[axis] > 1:
            value = reduce(mesh, axis, value, op)
    value = value.reshape(())
    value = value if is_extreme else value ** (1.0 / norm_type)
    return value.to(_common_dtype(locals_).to_real())


def _local_power(
    locals_: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """Give this rank's share as one number in a 1-d tensor: norm ** norm_type, or an extreme.

    At least float32: a power of a half-precision norm would soon overflow. Parts that are empty on
    this rank count nothing; torch has no extreme of an empty tensor.
    """
    dtype = torch.promote_types(_common_dtype(locals_).to_real(), torch.float32)
    held = [local for local in locals_ if local.numel()]
    if not held:
        nothing = math.inf if norm_type == -math.inf else 0.0
        return torch.full((1,), nothing, dtype=dtype, device=locals_[0].device)
    norm = torch.nn.utils.get_total_norm(held, norm_type, foreach=foreach)
    norm = norm.to(dtype).reshape(1).clone()
    return norm if math.isinf(norm_type) else norm**norm_type


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
    grads = [grad for p in listed if (grad := p.grad) is not None]
    total = get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    _scale([_writable(grad) for grad in grads], factor, foreach)
    return total


def _scale(locals_: list[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    """Multiply in place; tensors of one device and dtype together unless `foreach` is False."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for local in locals_:
        groups.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), group in groups.items():
        own = factor.to(device, dtype)
        if foreach is False:
            for local in group:
                local.mul_(own)
        else:
            torch._foreach_mul_(group, own)  # pyright: ignore[reportPrivateImportUsage]


def _writable(grad: torch.Tensor) -> Any:
    """Give the plain tensor whose storage is the gradient's local part."""
    if isinstance(grad, DTensor):
        return grad._local
    return grad.to_local() if is_torch_dtensor(grad) else grad  # type: ignore[attr-defined]
