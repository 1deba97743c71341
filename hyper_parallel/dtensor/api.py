# SPDX-License-Identifier: Apache-2.0
"""distribute_tensor and distribute_module: from whole tensors to DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.core import Layout, Placement, Replicate, Shard
from hyper_parallel.dtensor.local_op import Lend
from hyper_parallel.dtensor.moves import move
from hyper_parallel.dtensor.read import (
    read_mesh,
    read_placements,
    refuse_other_tensors,
    refuse_pending,
)
from hyper_parallel.dtensor.tensor import DTensor
from hyper_parallel.dtensor.wrapping import wrap
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.rows import scatter_from

__all__ = ["distribute_module", "distribute_tensor"]


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Cut or copy a whole tensor over a mesh.

    Args:
        tensor: the whole tensor, any shape and dtype; the same on all ranks if `src_data_rank`
            is None.
        device_mesh: the mesh; default the one of the enclosing `with mesh:` block.
        placements: one per mesh axis; default Replicate on each.
        src_data_rank: the position along each mesh axis whose data counts; None takes every
            rank's own data without communication.

    Returns:
        The DTensor; a leaf if `tensor` is one, with its requires_grad. A non-leaf stays
        differentiable.

    Communicates:
        Forward: per axis one scatter (Shard) or broadcast from `src_data_rank`; nothing if None, or
        for a meta tensor.
        Backward (non-leaf only): the move to Replicate.

    Raises:
        LayoutError: placements that do not fit the tensor, or a DTensor in another layout.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, distribute_tensor, init_device_mesh, simulate
        >>> @simulate(4)
        ... def sizes():
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     return tuple(distribute_tensor(torch.rand(5, 3), mesh, [Shard(0)]).to_local().shape)
        >>> sizes()
        [(2, 3), (2, 3), (1, 3), (0, 3)]
    """
    where = "distribute_tensor"
    refuse_other_tensors(tensor, where)
    mesh = read_mesh(device_mesh, where)
    layout = Layout.of(mesh, read_placements(placements, mesh, where), tuple(tensor.shape))
    refuse_pending(tensor.dtype, layout.placements, where)
    if src_data_rank is not None and not 0 <= src_data_rank < min(mesh.shape):
        raise LayoutError(
            where,
            f"src_data_rank must be a position on every axis of {mesh!r}, or None",
            "Pass the position whose data counts",
            src_data_rank=src_data_rank,
        )
    if isinstance(tensor, DTensor):
        if tensor.layout == layout:
            return tensor
        raise LayoutError(
            where,
            "tensor must be plain, or a DTensor in this very layout",
            "Use redistribute to move a DTensor",
            tensor=tensor.layout,
            placements=layout.placements,
        )
    if mesh.get_coordinate() is None:
        return DTensor(tensor.new_empty(0), layout, requires_grad=tensor.requires_grad)
    with torch.no_grad():
        local = _cut(tensor.detach(), layout, src_data_rank)
    if not tensor.is_leaf:  # every rank's copy gets the full gradient
        back = (layout.cotangent, layout.replicated)
        return wrap(DTensor, Lend.apply(tensor, local, (layout, layout), back, None), layout)  # type: ignore[arg-type]
    result = DTensor(local, layout, requires_grad=tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(result, requires_grad=tensor.requires_grad)  # type: ignore[return-value]
    return result


def _cut(tensor: torch.Tensor, layout: Layout, src_data_rank: int | None) -> torch.Tensor:
    """Give this rank's part of a whole tensor."""
    mesh = layout.mesh
    assert isinstance(mesh, DeviceMesh)  # noqa: S101
    whole = layout.replicated
    if src_data_rank is None or mesh.size() == 1 or tensor.is_meta:
        local = move(tensor, whole, layout)
        return local.clone() if local is tensor else local
    # Strided and packed pieces are cut from a whole copy on each rank.
    simple = all(p.cut_dim is None or isinstance(p, Shard) for p in layout.placements)
    sent = layout.with_placements(
        [p if simple and isinstance(p, Shard) else Replicate() for p in layout.placements]
    )
    local: torch.Tensor = tensor.contiguous()
    for axis, placement in enumerate(sent.placements):
        local = _send_along(local, mesh, axis, placement, src_data_rank)
    return move(local, sent, layout)


def _send_along(
    local: torch.Tensor, mesh: DeviceMesh, axis: int, placement: Placement, src: int
) -> torch.Tensor:
    """Take the data of position `src` of one axis: its piece for Shard, else a copy."""
    if mesh.shape[axis] == 1:
        return local.clone()
    comm = mesh.communicator(axis)
    if isinstance(placement, Shard):
        mine = local if comm.rank == src else None
        return scatter_from(mesh, axis, mine, local, placement, src)
    return comm.broadcast(local.clone(), src) if local.numel() else local.clone()


def distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
) -> nn.Module:
    """Make every parameter and buffer of a module a DTensor.

    Args:
        module: the module; changed in place.
        device_mesh: the mesh; default the one of the enclosing `with mesh:` block.
        partition_fn: called with (name, submodule, mesh) for every submodule, to distribute
            parameters; what it leaves plain is replicated.
        input_fn: called with (module, inputs, mesh) before forward; its result replaces them.
        output_fn: called with (module, outputs, mesh) after forward; its result replaces them.

    Returns:
        The module.

    Communicates:
        As distribute_tensor, for each parameter and buffer.
    """
    mesh = read_mesh(device_mesh, "distribute_module")
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate_rest(submodule, mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, _, outputs: output_fn(mod, outputs, mesh))
    return module


def _replicate_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, param in module.named_parameters(recurse=False):
        if not isinstance(param, DTensor):
            module.register_parameter(name, distribute_tensor(param, mesh))  # type: ignore[arg-type]
    for name, buffer in module.named_buffers(recurse=False):
        if not isinstance(buffer, DTensor):
            module._buffers[name] = distribute_tensor(buffer, mesh)
