# SPDX-License-Identifier: Apache-2.0
"""The one module that knows torch's own DTensor: conversion both ways, and parameters of either kind.

Torch's package is imported only when a conversion is asked for (the import takes about a second).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hyper_parallel.core import Layout, Partial, Placement, Replicate, Shard
from hyper_parallel.dtensor.read import read_mesh, read_placement
from hyper_parallel.dtensor.tensor import DTensor
from hyper_parallel.errors import LayoutError, describe
from hyper_parallel.runtime import DeviceMesh

__all__ = [
    "from_torch",
    "is_torch_dtensor",
    "local_of",
    "own_parameters",
    "sharded_axes",
    "to_torch",
    "with_layout_of",
]


def is_torch_dtensor(tensor: Any) -> bool:
    """Tell whether a tensor is torch's own DTensor, without importing its package."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)


def to_torch(tensor: DTensor) -> Any:
    """Give torch's DTensor on the same storage and the same process groups.

    Raises:
        LayoutError: a layout torch cannot express (blocks, pending max, min or product), or a mesh
            whose backend is not torch's.
    """
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.distributed.tensor import DTensor as TorchDTensor

    mesh = tensor.device_mesh
    if not isinstance(mesh.handle, TorchMesh):
        raise LayoutError(
            describe(
                "to_torch",
                "the mesh must be made of torch process groups",
                "Use a real world (torchrun) instead of simulated ranks",
                device_mesh=mesh,
            )
        )
    placements = [_torch_placement(p) for p in tensor.placements]
    return TorchDTensor.from_local(
        tensor._local,
        mesh.handle,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def from_torch(tensor: Any) -> DTensor:
    """Give our DTensor on the storage of torch's; not differentiable."""
    mesh = read_mesh(tensor.device_mesh, "from_torch")
    placements = tuple(read_placement(p, "from_torch") for p in tensor.placements)
    local = tensor.to_local().detach()
    layout = Layout(mesh, placements, tuple(tensor.shape))
    return DTensor(local, layout, requires_grad=tensor.requires_grad)


def _torch_placement(placement: Placement) -> Any:
    from torch.distributed.tensor import placement_types

    if isinstance(placement, Replicate):
        return placement_types.Replicate()
    if isinstance(placement, Shard) and placement.block == 1:
        return placement_types.Shard(placement.dim)
    if isinstance(placement, Partial):
        return placement_types.Partial(placement.reduce_op)
    raise LayoutError(
        describe(
            "to_torch",
            "torch must know the placement",
            "Redistribute to Replicate or a Shard without block",
            placement=placement,
        )
    )


def local_of(param: torch.Tensor) -> torch.Tensor:
    """Give the local tensor of a parameter, ours, torch's (under FSDP2) or plain; detached."""
    if isinstance(param, DTensor):
        return param._local
    if is_torch_dtensor(param):
        return param.to_local().detach()  # type: ignore[attr-defined]
    return param.detach()


def with_layout_of(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Give a local gradient the type that `param`'s autograd leaf takes.

    A leaf of ours takes the plain local tensor; torch's DTensor takes a DTensor.
    """
    if not is_torch_dtensor(param):
        return local
    with torch.no_grad():
        return type(param).from_local(  # type: ignore[attr-defined]
            local,
            param.device_mesh,  # type: ignore[attr-defined]
            param.placements,  # type: ignore[attr-defined]
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )


@contextmanager
def own_parameters(module: nn.Module) -> Iterator[None]:
    """Within the block, a module's own parameters that are torch's DTensors are ours.

    Under FSDP2 parameters are torch's DTensors. Gradients flow back to them.
    """
    saved: dict[str, Any] = {
        name: param for name, param in module._parameters.items() if is_torch_dtensor(param)
    }
    for name, param in saved.items():
        placements = [read_placement(p, "own_parameters") for p in param.placements]
        module._parameters[name] = DTensor.from_local(  # type: ignore[assignment]
            param.to_local(), param.device_mesh, placements, shape=param.shape
        )
    try:
        yield
    finally:
        module._parameters.update(saved)


def sharded_axes(tensor: torch.Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Give the mesh of a tensor and the axes that cut it; (None, ()) for a plain tensor.

    Raises:
        LayoutError: a pending reduction among the placements.
    """
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
    elif is_torch_dtensor(tensor):
        mesh = read_mesh(tensor.device_mesh, "sharded_axes")  # type: ignore[attr-defined]
        placements = tensor.placements  # type: ignore[attr-defined]
    else:
        return None, ()
    if any(p.is_partial() for p in placements):
        raise LayoutError(
            describe(
                "sharded_axes",
                "the tensor must not be a pending reduction",
                "Redistribute it first",
                placements=tuple(placements),
            )
        )
    return mesh, tuple(i for i, p in enumerate(placements) if not p.is_replicate())
