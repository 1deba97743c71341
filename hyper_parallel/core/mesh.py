# SPDX-License-Identifier: Apache-2.0
"""AbstractMesh: global ranks arranged on named axes. A value; knows no process and no device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from hyper_parallel.errors import LayoutError, near_names

__all__ = ["AbstractMesh", "nest_ranks", "nested_ranks"]


_FACTS = frozenset({"device_type", "shape", "ranks", "mesh_dim_names"})


class AbstractMesh:
    """Global ranks in an n-dimensional grid with (optionally) named axes.

    Args:
        device_type: the backend's device type, such as "cpu"; only carried.
        shape: number of ranks along each axis.
        ranks: the global ranks, row-major; default `0 .. prod(shape) - 1`.
        mesh_dim_names: one name per axis, or None.

    Raises:
        LayoutError: a size is not positive, ranks are repeated or negative or too few, or names
            do not match the axes or repeat.

    Example:
        >>> mesh = AbstractMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> mesh.coordinate(3), mesh.group_ranks("tp", rank=3)
        ((1, 1), (2, 3))
    """

    def __init__(
        self,
        device_type: str,
        shape: Sequence[int],
        *,
        ranks: Sequence[int] | None = None,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> None:
        self.device_type = device_type
        self.shape = tuple(int(size) for size in shape)
        every = range(math.prod(self.shape)) if ranks is None else ranks
        self.ranks = tuple(int(rank) for rank in every)
        self.mesh_dim_names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        _check_mesh(self.shape, self.ranks, self.mesh_dim_names)
        places = itertools.product(*map(range, self.shape))
        self._coordinates = dict(zip(self.ranks, places, strict=True))
        self._rank_at = {place: rank for rank, place in self._coordinates.items()}
        self._hash = hash(self._key())
        self.plans: dict[Any, Any] = {}  # what plan() has found for tensors on this mesh
        self.layouts: dict[Any, Any] = {}  # what Layout.of has made on this mesh

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FACTS and name in self.__dict__:
            raise AttributeError(f"{type(self).__name__}.{name} cannot be changed")
        super().__setattr__(name, value)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axis names, or `axis0`, `axis1`, ... where the mesh has none."""
        return self.mesh_dim_names or tuple(f"axis{i}" for i in range(self.ndim))

    def size(self, mesh_dim: int | None = None) -> int:
        """Give the number of ranks, of one axis or of the whole mesh."""
        return len(self.ranks) if mesh_dim is None else self.shape[self.axis_index(mesh_dim)]

    def axis_index(self, axis: int | str) -> int:
        """Give the position of an axis from its name or (negative) position.

        Raises:
            LayoutError: no such axis; the text lists those there are.
        """
        if isinstance(axis, str):
            names = self.mesh_dim_names or ()
            if axis in names:
                return names.index(axis)
            known = names or "the names of a mesh that was given mesh_dim_names"
            near = near_names(axis, list(names))
            fix = (f"Did you mean {near[0]!r}? " if near else "") + "Name an axis of this mesh"
            raise LayoutError("DeviceMesh", f"axis must be one of {known}", fix, axis=axis)
        if not -self.ndim <= axis < self.ndim:
            must = f"axis must be in [{-self.ndim}, {self.ndim})"
            raise LayoutError("DeviceMesh", must, "Pass an axis of this mesh", axis=axis)
        return axis % self.ndim

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Give the coordinate of a global rank, or None for a rank outside the mesh."""
        return self._coordinates.get(rank)

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Give the global rank at a coordinate.

        Raises:
            LayoutError: the mesh has no such coordinate.
        """
        place = tuple(coordinate)
        if place not in self._rank_at:
            must = f"coordinate must be inside the shape {self.shape}"
            fix = "Pass one non-negative int per axis, below its size"
            raise LayoutError("DeviceMesh", must, fix, coordinate=place)
        return self._rank_at[place]

    def group_ranks(self, axis: int | str, *, rank: int) -> tuple[int, ...]:
        """List the ranks that share `rank`'s coordinate on all other axes, by coordinate.

        Empty for a rank outside the mesh.
        """
        axes = [self.axis_index(axis)]
        return self.submesh_ranks(axes, rank=rank) if rank in self._coordinates else ()

    def submesh_ranks(self, axes: Sequence[int | str], *, rank: int) -> tuple[int, ...]:
        """List, row-major over `axes`, the ranks at `rank`'s coordinate on the other axes.

        A rank outside the mesh sees the submesh at coordinate 0 (and is outside that, too).
        """
        place = list(self.coordinate(rank) or (0,) * self.ndim)
        indices = [self.axis_index(axis) for axis in axes]
        if len(set(indices)) != len(indices):
            must, fix = "axes must not repeat", "Name each axis once"
            raise LayoutError("DeviceMesh", must, fix, axes=tuple(axes))
        ranks: list[int] = []
        for own in itertools.product(*(range(self.shape[i]) for i in indices)):
            for i, c in zip(indices, own, strict=True):
                place[i] = c
            ranks.append(self._rank_at[tuple(place)])
        return tuple(ranks)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AbstractMesh) or type(self) is not type(other):
            return NotImplemented  # an attached mesh hashes, and so compares, by its place too
        return self._key() == other._key()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # Not by state: the hash of a str differs between processes.
        make = partial(AbstractMesh, ranks=self.ranks, mesh_dim_names=self.mesh_dim_names)
        return make, (self.device_type, self.shape)

    def _key(self) -> tuple[Any, ...]:
        return (self.device_type, self.shape, self.ranks, self.mesh_dim_names)

    def __repr__(self) -> str:
        sizes = zip(self.axis_names, self.shape, strict=True)
        axes = ", ".join(f"{name}={size}" for name, size in sizes)
        default = self.ranks == tuple(range(len(self.ranks)))
        ranks = "" if default else f", ranks={list(self.ranks)}"
        return f"{type(self).__name__}({self.device_type!r}, {axes}{ranks})"


