# SPDX-License-Identifier: Apache-2.0
"""DeviceMesh: an AbstractMesh attached to the backend of this process, with torch's names."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, cast

from hyper_parallel.core.mesh import AbstractMesh, nest_ranks, nested_ranks
from hyper_parallel.errors import BackendError, LayoutError, describe
from hyper_parallel.runtime.checked import CheckedCommunicator, wants_checks
from hyper_parallel.runtime.interface import Backend, Communicator
from hyper_parallel.runtime.registry import backend_for
from hyper_parallel.runtime.watch import introduce

__all__ = ["DeviceMesh", "current_mesh", "init_device_mesh", "restore_mesh"]

_stack = threading.local()
# Every mesh in use, by identity, in the order they were made; unpickling finds an equal one.
_live: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()


class DeviceMesh(AbstractMesh):
    """Ranks on named axes, with this process's place among them and its process groups.

    Making one is collective: every rank of the world takes part, those outside the mesh too.

    Args:
        device_type: such as "cpu", "cuda" or "npu".
        mesh: global ranks as nested lists or an integer array; any order, any subset.
        mesh_dim_names: one name per axis, or None.
        check: compare every collective's call over its group before it starts, at the price of one
            small exchange each, and raise the first difference on every rank; None: as the
            environment variable HYPER_PARALLEL_CHECK says (0 or 1). The same on every rank.

    Communicates:
        Makes one process group per axis and row of the mesh.

    Raises:
        LayoutError: the mesh cannot exist.
        BackendError: unknown device type, wrong world size, or a rank the world does not have.

    Example:
        >>> from hyper_parallel import DeviceMesh, simulate
        >>> @simulate(4)
        ... def ranks_of_tp():
        ...     mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
        ...     return mesh["tp"].ranks, mesh.get_local_rank("tp")
        >>> ranks_of_tp()
        [((0, 2), 0), ((1, 3), 0), ((0, 2), 1), ((1, 3), 1)]
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        check: bool | None = None,
    ) -> None:
        shape, ranks = nested_ranks(mesh)
        shape = shape or (len(ranks),)
        super().__init__(device_type, shape, ranks=ranks, mesh_dim_names=mesh_dim_names)
        backend = backend_for(device_type)
        backend.start(self)
        self._attach(backend, None, wants_checks(check))
        _check_ranks(self, backend)
        self._handle = backend.prepare(self)

    @classmethod
    def attached(
        cls, abstract: AbstractMesh, backend: Backend, handle: Any, parent: DeviceMesh | None = None
    ) -> DeviceMesh:
        """Attach ranks to groups that exist already; for backends and interop."""
        self = cls.__new__(cls)
        AbstractMesh.__init__(
            self,
            abstract.device_type,
            abstract.shape,
            ranks=abstract.ranks,
            mesh_dim_names=abstract.mesh_dim_names,
        )
        self._attach(backend, parent, wants_checks(None) if parent is None else parent.checked)
        self._handle = handle
        return self

    def _attach(self, backend: Backend, parent: DeviceMesh | None, checked: bool) -> None:
        self.backend = backend
        self.checked = checked and not backend.capabilities.checks_calls
        self._parent = parent
        self._my_rank = _rank_of(backend)
        self._my_coordinate = None if self._my_rank is None else self.coordinate(self._my_rank)
        self._communicators: dict[int | tuple[int, ...], Communicator] = {}
        # What the executor worked out for this rank, by plan or layouts; see [Note: programs].
        self.programs: dict[Any, Any] = {}
        self._unions: dict[tuple[int, ...], Communicator] = {}
        self._slices: dict[tuple[str, ...], DeviceMesh] = {}
        # What other rooms have decided for tensors on this mesh; it goes when the mesh goes.
        self.decisions: dict[Any, Any] = {}
        self._hash = hash((self._key(), id(backend), self._my_rank))
        _live[id(self)] = self

    @property
    def handle(self) -> Any:
        """What the backend made for this mesh (torch backends: torch's DeviceMesh)."""
        return self._handle

    @property
    def mesh(self) -> Any:
        """The ranks as the framework's integer array (torch: an int tensor)."""
        return self.backend.index_array(self)

    def get_rank(self) -> int:
        """Give this process's global rank.

        Raises:
            BackendError: this process is every rank of the mesh, as on the "numpy" backend.
        """
        return self.backend.rank() if self._my_rank is None else self._my_rank

    def get_coordinate(self) -> list[int] | None:
        """Give this rank's coordinate, or None outside the mesh."""
        coordinate = self.coordinate(self.get_rank())
        return None if coordinate is None else list(coordinate)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Give this rank's position along an axis; without an axis the mesh must have one.

        Raises:
            LayoutError: several axes and none named, or this rank is outside the mesh.
        """
        return self._here("get_local_rank")[self._one_axis(mesh_dim, "get_local_rank")]

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Give the process group along an axis, as the framework knows it."""
        return self.backend.group(self._handle, self._one_axis(mesh_dim, "get_group"))

    def get_all_groups(self) -> list[Any]:
        """List the process groups of all axes."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def communicator(self, axis: int | tuple[int, ...]) -> Communicator:
        """Give this rank's collectives along an axis, or along several together.

        Args:
            axis: the position of one axis, or several in ascending order; their joint group lists
                its ranks row-major by coordinate.

        Returns:
            The collectives; the same object each time.

        Communicates:
            Makes the joint group of several axes at the first call; collective over its ranks.
        """
        found = self._communicators.get(axis)
        if found is None:
            self._here("communicator")
            if isinstance(axis, int):
                found = self.backend.communicator(self, self._handle, axis)
            else:
                found = self.backend.joint_communicator(self, axis)
            found = self._communicators[axis] = self._introduced(found)
        return found

    def _introduced(self, communicator: Communicator) -> Communicator:
        """Make a new communicator compare calls, if it must, and known to those that watch."""
        if self.checked:
            communicator = CheckedCommunicator(communicator)
        introduce(communicator, self)
        return communicator

    def axes_of(self, communicator: Communicator) -> tuple[str, ...]:
        """Name the axes that a communicator of this mesh is for; none if it is not of this mesh."""
        for axes, own in self._communicators.items():
            if own is communicator:
                return tuple(
                    self.axis_names[i] for i in ((axes,) if isinstance(axes, int) else axes)
                )
        return ()

    def communicator_with(self, other: DeviceMesh) -> Communicator:
        """Give this rank's collectives among the ranks of this mesh and of another one.

        Args:
            other: a mesh with other ranks; this rank is in one of the two.

        Returns:
            The collectives, which list the ranks in ascending order; the same object each time,
            from either mesh.

        Communicates:
            Makes the group at the first call; collective over the ranks of both meshes.
        """
        ranks = tuple(sorted({*self.ranks, *other.ranks}))
        found = self._unions.get(ranks) or other._unions.get(ranks)
        if found is None:
            found = self._introduced(self.backend.union_communicator(ranks))
        self._unions[ranks] = other._unions[ranks] = found
        return found

    @property
    def is_slice(self) -> bool:
        """Whether this is a slice of a larger mesh, and so another one on other ranks."""
        return self._parent is not None and len(self.ranks) < len(self._parent.ranks)

    @property
    def my_coordinate(self) -> tuple[int, ...]:
        """This rank's coordinate.

        Raises:
            LayoutError: this rank is outside the mesh.
        """
        return self._here("DeviceMesh")

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Give the submesh over the named axes that this rank is in.

        Raises:
            LayoutError: the mesh has no names, or not these.
        """
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, tuple) or not all(isinstance(n, str) for n in wanted):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(
                describe(
                    "DeviceMesh",
                    "a mesh is sliced by the names of axes",
                    f"Use mesh[name], or mesh[name, name], of {self.mesh_dim_names}",
                    names=names,
                )
            )
        if wanted == self.mesh_dim_names:
            return self
        found = self._slices.get(wanted)
        if found is None:
            axes = [self.axis_index(name) for name in wanted]
            abstract = AbstractMesh(
                self.device_type,
                [self.shape[axis] for axis in axes],
                ranks=self.submesh_ranks(axes, rank=self.get_rank()),
                mesh_dim_names=wanted,
            )
            handle = self.backend.slice_handle(self._handle, wanted)
            found = DeviceMesh.attached(abstract, self.backend, handle, self._parent or self)
            self._slices[wanted] = found
        return found

    def flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Give the 1-axis mesh over all ranks of this one, row-major.

        Args:
            mesh_dim_name: the new axis's name; default the names joined by "_".

        Returns:
            The mesh; the same one each time.

        Communicates:
            Makes the joint group at the first call; collective over the ranks of this mesh.
        """
        name = mesh_dim_name or "_".join(self.axis_names)
        found = self._slices.get(("flatten", name))
        if found is None:
            abstract = AbstractMesh(
                self.device_type, (self.size(),), ranks=self.ranks, mesh_dim_names=(name,)
            )
            handle = self.backend.flatten_handle(self, name)
            found = DeviceMesh.attached(abstract, self.backend, handle, self._parent or self)
            self._slices["flatten", name] = found
        return found

    @classmethod
    def from_group(
        cls,
        group: Any,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
    ) -> DeviceMesh:
        """Make a mesh on process groups that exist already.

        Args:
            group: one process group, or one per axis.
            device_type: such as "cpu".
            mesh: the ranks; needed for several groups.
            mesh_dim_names: one name per axis.

        Returns:
            The mesh, on these very groups.
        """
        backend = backend_for(device_type)
        abstract, handle = backend.adopt_groups(group, device_type, mesh, mesh_dim_names)
        return cls.attached(abstract, backend, handle)

    def __enter__(self) -> DeviceMesh:
        _meshes().append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _meshes().pop()

    def _here(self, where: str) -> tuple[int, ...]:
        rank = self.get_rank()
        if self._my_coordinate is None:
            raise LayoutError(
                describe(
                    where,
                    f"this rank must be in the mesh (ranks {self.ranks})",
                    f"rank {rank} not in mesh; ask only on the mesh's ranks",
                    rank=rank,
                )
            )
        return self._my_coordinate

    def _one_axis(self, axis: int | str | None, where: str) -> int:
        if axis is not None:
            return self.axis_index(axis)
        if self.ndim != 1:
            raise LayoutError(
                describe(
                    where,
                    "mesh_dim must be given for a mesh of several axes",
                    f"Pass one of {self.axis_names}",
                    mesh_dim=None,
                    mesh=self,
                )
            )
        return 0

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        same_place = self.backend is other.backend and self._my_rank == other._my_rank
        return same_place and self._key() == other._key()

    __hash__ = AbstractMesh.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __reduce__(self) -> Any:
        return restore_mesh, self._key()

    @staticmethod
    def find(
        device_type: str,
        shape: tuple[int, ...],
        ranks: tuple[int, ...],
        names: tuple[str, ...] | None,
    ) -> DeviceMesh:
        """Find this process's newest mesh that equals a pickled one; makes no group.

        Raises:
            LayoutError: there is none.
        """
        backend = backend_for(device_type)
        key, here = (device_type, shape, ranks, names), (backend, _rank_of(backend))
        found = [m for m in _live.values() if m._key() == key and (m.backend, m._my_rank) == here]
        if not found:
            raise LayoutError(
                describe(
                    "DeviceMesh",
                    "a pickled mesh must have an equal one in the process that loads it",
                    "Make the mesh first, with init_device_mesh, and slice it as before",
                    mesh=AbstractMesh(device_type, shape, ranks=ranks, mesh_dim_names=names),
                )
            )
        return found[-1]


def restore_mesh(
    device_type: str,
    shape: tuple[int, ...],
    ranks: tuple[int, ...],
    names: tuple[str, ...] | None,
) -> DeviceMesh:
    """Unpickle a mesh, which must not communicate."""
    return DeviceMesh.find(device_type, shape, ranks, names)


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    check: bool | None = None,
) -> DeviceMesh:
    """Make a mesh over ranks `0 .. prod(mesh_shape) - 1`, row-major.

    Starts the default process group if there is none, and sets the current device from
    LOCAL_RANK, as torch's does.

    Args:
        device_type: such as "cpu", "cuda" or "npu".
        mesh_shape: number of ranks along each axis; their product may be less than the world size.
        mesh_dim_names: one name per axis, or None.
        check: compare every collective's call over its group first; see DeviceMesh.

    Returns:
        The mesh.

    Communicates:
        Makes one process group per axis and row of the mesh.

    Raises:
        BackendError: unknown device type, or the world is smaller than the mesh.
        LayoutError: the mesh cannot exist.

    Example:
        >>> from hyper_parallel import init_device_mesh, simulate
        >>> @simulate(4)
        ... def coordinates():
        ...     return init_device_mesh("cpu", (2, 2)).get_coordinate()
        >>> coordinates()
        [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    if isinstance(mesh_shape, int) or not all(isinstance(n, int) for n in mesh_shape):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(
            describe(
                "init_device_mesh",
                "mesh_shape must be a tuple of ints",
                "Pass the number of ranks along each axis, such as (2,) or (2, 4)",
                mesh_shape=mesh_shape,
            )
        )
    shape = tuple(mesh_shape)
    ranks = nest_ranks(range(math.prod(shape)), shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, check=check)


def current_mesh() -> DeviceMesh | None:
    """Give the mesh of the innermost `with mesh:` block, or None."""
    stack = _meshes()
    return stack[-1] if stack else None


def _meshes() -> list[DeviceMesh]:
    meshes = cast("list[DeviceMesh] | None", getattr(_stack, "meshes", None))
    if meshes is None:
        meshes = _stack.meshes = []
    return meshes


def _rank_of(backend: Backend) -> int | None:
    return None if backend.capabilities.all_ranks else backend.rank()


def _check_ranks(mesh: DeviceMesh, backend: Backend) -> None:
    world = backend.world_size()
    if max(mesh.ranks) >= world:
        raise BackendError(
            describe(
                "DeviceMesh",
                f"every rank of the mesh must be below the world size {world}",
                "Start as many processes as the mesh has ranks (torchrun --nproc-per-node), or make"
                " a smaller mesh",
                mesh_shape=mesh.shape,
                world_size=world,
            )
        )
