# SPDX-License-Identifier: Apache-2.0
"""SimulatedBackend: collectives among the simulated ranks of this process, on torch tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from hyper_parallel.backends._torch.ops import TorchOps
from hyper_parallel.backends._torch.rank_state import TorchState, carry_modes
from hyper_parallel.backends._torch.simulated_collectives import (
    REDUCES,
    SimulatedCommunicator,
    SimulatedGroup,
)
from hyper_parallel.core.mesh import AbstractMesh, nested_ranks
from hyper_parallel.errors import BackendError, LayoutError, describe
from hyper_parallel.runtime.baton import Baton, current_rank
from hyper_parallel.runtime.calls import Call
from hyper_parallel.runtime.interface import ArrayOps, Capabilities
from hyper_parallel.runtime.registry import backend_for

__all__ = ["SimulatedBackend", "SimulatedGroup", "SimulatedMesh"]


@dataclass(frozen=True, slots=True)
class SimulatedMesh:
    """A mesh with, for each axis, the serial of the making that made its groups."""

    mesh: AbstractMesh
    serials: tuple[int, ...]


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
        self._reduces = REDUCES
        if self.device_type not in ("cpu", "meta"):
            real = backend_for(self.device_type)
            self.capabilities = replace(real.capabilities, checks_calls=True, fuses=frozenset())
            self.ops = real.ops
            self._reduces = (real.capabilities.reduces or REDUCES) | real.capabilities.widens
        self._world_size = world_size
        self._serials = itertools.count(1)
        self._baton: Baton | None = None

    def parts(self) -> list[TorchState]:
        """List torch's process-wide state, for each rank to own."""
        return [TorchState(self.device_type)]

    def carry(self) -> Callable[[], AbstractContextManager[None]]:
        """Read the caller's modes; give a context that enters them on a rank's thread."""
        return carry_modes(self.device_type)

    def connect(self, baton: Baton) -> None:
        """Take the scheduler whose exchange the collectives use."""
        self._baton = baton

    def unavailable(self) -> str | None:
        """Say None: no hardware is needed."""
        return None

    def start(self, mesh: AbstractMesh) -> None:
        """Refuse a mesh that the simulated world is too small for."""
        needed = max(mesh.ranks) + 1
        if needed > self._world_size:
            raise BackendError(
                describe(
                    "init_device_mesh",
                    f"every rank of the mesh must be below the world size {self._world_size}",
                    f"Use simulate({needed}), or make a smaller mesh",
                    mesh_shape=mesh.shape,
                    world_size=self._world_size,
                )
            )

    def rank(self) -> int:
        """Give the rank that this thread runs."""
        rank = current_rank()
        if rank is None:
            raise BackendError(
                describe(
                    "simulate",
                    "simulated ranks exist only while the simulated function runs",
                    "Use meshes inside the function, on the rank's own thread",
                    rank=rank,
                )
            )
        return rank

    def world_size(self) -> int:
        """Give the number of simulated ranks."""
        return self._world_size

    def prepare(self, mesh: AbstractMesh) -> SimulatedMesh:
        """Check over the whole world that all ranks make the same mesh."""
        world = tuple(range(self._world_size))
        names = mesh.mesh_dim_names
        made = AbstractMesh(mesh.device_type, mesh.shape, ranks=mesh.ranks, mesh_dim_names=names)
        call = Call.of(
            "DeviceMesh",
            device_type=mesh.device_type,
            shape=mesh.shape,
            ranks=mesh.ranks,
            names=names,
        )
        return SimulatedMesh(made, (self._make_groups(world, call),) * mesh.ndim)

    def group(self, handle: SimulatedMesh, axis: int) -> SimulatedGroup:
        """Give one axis's group of this rank; it is empty outside the mesh."""
        rank = self.rank()
        ranks = handle.mesh.group_ranks(axis, rank=rank)
        return SimulatedGroup(ranks, handle.serials[axis], rank)

    def slice_handle(self, handle: SimulatedMesh, names: tuple[str, ...]) -> SimulatedMesh:
        """Give the submesh that this rank is in, on the same groups."""
        whole = handle.mesh
        axes = [whole.axis_index(name) for name in names]
        mesh = AbstractMesh(
            whole.device_type,
            [whole.shape[axis] for axis in axes],
            ranks=whole.submesh_ranks(axes, rank=self.rank()),
            mesh_dim_names=names,
        )
        return SimulatedMesh(mesh, tuple(handle.serials[axis] for axis in axes))

    def flatten_handle(self, mesh: Any, name: str) -> SimulatedMesh:
        """Make the joint group of the mesh's ranks, each of which calls this."""
        handle: SimulatedMesh = mesh.handle
        whole = handle.mesh
        flat = AbstractMesh(
            whole.device_type, (whole.size(),), ranks=whole.ranks, mesh_dim_names=(name,)
        )
        if whole.ndim == 1 or whole.coordinate(self.rank()) is None:
            return SimulatedMesh(flat, handle.serials[:1])
        call = Call.of("flatten", shape=whole.shape, names=whole.mesh_dim_names, name=name)
        return SimulatedMesh(flat, (self._make_groups(whole.ranks, call),))

    def wrap_mesh(self, mesh: Any) -> Any:
        """Refuse the framework's mesh: it has no simulated groups.

        Raises:
            BackendError: always.
        """
        raise BackendError(
            describe(
                "simulate",
                "a mesh must be made of simulated ranks",
                "Use hyper_parallel.init_device_mesh inside simulate",
                device_mesh=type(mesh).__qualname__,
            )
        )

    def adopt_groups(
        self,
        group: SimulatedGroup | Sequence[SimulatedGroup],
        device_type: str,
        mesh: Any,
        mesh_dim_names: tuple[str, ...] | None,
    ) -> tuple[AbstractMesh, SimulatedMesh]:
        """Describe groups of this backend as a mesh.

        Args:
            group: one group, or one per axis.
            device_type: the mesh's.
            mesh: the ranks, nested; default those of the one group.
            mesh_dim_names: one name per axis, or None.

        Returns:
            The mesh, and its handle.

        Raises:
            LayoutError: several groups without ranks, or groups that are not the mesh's.
        """
        groups = [group] if isinstance(group, SimulatedGroup) else list(group)
        if mesh is None and len(groups) == 1:
            mesh = groups[0].ranks
        shape, ranks = ((), ()) if mesh is None else nested_ranks(mesh)
        if not groups or len(shape) != len(groups):
            _refuse_groups(groups, mesh)
        made = AbstractMesh(device_type, shape, ranks=ranks, mesh_dim_names=mesh_dim_names)
        for axis, one in enumerate(groups):
            if made.group_ranks(axis, rank=self.rank()) != one.ranks:
                _refuse_groups(groups, mesh)
        return made, SimulatedMesh(made, tuple(one.serial for one in groups))

    def communicator(
        self, mesh: AbstractMesh, handle: SimulatedMesh, axis: int
    ) -> SimulatedCommunicator:
        """Give the collectives of one axis for this rank."""
        group = self.group(handle, axis)
        return self._communicator(group)

    def joint_communicator(
        self, mesh: AbstractMesh, axes: tuple[int, ...]
    ) -> SimulatedCommunicator:
        """Make the group of several axes for this rank; its ranks agree on it."""
        ranks = mesh.submesh_ranks(axes, rank=self.rank())
        names = tuple(mesh.axis_names[axis] for axis in axes)
        call = Call.of("joint_communicator", shape=mesh.shape, axes=names)
        return self._make_communicator(ranks, call)

    def union_communicator(self, ranks: tuple[int, ...]) -> SimulatedCommunicator:
        """Make a group of any ranks; they agree on it."""
        return self._make_communicator(ranks, Call.of("union_communicator", ranks=ranks))

    def _make_communicator(self, ranks: tuple[int, ...], call: Call) -> SimulatedCommunicator:
        return self._communicator(
            SimulatedGroup(ranks, self._make_groups(ranks, call), self.rank())
        )

    def _communicator(self, group: SimulatedGroup) -> SimulatedCommunicator:
        return SimulatedCommunicator(
            self._connected(), group, device_type=self.device_type, reduces=self._reduces
        )

    def index_array(self, mesh: AbstractMesh) -> torch.Tensor:
        """Give the mesh's ranks as an int tensor, as torch's DeviceMesh.mesh is."""
        return torch.tensor(mesh.ranks, dtype=torch.int, device="cpu").reshape(mesh.shape)

    def device(self) -> torch.device:
        """Give the device that all ranks' tensors live on."""
        return torch.device(self.device_type)

    def _make_groups(self, ranks: tuple[int, ...], call: Call) -> int:
        """Agree with other ranks on a call; give it a serial."""
        return self._connected().exchange(
            ranks, call, combine=lambda brought: [next(self._serials)] * len(brought)
        )

    def _connected(self) -> Baton:
        if self._baton is None:
            raise BackendError(
                describe(
                    "SimulatedBackend", "it must be connected to a run", "Use it through simulate"
                )
            )
        return self._baton


def _refuse_groups(groups: Sequence[SimulatedGroup], mesh: Any) -> NoReturn:
    raise LayoutError(
        describe(
            "from_group",
            f"mesh must list the ranks of each group along its axis ({[g.ranks for g in groups]})",
            "Pass one group per axis, and the ranks of the whole mesh",
            mesh=mesh,
        )
    )
