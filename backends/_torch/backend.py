# SPDX-License-Identifier: Apache-2.0
"""TorchBackend: what the backends on torch share. Groups and meshes are torch's own.

The handle of a mesh is torch's DeviceMesh, so both sides use the same process groups.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from hyper_parallel.backends._torch.communicator import TorchCommunicator
from hyper_parallel.backends._torch.dtypes import DtypeSupport
from hyper_parallel.backends._torch.groups import joint_group, mesh_groups
from hyper_parallel.backends._torch.ops import TorchOps
from hyper_parallel.backends._torch.world import start_world
from hyper_parallel.core.mesh import AbstractMesh, nest_ranks, nested_ranks
from hyper_parallel.errors import LayoutError, describe
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
        """Start the default process group if there is none, and choose the current device."""
        del mesh
        start_world(self.device_type, self.library)

    def rank(self) -> int:
        """Give this process's global rank."""
        return dist.get_rank()

    def world_size(self) -> int:
        """Give the number of ranks in the world."""
        return dist.get_world_size()

    def prepare(self, mesh: AbstractMesh) -> TorchMesh:
        """Make torch's mesh, and the groups that it lacks; collective over the world."""
        handle = _torch_mesh(mesh, mesh_groups(mesh))
        if isinstance(mesh, DeviceMesh):
            self._wrapped[id(handle)] = mesh
        return handle

    def group(self, handle: TorchMesh, axis: int) -> dist.ProcessGroup:
        """Give torch's process group of one axis."""
        return handle.get_group(axis)

    def slice_handle(self, handle: TorchMesh, names: tuple[str, ...]) -> TorchMesh:
        """Give torch's submesh, with the axes in any order; makes no group."""
        own = handle.mesh_dim_names or ()
        axes = [own.index(name) for name in names]
        try:
            return handle[names]
        except KeyError:  # torch slices in ascending order only, and not every axis of size 1
            ranks = _slice(handle, axes)
            groups = [handle.get_group(axis) for axis in axes]
            return TorchMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=names)

    def flatten_handle(self, mesh: DeviceMesh, name: str) -> TorchMesh:
        """Give a 1-axis torch mesh over all ranks of `mesh`; collective over those ranks."""
        one = mesh.ndim == 1
        group = mesh.handle.get_group(0) if one else joint_group(mesh.ranks, f"mesh_{name}")
        ranks = mesh.handle.mesh.flatten()
        return TorchMesh.from_group([group], self.device_type, ranks, mesh_dim_names=(name,))

    def adopt_groups(
        self,
        group: Any,
        device_type: str,
        mesh: Any,
        mesh_dim_names: tuple[str, ...] | None,
    ) -> tuple[AbstractMesh, TorchMesh]:
        """Describe process groups that exist already as a mesh and torch's mesh on them."""
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        if mesh is None and len(groups) == 1:
            mesh = dist.get_process_group_ranks(groups[0])
        if mesh is None:
            text = "mesh must be given for several groups"
            raise LayoutError(
                describe("from_group", text, "Pass the ranks, one axis per group", mesh=mesh)
            )
        shape, ranks = nested_ranks(mesh)
        abstract = AbstractMesh(device_type, shape, ranks=ranks, mesh_dim_names=mesh_dim_names)
        _check_groups(abstract, groups)
        handle = TorchMesh.from_group(
            groups, device_type, _index_tensor(abstract), mesh_dim_names=abstract.axis_names
        )
        return abstract, handle

    def wrap_mesh(self, mesh: TorchMesh) -> DeviceMesh:
        """Give our mesh on the groups of a torch mesh; the same one while it is in use."""
        found = self._wrapped.get(id(mesh))
        if found is None:
            shape, ranks = nested_ranks(mesh.mesh)
            names = mesh.mesh_dim_names
            abstract = AbstractMesh(mesh.device_type, shape, ranks=ranks, mesh_dim_names=names)
            found = DeviceMesh.attached(abstract, self, mesh)
            self._wrapped[id(mesh)] = found
        return found

    def communicator(self, mesh: AbstractMesh, handle: TorchMesh, axis: int) -> TorchCommunicator:
        """Give the collectives of one axis for this rank."""
        ranks = mesh.group_ranks(axis, rank=dist.get_rank())
        return self._communicator(handle.get_group(axis), ranks)

    def joint_communicator(self, mesh: Any, axes: tuple[int, ...]) -> TorchCommunicator:
        """Make the group of several axes for this rank; collective over its ranks."""
        ranks = mesh.submesh_ranks(axes, rank=dist.get_rank())
        name = "_".join(mesh.axis_names[axis] for axis in axes)
        return self._communicator(joint_group(ranks, f"mesh_{name}"), ranks)

    def union_communicator(self, ranks: tuple[int, ...]) -> TorchCommunicator:
        """Make a group of any ranks; collective over them."""
        return self._communicator(joint_group(ranks, "union"), ranks)

    def _communicator(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> TorchCommunicator:
        return TorchCommunicator(
            group,
            ranks,
            self.device_type,
            dtypes=self.dtypes,
            uneven=self.capabilities.uneven_gather,
        )

    def index_array(self, mesh: AbstractMesh) -> torch.Tensor:
        """Give the mesh's ranks as an int32 CPU tensor, as torch's `mesh.mesh`."""
        return _index_tensor(mesh)

    def device(self) -> torch.device:
        """Give the device that this rank's tensors live on."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        module = torch.get_device_module(self.device_type)
        return torch.device(self.device_type, module.current_device())


def _index_tensor(mesh: AbstractMesh) -> torch.Tensor:
    return torch.tensor(nest_ranks(mesh.ranks, mesh.shape), dtype=torch.int, device="cpu")


def _slice(handle: TorchMesh, axes: Sequence[int]) -> torch.Tensor:
    """Give the ranks over `axes`, in that order, at this rank's place on the other axes."""
    place = handle.get_coordinate()
    assert place is not None
    other = [axis for axis in range(handle.ndim) if axis not in axes]
    ranks = handle.mesh.permute(*other, *axes)
    return ranks[tuple(place[axis] for axis in other)].contiguous()


def _torch_mesh(mesh: AbstractMesh, groups: Sequence[dist.ProcessGroup]) -> TorchMesh:
    """Make torch's mesh on groups that exist; outside the mesh there are none."""
    ranks, names = _index_tensor(mesh), mesh.mesh_dim_names
    if not groups:
        return TorchMesh(mesh.device_type, ranks, mesh_dim_names=names, _init_backend=False)
    if mesh.ndim == 1 and list(mesh.ranks) == dist.get_process_group_ranks(groups[0]):
        return TorchMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=names)
    # torch wants names here.
    return TorchMesh.from_group(
        list(groups), mesh.device_type, ranks, mesh_dim_names=mesh.axis_names
    )


def _check_groups(mesh: AbstractMesh, groups: Sequence[dist.ProcessGroup]) -> None:
    rank = dist.get_rank()
    found = [sorted(dist.get_process_group_ranks(group)) for group in groups]
    wanted = [sorted(mesh.group_ranks(axis, rank=rank)) for axis in range(mesh.ndim)]
    if found != wanted:
        raise LayoutError(
            describe(
                "from_group",
                f"mesh must list the ranks of each group along its axis ({found})",
                "Pass one axis per group, in the same order",
                mesh=nest_ranks(mesh.ranks, mesh.shape),
            )
        )
