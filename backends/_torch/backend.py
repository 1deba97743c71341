# SPDX-License-Identifier: Apache-2.0
"""TorchBackend: what the backends on torch share. Process groups are torch's own."""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from hyper_parallel.backends._torch.communicator import TorchCommunicator
from hyper_parallel.backends._torch.dtypes import DtypeSupport
from hyper_parallel.backends._torch.groups import joint_group, mesh_groups
from hyper_parallel.backends._torch.ops import TorchOps
from hyper_parallel.backends._torch.world import start_world
from hyper_parallel.core.mesh import AbstractMesh, nested_ranks
from hyper_parallel.errors import BackendError
from hyper_parallel.runtime.interface import ArrayOps, Capabilities
from hyper_parallel.runtime.mesh import DeviceMesh

__all__ = ["TorchBackend"]


class TorchBackend:
    """One device type of torch with one collective library.

    A backend sets the class attributes and `_missing`. It holds no process group: those are looked
    up where they are used, so nothing is stale after the default group was made anew.
    """

    name: str
    device_type: str
    library: str
    capabilities: Capabilities
    dtypes: DtypeSupport
    ops: ArrayOps = TorchOps()

    def __init__(self) -> None:
        # By identity of the torch mesh: it is alive as long as our mesh, whose handle it is.
        self._wrapped: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()

    def unavailable(self) -> str | None:
        """Say why this backend cannot be used here, or None."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if not dist.is_available():
                    return "torch was built without distributed; install a build that has it"
                return self._missing()
        except Exception as error:  # a broken driver may raise anything
            return f"{type(error).__name__}: {error}"

    def _missing(self) -> str | None:
        """Say what is missing and what to do, or None; may raise."""
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """Name the devices and the versions of the libraries, for the doctor; once available."""
        libraries = {"torch": torch.__version__, **self._libraries()}
        if self.device_type == "cpu":
            return {"devices": [f"{os.cpu_count()} cores"], "libraries": libraries}
        module = torch.get_device_module(self.device_type)
        names = [module.get_device_name(i) for i in range(module.device_count())]
        return {"devices": names, "libraries": libraries}

    def _libraries(self) -> dict[str, str]:
        """Give the versions of what is below torch."""
        return {}

    def start(self, mesh: AbstractMesh) -> None:
        """Start the default process group if there is none, and choose the current device.

        Raises:
            BackendError: the world cannot be started, or is smaller than the mesh.
        """
        start_world(self.device_type, self.library)
        world = dist.get_world_size()
        if max(mesh.ranks) >= world:
            raise BackendError(
                "DeviceMesh",
                f"every rank of the mesh must be below the world size {world}",
                "Start as many processes as the mesh has ranks (torchrun --nproc-per-node), or"
                " make a smaller mesh",
                mesh_shape=mesh.shape,
                world_size=world,
            )

    def rank(self) -> int:
        """Give this process's global rank."""
        return dist.get_rank()

    def make_groups(self, mesh: AbstractMesh) -> list[dist.ProcessGroup]:
        """Make the groups that do not exist; collective over the world."""
        return mesh_groups(mesh)

    def make_group(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        """Make the group of some ranks if there is none; collective over them."""
        return joint_group(ranks, f"mesh_{name}")

    def group_ranks(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """List the ranks of a group as torch does, sorted."""
        return tuple(dist.get_process_group_ranks(group))

    def communicator(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> TorchCommunicator:
        """Give the collectives of a group for this rank."""
        return TorchCommunicator(
            group,
            ranks,
            self.device_type,
            dtypes=self.dtypes,
            uneven=self.capabilities.uneven_gather,
        )

    def framework_mesh(self, mesh: DeviceMesh) -> TorchMesh:
        """Give torch's mesh on the groups of ours: of a slice torch's slice, where it has one."""
        made = _slice(mesh) or _torch_mesh(mesh)
        self._wrapped[id(made)] = mesh
        return made

    def wrap_mesh(self, mesh: TorchMesh) -> DeviceMesh:
        """Give our mesh on the groups of a torch mesh; the same one while it is in use."""
        found = self._wrapped.get(id(mesh))
        if found is None:
            shape, ranks = nested_ranks(mesh.mesh)
            names = mesh.mesh_dim_names
            abstract = AbstractMesh(mesh.device_type, shape, ranks=ranks, mesh_dim_names=names)
            groups = [] if mesh.get_coordinate() is None else mesh.get_all_groups()
            found = DeviceMesh.attached(abstract, self, groups)
            found.handle = mesh
            self._wrapped[id(mesh)] = found
        return found

    def index_array(self, mesh: AbstractMesh) -> torch.Tensor:
        """Give the mesh's ranks as an int32 CPU tensor, as torch's `mesh.mesh`."""
        return torch.tensor(mesh.ranks, dtype=torch.int, device="cpu").reshape(mesh.shape)

    def device(self) -> torch.device:
        """Give the device that this rank's tensors live on."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        module = torch.get_device_module(self.device_type)
        return torch.device(self.device_type, module.current_device())


def _slice(mesh: DeviceMesh) -> TorchMesh | None:
    """Give torch's slice of the mesh's parent; torch has it in the parent's order of axes only."""
    names = mesh.mesh_dim_names
    if mesh.parent is None or names is None:
        return None
    try:
        found = mesh.parent.handle[names]
    except (KeyError, RuntimeError):
        return None
    return found if tuple(found.mesh.flatten().tolist()) == mesh.ranks else None


def _torch_mesh(mesh: DeviceMesh) -> TorchMesh:
    """Make torch's mesh on groups that exist; outside the mesh there are none."""
    ranks, groups, names = mesh.mesh, mesh.groups, mesh.mesh_dim_names
    if not groups:
        return TorchMesh(mesh.device_type, ranks, mesh_dim_names=names, _init_backend=False)
    if mesh.ndim == 1 and list(mesh.ranks) == dist.get_process_group_ranks(groups[0]):
        return TorchMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=names)
    # torch wants names here.
    return TorchMesh.from_group(
        list(groups), mesh.device_type, ranks, mesh_dim_names=mesh.axis_names
    )
