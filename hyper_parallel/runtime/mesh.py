# SPDX-License-Identifier: Apache-2.0
"""DeviceMesh: an AbstractMesh attached to the backend of this process, with torch's names."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

from hyper_parallel.core.mesh import AbstractMesh, nest_ranks, nested_ranks
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime.checked import CheckedCommunicator, wants_checks
from hyper_parallel.runtime.interface import Backend, Communicator
from hyper_parallel.runtime.registry import backend_for
from hyper_parallel.runtime.watch import introduce

__all__ = ["DeviceMesh", "current_mesh", "init_device_mesh", "restore_mesh"]


class _Entered(threading.local):
    """The meshes whose `with` blocks this thread is in."""

    def __init__(self) -> None:
        self.meshes: list[DeviceMesh] = []


_entered = _Entered()
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
        self.groups = backend.make_groups(self)

    @classmethod
    def attached(
        cls,
        abstract: AbstractMesh,
        backend: Backend,
        groups: Sequence[Any],
        parent: DeviceMesh | None = None,
    ) -> DeviceMesh:
        """Attach ranks to groups that exist already, one an axis; for backends and interop."""
        self = cls.__new__(cls)
        AbstractMesh.__init__(
            self,
            abstract.device_type,
            abstract.shape,
            ranks=abstract.ranks,
            mesh_dim_names=abstract.mesh_dim_names,
        )
        self._attach(backend, parent, wants_checks(None) if parent is None else parent.checked)
        self.groups = groups
        return self

    def _attach(self, backend: Backend, parent: DeviceMesh | None, checked: bool) -> None:
        self.backend = backend
        self.checked = checked and not backend.capabilities.checks_calls
        self.parent = parent
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

    @cached_property
    def handle(self) -> Any:
        """The framework's own mesh on the same groups (torch's DeviceMesh); None without one."""
        return self.backend.framework_mesh(self)

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
        axis = self._one_axis(mesh_dim, "get_group")
        if not self.groups:
            self._here("get_group")
        return self.groups[axis]

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
            axes = (axis,) if isinstance(axis, int) else axis
            ranks = self.submesh_ranks(axes, rank=self.get_rank())
            group = self.groups[axis] if isinstance(axis, int) else self._joined(ranks, axes)
            found = self._communicators[axis] = self._communicator(group, ranks)
        return found

    def _joined(self, ranks: tuple[int, ...], axes: Sequence[int]) -> Any:
        """Give the group of several axes, made at the first call."""
        return self.backend.make_group(ranks, "_".join(self.axis_names[axis] for axis in axes))

    def _communicator(self, group: Any, ranks: tuple[int, ...]) -> Communicator:
        """Make one that compares calls, if it must, and is known to those that watch."""
        communicator = self.backend.communicator(group, ranks)
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
            found = self._communicator(self.backend.make_group(ranks, "union"), ranks)
        self._unions[ranks] = other._unions[ranks] = found
        return found

    @property
    def is_slice(self) -> bool:
        """Whether this is a slice of a larger mesh, and so another one on other ranks."""
        return self.parent is not None and len(self.ranks) < len(self.parent.ranks)

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
                "DeviceMesh",
                "a mesh is sliced by the names of axes",
                f"Use mesh[name], or mesh[name, name], of {self.mesh_dim_names}",
                names=names,
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
            groups = [self.groups[axis] for axis in axes] if self.groups else ()
            found = DeviceMesh.attached(abstract, self.backend, groups, self.parent or self)
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
            groups = self.groups
            if groups and self._my_coordinate is not None and self.ndim > 1:
                groups = [self._joined(self.ranks, range(self.ndim))]
            found = DeviceMesh.attached(abstract, self.backend, groups, self.parent or self)
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
        is_one = not isinstance(group, (list, tuple))
        groups = [group] if is_one else list(cast("Sequence[Any]", group))
        if mesh is None and len(groups) != 1:
            text = "mesh must be given for several groups"
            raise LayoutError("from_group", text, "Pass the ranks, one axis per group", mesh=mesh)
        shape, ranks = nested_ranks(backend.group_ranks(groups[0]) if mesh is None else mesh)
        abstract = AbstractMesh(device_type, shape, ranks=ranks, mesh_dim_names=mesh_dim_names)
        found = [sorted(backend.group_ranks(each)) for each in groups]
        axes = range(abstract.ndim)
        if found != [sorted(abstract.group_ranks(i, rank=backend.rank())) for i in axes]:
            raise LayoutError(
                "from_group",
                f"mesh must list the ranks of each group along its axis ({found})",
                "Pass one axis per group, in the same order",
                mesh=nest_ranks(ranks, shape),
            )
        return cls.attached(abstract, backend, groups)

    def __enter__(self) -> DeviceMesh:
        _entered.meshes.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _entered.meshes.pop()

    def _here(self, where: str) -> tuple[int, ...]:
        rank = self.get_rank()
        if self._my_coordinate is None:
            raise LayoutError(
                where,
                f"this rank must be in the mesh (ranks {self.ranks})",
                f"rank {rank} not in mesh; ask only on the mesh's ranks",
                rank=rank,
            )
        return self._my_coordinate

    def _one_axis(self, axis: int | str | None, where: str) -> int:
        if axis is not None:
            return self.axis_index(axis)
        if self.ndim != 1:
            raise LayoutError(
                where,
                "mesh_dim must be given for a mesh of several axes",
                f"Pass one of {self.axis_names}",
                mesh_dim=None,
                mesh=self,
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


def restore_mesh(
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
    rank = _rank_of(backend)
    for mesh in reversed(list(_live.values())):
        is_here = mesh.backend is backend and (rank is None or mesh.get_rank() == rank)
        facts = (mesh.device_type, mesh.shape, mesh.ranks, mesh.mesh_dim_names)
        if is_here and facts == (device_type, shape, ranks, names):
            return mesh
    raise LayoutError(
        "DeviceMesh",
        "a pickled mesh must have an equal one in the process that loads it",
        "Make the mesh first, with init_device_mesh, and slice it as before",
        mesh=AbstractMesh(device_type, shape, ranks=ranks, mesh_dim_names=names),
    )


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
            "init_device_mesh",
            "mesh_shape must be a tuple of ints",
            "Pass the number of ranks along each axis, such as (2,) or (2, 4)",
            mesh_shape=mesh_shape,
        )
    shape = tuple(mesh_shape)
    ranks = nest_ranks(range(math.prod(shape)), shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, check=check)


def current_mesh() -> DeviceMesh | None:
    """Give the mesh of the innermost `with mesh:` block, or None."""
    return _entered.meshes[-1] if _entered.meshes else None


def _rank_of(backend: Backend) -> int | None:
    return None if backend.capabilities.all_ranks else backend.rank()
