# SPDX-License-Identifier: Apache-2.0
"""Process groups of meshes, one for each set of ranks.

[Note: shared groups] A communicator of NCCL or HCCL holds device memory (hundreds of megabytes on
an NPU), so meshes share the group of equal rank sets. A mesh is made by the whole world, and every
rank knows of every group made so; a joint group is made by its members alone, and the others learn
of it when the next mesh is made. Groups are made in one order on all ranks: by axis, then by row.

[Note: threads at exit] A process whose groups outlive `destroy_process_group` now and then aborts
at its end ("terminate called without an active exception"; seen with gloo, with torch alone, too).
Which thread does is not known. The groups of a destroyed world end with the last mesh that has
them; meshes are in cycles with their plans, so they are collected before Python ends.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import weakref
from collections import Counter
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.core.mesh import AbstractMesh
from hyper_parallel.errors import BackendError

__all__ = ["joint_group", "mesh_groups"]

Ranks = tuple[int, ...]


class _Known:
    """What this process knows of the groups in one world.

    Args:
        world: the default group.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        # Not held: when the world ends, so do its groups and their threads.
        self.world = weakref.ref(world, _forget)
        self.all_ranks = tuple(range(dist.get_world_size()))
        # Every rank of the world has the same keys here; the value is None outside the group.
        self.by_all: dict[Ranks, dist.ProcessGroup | None] = {}
        # Made by members alone; only they have the key.
        self.by_members: dict[Ranks, dist.ProcessGroup] = {}

    def __contains__(self, ranks: Ranks) -> bool:
        """Tell whether every rank of the world knows of this group."""
        return ranks == self.all_ranks or ranks in self.by_all

    def group(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """Give the group of some ranks, None if there is none with this rank."""
        if ranks == self.all_ranks:
            return self.world()
        return self.by_all.get(ranks) or self.by_members.get(ranks)


_known: _Known | None = None


def _forget(world: weakref.ref[dist.ProcessGroup]) -> None:
    """Drop the groups of a world that has ended."""
    global _known
    if _known is not None and _known.world is world:
        _known = None


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
            if ranks not in known:
                made = dist.new_group(list(ranks), group_desc=f"mesh_{mesh.axis_names[axis]}")
                known.by_all[ranks] = cast(dist.ProcessGroup, made) if rank in ranks else None
    if mesh.coordinate(rank) is None:
        return []
    found = (
        known.group(tuple(sorted(mesh.group_ranks(axis, rank=rank)))) for axis in range(mesh.ndim)
    )
    return [cast(dist.ProcessGroup, group) for group in found]


def joint_group(ranks: Ranks, name: str) -> dist.ProcessGroup:
    """Give the group of some ranks, made by them alone if there is none.

    Communicates:
        Where it is made: through the store, over its ranks.

    Raises:
        BackendError: the default group is bound to a device.
    """
    known = _here()
    ranks = tuple(sorted(ranks))
    found = known.group(ranks)
    if found is not None:
        return found
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    if world.bound_device_id is not None:
        raise BackendError(
            "DeviceMesh",
            "the default process group must not be bound to a device to join mesh axes",
            "Start the default group without device_id",
            device_id=str(world.bound_device_id),
        )
    _level_group_counts(ranks)
    made = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)
    known.by_members[ranks] = cast(dist.ProcessGroup, made)
    return known.by_members[ranks]


def _let_go() -> None:
    """End the groups of destroyed worlds; see [Note: threads at exit]."""
    gc.collect()


def _here() -> _Known:
    """Give what is known in this world, nothing in a new one."""
    global _known
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    if _known is None or _known.world() is not world:
        _known = _Known(world)
        atexit.unregister(_let_go)
        atexit.register(_let_go)
    return _known


def _tell_joint_groups(known: _Known) -> None:
    """Let every rank of the world know of the groups that only their members know."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, list(known.by_members))
    for ranks in dict.fromkeys(ranks for one in told for ranks in one):
        known.by_all.setdefault(ranks, known.by_members.pop(ranks, None))


# How many groups this process has made of the same ranks; every one of those ranks counts alike.
_made: Counter[Ranks] = Counter()


def _level_group_counts(members: Ranks) -> None:
    """Give all ranks of a group to be made the same number of groups.

    torch names a group that its members alone make by their ranks and by how many groups a process
    has. Members that have different numbers wait for each other under different names, for ever. So
    those that have fewer add groups of their own rank only, which take no peer and no connection.
    They agree through the store, for no group need connect them yet.
    """
    if dist.get_backend() == "fake":  # one process stands for all
        return
    world: Any = distributed_c10d._world
    names, (_, store) = world.pg_names, world.pg_map[dist.group.WORLD]
    rank = dist.get_rank()
    _made[members] += 1
    text = f"{members} {_made[members]}".encode()
    key = f"hyper_parallel/{hashlib.sha1(text, usedforsecurity=False).hexdigest()}"
    store.set(f"{key}/{rank}", str(len(names)))
    if rank == members[0]:
        most = max(int(store.get(f"{key}/{member}")) for member in members)
        store.set(key, str(most))
    count = int(store.get(key))
    while len(names) < count:
        dist.new_group([rank], use_local_synchronization=True, group_desc="level")
