# SPDX-License-Identifier: Apache-2.0
"""The one module that knows torch's own DTensor: conversion both ways, parameters of either kind.

Torch's package is imported only when a conversion is asked for (the import takes about a second).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hyper_parallel.core import Layout, Partial, Placement, Replicate, Shard
from hyper_parallel.dtensor.read import is_torch_dtensor, read_mesh, read_placement
from hyper_parallel.dtensor.tensor import DTensor
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh

__all__ = [
    "from_torch",
    "is_torch_dtensor",
    "local_of",
    "mesh_of",
    "own_parameters",
    "sharded_axes",
    "to_torch",
    "torch_placement",
    "with_layout_of",
]


# Ours by the identity of torch's, which ours keeps alive: a parameter that to_torch handed over
# finds its mesh again, with the communicators that the styles use.
_ours: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()
# And by value, for FSDP2 joins the two meshes anew for each parameter; groups, as a later world of
# this process may have an equal mesh.
_equal: weakref.WeakValueDictionary[tuple[Any, ...], DeviceMesh] = weakref.WeakValueDictionary()


def to_torch(tensor: DTensor, *, handle: Any = None) -> Any:
    """Give torch's DTensor on the same storage and the same process groups; not differentiable.

    Args:
        tensor: the DTensor.
        handle: another torch mesh of the same ranks, names and groups to put it on.

    Returns:
        Torch's DTensor; a detached one.

    Raises:
        LayoutError: a layout torch cannot express (shards cut between blocks otherwise than torch
            cuts them, a pending reduction of an op that torch lacks), or a mesh whose backend is
            not torch's.
    """
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.distributed.tensor import DTensor as TorchDTensor

    mesh = tensor.device_mesh
    if not isinstance(mesh.handle, TorchMesh):
        raise LayoutError(
            "to_torch",
            "the mesh must be made of torch process groups",
            "Use a real world (torchrun) instead of simulated ranks",
            device_mesh=mesh,
        )
    placements = [torch_placement(p, tensor.layout) for p in tensor.placements]
    if handle is None:
        handle = mesh.handle
        _ours[id(handle)] = mesh
    else:
        _equal[(handle, *handle.get_all_groups())] = mesh
    return TorchDTensor.from_local(
        tensor._local.detach(),
        handle,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def from_torch(tensor: Any) -> DTensor:
    """Give our DTensor on the storage and process groups of torch's; not differentiable.

    Raises:
        LayoutError: not torch's DTensor, or one in a layout of which ours has no counterpart: a
            column-wise parameter under FSDP2 is cut by the tensor-parallel axis first.
    """
    if not is_torch_dtensor(tensor):
        raise LayoutError(
            "from_torch",
            "the tensor must be torch's DTensor",
            "Wrap a plain tensor with DTensor.from_local",
            tensor=type(tensor).__name__,
        )
    placements = tuple(read_placement(p, "from_torch") for p in tensor.placements)
    layout = Layout(mesh_of(tensor), placements, tuple(tensor.shape))
    return DTensor(local_of(tensor), layout, requires_grad=tensor.requires_grad)


def torch_placement(placement: Placement, layout: Layout | None = None) -> Any:
    """Give torch's placement for ours; `layout` is that of the tensor, to compare cuts.

    Raises:
        LayoutError: torch has none that means the same.
    """
    from torch.distributed.tensor import placement_types

    if isinstance(placement, Replicate):
        return placement_types.Replicate()
    if isinstance(placement, Shard) and (placement.block == 1 or _plain_cut(layout)):
        return placement_types.Shard(placement.dim)
    if isinstance(placement, Partial):
        return placement_types.Partial(placement.reduce_op)
    raise LayoutError(
        "to_torch",
        "torch must know the placement",
        "Redistribute to Replicate, or cut where torch.chunk does",
        placement=placement,
    )


def _plain_cut(layout: Layout | None) -> bool:
    """Tell whether every rank holds what it would hold if no shard had blocks."""
    if layout is None:
        return False
    plain = layout.with_placements(
        [Shard(p.dim) if isinstance(p, Shard) else p for p in layout.placements]
    )
    return all(layout.slices(rank) == plain.slices(rank) for rank in layout.mesh.ranks)


def mesh_of(tensor: Any) -> DeviceMesh:
    """Give our mesh of torch's DTensor, on the same process groups."""
    mesh = tensor.device_mesh
    found = _ours.get(id(mesh))
    if found is None:
        key = (mesh, *mesh.get_all_groups())
        found = _equal.get(key)
        if found is None:
            found = _equal[key] = read_mesh(mesh, "from_torch")
    return found


def local_of(param: torch.Tensor) -> torch.Tensor:
    """Give the local tensor of a parameter, ours, torch's (under FSDP2) or plain; detached."""
    if isinstance(param, DTensor):
        return param._local
    if is_torch_dtensor(param):
        local = param._local_tensor  # type: ignore[attr-defined]
        # Anything but a plain tensor is a result that is still on its way.
        return local if type(local) is torch.Tensor else param.to_local().detach()  # type: ignore[attr-defined]
    return param.detach()


def with_layout_of(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Give a local gradient the type that `param`'s autograd leaf takes.

    A leaf of ours takes the plain local tensor; torch's DTensor takes a DTensor.
    """
    if not is_torch_dtensor(param):
        return local
    return type(param)(local.detach(), param._spec, requires_grad=False)  # type: ignore[attr-defined]


@contextmanager
def own_parameters(module: nn.Module) -> Iterator[None]:
    """Within the block, a module's own parameters that are torch's DTensors are ours.

    Under FSDP2 parameters are torch's DTensors. Gradients flow back to them.
    """
    saved: dict[str, Any] = {
        name: param for name, param in module._parameters.items() if is_torch_dtensor(param)
    }
    try:
        for name, param in saved.items():
            placements = [read_placement(p, "own_parameters") for p in param.placements]
            module._parameters[name] = DTensor.from_local(  # type: ignore[assignment]
                param.to_local(), mesh_of(param), placements, shape=param.shape
            )
        yield
    finally:
        module._parameters.update(saved)


def sharded_axes(tensor: torch.Tensor | Layout) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Give the mesh of a tensor or layout and the axes that cut it; (None, ()) for a plain tensor.

    Raises:
        LayoutError: a pending reduction among the placements.
    """
    if isinstance(tensor, (DTensor, Layout)):
        layout = tensor if isinstance(tensor, Layout) else tensor.layout
        mesh, placements = layout.mesh, layout.placements
    elif is_torch_dtensor(tensor):
        mesh, placements = mesh_of(tensor), tensor.placements  # type: ignore[attr-defined]
    else:
        return None, ()
    if any(p.is_partial() for p in placements):
        raise LayoutError(
            "sharded_axes",
            "the tensor must not be a pending reduction",
            "Redistribute it first",
            placements=tuple(placements),
        )
    return mesh, tuple(i for i, p in enumerate(placements) if not p.is_replicate())  # type: ignore[return-value]
