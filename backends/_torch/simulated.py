# SPDX-License-Identifier: Apache-2.0
"""SimulatedBackend: collectives among the simulated ranks of this process, on torch tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from hyper_parallel.backends._torch.ops import TorchOps
from hyper_parallel.backends._torch.rank_state import TorchState, carry_modes
from hyper_parallel.backends._torch.simulated_collectives import (
    REDUCES,
    SimulatedCommunicator,
    SimulatedGroup,
)
from hyper_parallel.core.mesh import AbstractMesh
from hyper_parallel.errors import BackendError
from hyper_parallel.runtime.baton import Baton, current_rank
from hyper_parallel.runtime.calls import Call
from hyper_parallel.runtime.interface import ArrayOps, Capabilities
from hyper_parallel.runtime.process_state import standard_parts
from hyper_parallel.runtime.registry import backend_for

__all__ = ["SimulatedBackend"]


class SimulatedBackend:
    """All ranks of one simulated run; which rank asks is read off the thread.

    Args:
        world_size: number of simulated ranks.
        device_type: where their tensors live; default torch's default device. On the CPU all works
            that torch can do; on another device what its backend can do, and no more.

    Raises:
        BackendError: the device cannot be used here.
    """

    def __init__(self, world_size: int, device_type: str | None = None) -> None:
        self.name = "simulated"
        self.device_type = device_type or torch.get_default_device().type
        self.capabilities = Capabilities(
            uneven_gather=True, native_avg=True, checks_calls=True, reduces=REDUCES
        )
        self.ops: ArrayOps = TorchOps()
        if self.device_type not in ("cpu", "meta"):
            real = backend_for(self.device_type)
            self.capabilities = replace(real.capabilities, checks_calls=True, fused=None)
            self.ops = real.ops
        self._reduces = (self.capabilities.reduces or REDUCES) | self.capabilities.widens
        self.world_size = world_size
        self._serials = itertools.count(1)
        self.baton = Baton(world_size, [*standard_parts(), TorchState(self.device_type)])

    def carry(self) -> Callable[[], AbstractContextManager[None]]:
        """Read the caller's modes; give a context that enters them on a rank's thread."""
        return carry_modes(self.device_type)

    def unavailable(self) -> str | None:
        """Say None: no hardware is needed."""
        return None

    def start(self, mesh: AbstractMesh) -> None:
        """Refuse a mesh that the simulated world is too small for."""
        needed = max(mesh.ranks) + 1
        if needed > self.world_size:
            raise BackendError(
                "init_device_mesh",
                f"every rank of the mesh must be below the world size {self.world_size}",
                f"Use simulate({needed}), or make a smaller mesh",
                mesh_shape=mesh.shape,
                world_size=self.world_size,
            )

    def rank(self) -> int:
        """Give the rank that this thread runs."""
        rank = current_rank()
        if rank is None:
            raise BackendError(
                "simulate",
                "simulated ranks exist only while the simulated function runs",
                "Use meshes inside the function, on the rank's own thread",
                rank=rank,
            )
        return rank

    def make_groups(self, mesh: AbstractMesh) -> list[SimulatedGroup]:
        """Check over the whole world that all ranks make the same mesh."""
        facts = {"device_type": mesh.device_type, "shape": mesh.shape, "ranks": mesh.ranks}
        call = Call.of("DeviceMesh", **facts, names=mesh.mesh_dim_names)
        serial, me = self._agree(tuple(range(self.world_size)), call), self.rank()
        return [SimulatedGroup(mesh.group_ranks(i, rank=me), serial, me) for i in range(mesh.ndim)]

    def make_group(self, ranks: tuple[int, ...], name: str) -> SimulatedGroup:
        """Make a group of any ranks; they agree on it."""
        serial = self._agree(ranks, Call.of("make_group", name=name))
        return SimulatedGroup(ranks, serial, self.rank())

    def group_ranks(self, group: SimulatedGroup) -> tuple[int, ...]:
        """List the ranks of a group."""
        return group.ranks

    def communicator(self, group: SimulatedGroup, ranks: tuple[int, ...]) -> SimulatedCommunicator:
        """Give the collectives of a group for this rank."""
        own = SimulatedGroup(ranks, group.serial, self.rank())
        return SimulatedCommunicator(
            self.baton, own, device_type=self.device_type, reduces=self._reduces
        )

    def framework_mesh(self, mesh: Any) -> None:
        """Give none: torch's mesh has no simulated groups."""

    def wrap_mesh(self, mesh: Any) -> Any:
        """Refuse the framework's mesh: it has no simulated groups.

        Raises:
            BackendError: always.
        """
        raise BackendError(
            "simulate",
            "a mesh must be made of simulated ranks",
            "Use hyper_parallel.init_device_mesh inside simulate",
            device_mesh=type(mesh).__qualname__,
        )

    def index_array(self, mesh: AbstractMesh) -> torch.Tensor:
        """Give the mesh's ranks as an int tensor, as torch's DeviceMesh.mesh is."""
        return torch.tensor(mesh.ranks, dtype=torch.int, device="cpu").reshape(mesh.shape)

    def device(self) -> torch.device:
        """Give the device that all ranks' tensors live on."""
        return torch.device(self.device_type)

    def _agree(self, ranks: tuple[int, ...], call: Call) -> int:
        """Agree with other ranks on a call; give it a serial."""
        return self.baton.exchange(
            ranks, call, combine=lambda brought: [next(self._serials)] * len(brought)
        )
