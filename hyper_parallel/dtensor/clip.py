# SPDX-License-Identifier: Apache-2.0
"""clip_grad_norm_ and get_total_norm over any mixture of sharded, replicated and plain gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from hyper_parallel.dtensor.interop import is_torch_dtensor, local_of, sharded_axes
from hyper_parallel.dtensor.tensor import DTensor
from hyper_parallel.errors import LayoutError, describe
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.executor import reduce

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
        RuntimeError: the norm is not finite and `error_if_nonfinite`.
    """
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    buckets: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[torch.Tensor]] = {}
    for tensor in listed:
        if isinstance(tensor, DTensor) and tensor.layout.has_partial:
            whole = tensor.local_in(tensor.layout.cotangent)
            tensor = DTensor(whole, tensor.layout.cotangent)
        buckets.setdefault(sharded_axes(tensor), []).append(local_of(tensor))
    if not buckets:
        return torch.tensor(0.0)
    parts = [
        _bucket_norm(mesh, axes, locals_, norm_type, foreach)
        for (mesh, axes), locals_ in buckets.items()
    ]
    stacked = torch.stack([part.to(parts[0].device) for part in parts])
    total = torch.linalg.vector_norm(stacked, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so it cannot"
            " be clipped. Set error_if_nonfinite=False to clip anyway."
        )
    return total


def _bucket_norm(
    mesh: DeviceMesh | None,
    axes: tuple[int, ...],
    locals_: list[torch.Tensor],
    norm_type: float,
    foreach: bool | None,
) -> torch.Tensor:
    """Give the norm of tensors that the same axes cut."""
    norm = torch.nn.utils.get_total_norm(locals_, norm_type, foreach=foreach)
    if mesh is None or not axes:
        return norm
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
    value = norm if is_extreme else norm**norm_type
    op = ("max" if norm_type > 0 else "min") if is_extreme else "sum"
    value = value.reshape(1).clone()
    for axis in axes:
        if mesh.shape[axis] > 1:
            value = reduce(mesh, axis, value, op)
    value = value.reshape(())
    return value if is_extreme else value ** (1.0 / norm_type)


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
        RuntimeError: the norm is not finite and `error_if_nonfinite`.

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
    for grad in grads:
        _writable(grad).mul_(factor.to(grad.device, grad.dtype))
    return total


def _writable(grad: torch.Tensor) -> Any:
    """Give the plain tensor whose storage is the gradient's local part."""
    if isinstance(grad, DTensor):
        return grad._local
    return grad.to_local() if is_torch_dtensor(grad) else grad  # type: ignore[attr-defined]
