# SPDX-License-Identifier: Apache-2.0
"""Process groups of meshes, one for each set of ranks.

[Note: shared groups] A communicator of NCCL or HCCL holds device memory (hundreds of megabytes on
an NPU), so meshes share the group of equal rank sets. A mesh is made by the whole world, and every
rank knows of every group made so; a joint group is made by its members alone, and the others learn
of it when the next mesh is made. Groups are made in one order on all ranks: by axis, then by row.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.core.mesh import AbstractMesh
from hyper_parallel.errors import BackendError, describe
from hyper_parallel.runtime.interface import Communicator

__all__ = ["joint_group", "mesh_groups"]

Ranks = tuple[int, ...]


class _Known:
    """What this process knows of the groups in one world.

    Args:
        world: the default group.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = weakref.ref(world)
        # Every rank of the world has the same keys here; the value is None outside the group.
        self.by_all: dict[Ranks, dist.ProcessGroup | None] = {}
        # Made by members alone; only they have the key.
        self.by_members: dict[Ranks, dist.ProcessGroup] = {}


_known: _Known | None = None


def mesh_groups(mesh: AbstractMesh) -> list[dist.ProcessGroup]:
    """Give this rank's group along each axis; an empty list outside the mesh.

    Communicates:
        Over the world: one exchange of what joint groups there are, and what it takes to make each
        group that does not exist.
    """
    known = _here()
    _tell_joint_groups(known)
    rank = dist.get_rank()
    for axis in range(mesh.ndim):
        rows = dict.fromkeys(mesh.group_ranks(axis, rank=one) for one in mesh.ranks)
        for row in rows:
            ranks = tuple(sorted(row))
            if ranks not in known.by_all:
                made = dist.new_group(list(ranks), group_desc=f"mesh_{mesh.axis_names[axis]}")
                known.by_all[ranks] = made if rank in ranks else None
    if mesh.coordinate(rank) is None:
        return []
    found = (
        known.by_all[tuple(sorted(mesh.group_ranks(axis, rank=rank)))] for axis in range(mesh.ndim)
    )
    return [cast(dist.ProcessGroup, group) for group in found]


def joint_group(mesh: Any, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """Give the group over several axes of a DeviceMesh, made by its ranks alone if there is none.

    Raises:
        BackendError: the default group is bound to a device.
    """
    known = _here()
    ranks = tuple(sorted(mesh.submesh_ranks(axes, rank=dist.get_rank())))
    found = known.by_all.get(ranks) or known.by_members.get(ranks)
    if found is not None:
        return found
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    if world.bound_device_id is not None:
        raise BackendError(
            describe(
                "DeviceMesh",
                "the default process group must not be bound to a device to join mesh axes",
                "Start the default group without device_id",
                device_id=str(world.bound_device_id),
            )
        )
    _level_group_counts([mesh.communicator(axis) for axis in axes if mesh.shape[axis] > 1])
    name = "_".join(mesh.axis_names[axis] for axis in axes)
    made = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"mesh_{name}")
    known.by_members[ranks] = cast(dist.ProcessGroup, made)
    return known.by_members[ranks]


def _here() -> _Known:
    """Give what is known in this world, nothing in a new one."""
    global _known
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    if _known is None or _known.world() is not world:
        _known = _Known(world)
        _known.by_all[tuple(range(dist.get_world_size()))] = world
    return _known


def _tell_joint_groups(known: _Known) -> None:
    """Let every rank of the world know of the groups that only their members know."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, list(known.by_members))
    for ranks in dict.fromkeys(ranks for one in told for ranks in one):
        known.by_all.setdefault(ranks, known.by_members.pop(ranks, None))


def _level_group_counts(communicators: Sequence[Communicator]) -> None:
    """Give all ranks that can be reached over these axes the same number of groups.

    torch names a group that its members alone make by their ranks and by how many groups a process
    has. Members that have different numbers wait for each other under different names, for ever. So
    those that have fewer add groups of their own rank only, which take no peer and no connection.
    """
    names: dict[Any, Any] = distributed_c10d._world.pg_names
    count = len(names)
    for comm in communicators:
        count = max(n for (n,) in comm.all_gather_ints([count]))
    while len(names) < count:
        dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="level")
