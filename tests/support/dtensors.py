# SPDX-License-Identifier: Apache-2.0
"""What tests of DTensors share: seeded tensors, and comparisons with whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyper_parallel import DTensor, distribute_tensor, init_device_mesh
from hyper_parallel.core import Placement, Shard
from hyper_parallel.runtime import DeviceMesh
from support.dense import cut
from support.device import DEVICE, DTYPE


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Draw a tensor that is the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(DEVICE, dtype)


def line(size: int) -> DeviceMesh:
    """Make a mesh of one axis."""
    return init_device_mesh(DEVICE, (size,), mesh_dim_names=("tp",))


def laid(
    whole: torch.Tensor, mesh: DeviceMesh, *placements: Placement, requires_grad: bool = False
) -> DTensor:
    """Distribute a tensor; a leaf."""
    placed = distribute_tensor(whole.detach(), mesh, placements)
    return placed.requires_grad_(requires_grad)


def parameter(whole: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> torch.nn.Parameter:
    """Distribute a tensor as a parameter."""
    return torch.nn.Parameter(laid(whole, mesh, *placements))


def same(ours: torch.Tensor, whole: torch.Tensor) -> None:
    """Check a DTensor against the whole tensor, its global shape and dtype included."""
    assert isinstance(ours, DTensor)
    assert ours.shape == whole.shape
    assert ours.dtype == whole.dtype
    ours = ours.detach()
    assert tuple(ours.to_local().shape) == ours.layout.local_shape(ours.device_mesh.get_rank())
    torch.testing.assert_close(ours.full_tensor(), whole.detach(), equal_nan=True)


def part(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """Cut this rank's piece, without the library: torch.chunk, axis by axis."""
    assert mesh.get_coordinate() is not None
    for size, index, placement in zip(mesh.shape, mesh.my_coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            whole = cut(whole, placement.dim, index, size)
    return whole