def nested_ranks(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Read shape and flat ranks from an int, a nested sequence, or anything with `tolist`.

    Raises:
        LayoutError: the nesting is ragged or holds something that is not an int.

    Example:
        >>> nested_ranks([[0, 2], [1, 3]])
        ((2, 2), (0, 2, 1, 3))
    """
    value = mesh.tolist() if hasattr(mesh, "tolist") else mesh
    if isinstance(value, int):
        return (), (value,)
    if not isinstance(value, (list, tuple)) or not value:
        must, fix = "mesh must be a non-empty array of ints", "Pass nested lists of global ranks"
        raise LayoutError("DeviceMesh", must, fix, mesh=mesh)
    parts = [nested_ranks(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    shapes = {shape for shape, _ in parts}
    if len(shapes) != 1:
        must, fix = "mesh must be rectangular", "Give every row the same number of ranks"
        raise LayoutError("DeviceMesh", must, fix, mesh=mesh)
    flat = tuple(rank for _, ranks in parts for rank in ranks)
    return (len(parts), *shapes.pop()), flat


def nest_ranks(ranks: Sequence[int], shape: Sequence[int]) -> Any:
    """Nest flat, row-major ranks into lists of the given shape.

    Example:
        >>> nest_ranks(range(4), (2, 2))
        [[0, 1], [2, 3]]
    """
    if len(shape) <= 1:
        return list(ranks)
    step = math.prod(shape[1:])
    return [nest_ranks(ranks[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def _check_mesh(
    shape: tuple[int, ...], ranks: tuple[int, ...], names: tuple[str, ...] | None
) -> None:
    """Refuse a mesh that cannot exist."""
    where = "DeviceMesh"
    if not shape or any(size < 1 for size in shape):
        must = "shape must have at least one axis, each of size at least 1"
        fix = "Pass the number of ranks along each axis"
        raise LayoutError(where, must, fix, shape=shape)
    if len(ranks) != math.prod(shape) or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        must = f"ranks must be {math.prod(shape)} different non-negative ints"
        raise LayoutError(where, must, "Give each rank once", ranks=ranks)
    if names is not None and (len(names) != len(shape) or len(set(names)) != len(names)):
        must = f"mesh_dim_names must be {len(shape)} different names"
        raise LayoutError(where, must, "Name each axis once", mesh_dim_names=names)
