# SPDX-License-Identifier: Apache-2.0
"""Layout: which part of a global tensor each rank of a mesh holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from hyper_parallel.core.interval import Intervals, count
from hyper_parallel.core.mesh import AbstractMesh
from hyper_parallel.core.nesting import (
    Chain,
    Cut,
    canonical,
    held_by,
    largest,
    places_of,
    sizes_left,
)
from hyper_parallel.core.placement import (
    Packed,
    Partial,
    Placement,
    Replicate,
    Shard,
    cotangent,
    normalize,
)
from hyper_parallel.errors import LayoutError, describe

__all__ = ["Layout", "same_cut"]

_MAX_LAYOUTS = 8192


@dataclass(frozen=True)
class Layout:
    """A mesh, one placement per mesh axis, and the global shape.

    Several axes on one dim nest from left to right: each cuts what the earlier ones left. Equality
    is that of the written form; `same_cut` compares what the ranks hold.

    Args:
        mesh: the mesh.
        placements: one placement per mesh axis; negative dims are made positive.
        shape: the global shape.
        order: the order in which the axes cut, where it is not left to right.

    Raises:
        LayoutError: the number of placements is not the mesh's ndim, a dim is out of range, a
            block does not divide what it cuts, packed sizes do not add up to it, Partial ops that
            do not commute are mixed, or the order is not one of the axes.

    Example:
        >>> mesh = AbstractMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> layout = Layout(mesh, (Shard(0), Shard(0)), (5, 3))
        >>> [layout.local_shape(rank) for rank in mesh.ranks]
        [(2, 3), (1, 3), (1, 3), (1, 3)]
    """

    mesh: AbstractMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = "Layout"
        if len(self.placements) != self.mesh.ndim:
            raise LayoutError(
                describe(
                    where,
                    f"placements must have one entry per mesh axis ({self.mesh.ndim})",
                    "Pass one placement per axis",
                    placements=tuple(self.placements),
                )
            )
        shape = tuple(int(size) for size in self.shape)
        if any(size < 0 for size in shape):
            raise LayoutError(
                describe(where, "sizes must not be negative", "Pass the global shape", shape=shape)
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "placements", normalize(self.placements, len(shape), where=where))
        _check_partials(self.placements, where)
        object.__setattr__(self, "order", _least_order(self))
        _check_sizes(self)
        written = (self.mesh, self.placements, self.shape, self.order)
        object.__setattr__(self, "_hash", hash(written))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self._hash == other._hash and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # The hash is this process's own.
        return Layout, (self.mesh, self.placements, self.shape, self.order)

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @cached_property
    def has_partial(self) -> bool:
        """Whether some axis holds a pending reduction."""
        return any(p.is_partial() for p in self.placements)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return all(p.is_replicate() for p in self.placements)

    @cached_property
    def cotangent(self) -> Layout:
        """The layout of a gradient: Partial becomes Replicate."""
        if not self.has_partial:
            return self
        placements = cotangent(self.placements)
        if self.order:
            return replace(self, placements=placements)
        return self.with_placements(placements)

    @cached_property
    def replicated(self) -> Layout:
        """The layout in which every rank holds the whole value."""
        return self.with_placements((Replicate(),) * self.mesh.ndim)

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """The cuts of each dim as written, outermost first."""
        found: list[list[Cut]] = [[] for _ in self.shape]
        for axis in self.order or range(self.mesh.ndim):
            placement = self.placements[axis]
            if placement.cut_dim is not None:
                found[placement.cut_dim].append(Cut(axis, self.mesh.shape[axis], placement))
        return tuple(map(tuple, found))

    @cached_property
    def simple_chains(self) -> tuple[Chain, ...]:
        """The cuts of each dim in their simplest form; the axes of one rank cut nothing."""
        return tuple(map(canonical, self.shape, self.chains))

    @cached_property
    def largest_shape(self) -> tuple[int, ...]:
        """The largest size of each dim that any rank holds."""
        return tuple(map(largest, self.shape, self.chains))

    @classmethod
    def of(
        cls, mesh: AbstractMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
    ) -> Layout:
        """Give the layout of these facts, the same object each time: to look up, not to make."""
        key = (placements, shape)
        found = mesh.layouts.get(key)
        if found is None:
            if len(mesh.layouts) >= _MAX_LAYOUTS:
                mesh.layouts.clear()
            made = cls(mesh, placements, shape)
            found = mesh.layouts.setdefault((made.placements, made.shape), made)
            mesh.layouts[key] = found
        return found

    def with_placements(self, placements: Sequence[Placement]) -> Layout:
        """Give the layout of the same tensor under other placements, nested left to right."""
        return Layout.of(self.mesh, tuple(placements), self.shape)

    def with_shape(self, shape: Sequence[int]) -> Layout:
        """Give the same placements for another global shape."""
        return replace(self, shape=tuple(shape))

    def intervals(self, rank: int) -> tuple[Intervals, ...]:
        """Give the indices of each dim that global rank `rank` holds, in the order it holds them.

        Raises:
            LayoutError: `rank` is not in the mesh.

        Example:
            >>> mesh = AbstractMesh("cpu", (2,))
            >>> Layout(mesh, (Packed(0, (4, 4)),), (8, 3)).intervals(1)
            (((2, 4), (6, 8)), ((0, 3),))
        """
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            raise LayoutError(
                describe(
                    "Layout.intervals",
                    f"rank must be in the mesh {self.mesh.ranks}",
                    "Ask a rank of the mesh",
                    rank=rank,
                )
            )
        return self.intervals_at(coordinate)

    def intervals_at(self, coordinate: Sequence[int]) -> tuple[Intervals, ...]:
        """Give the indices of each dim that are held at a coordinate of the mesh."""
        return tuple(
            held_by(size, chain, tuple([coordinate[step.axis] for step in chain]))
            for size, chain in zip(self.shape, self.chains, strict=True)
        )

    def slices(self, rank: int) -> tuple[slice, ...]:
        """Give the part of the global tensor that global rank `rank` holds, one slice per dim.

        Raises:
            LayoutError: `rank` is not in the mesh, or what it holds of a dim is not one slice.
        """
        held = self.intervals(rank)
        if any(len(own) > 1 for own in held):
            raise LayoutError(
                describe(
                    "Layout.slices",
                    "the rank must hold one range of each dim",
                    "Use intervals(rank) for strided and packed shards",
                    layout=self,
                    rank=rank,
                )
            )
        return tuple(slice(*own[0]) if own else slice(0, 0) for own in held)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Give the shape of what global rank `rank` holds; `(0,)` for a rank outside the mesh.

        Example:
            >>> layout = Layout(AbstractMesh("cpu", (4,)), (Shard(0),), (5, 2))
            >>> layout.local_shape(3), layout.local_shape(9)
            ((0, 2), (0,))
        """
        coordinate = self.mesh.coordinate(rank)
        return (0,) if coordinate is None else tuple(map(count, self.intervals_at(coordinate)))

    def __repr__(self) -> str:
        names = self.mesh.axis_names
        marks = ", ".join(f"{p!r}@{name}" for p, name in zip(self.placements, names, strict=True))
        order = f", order={self.order}" if self.order else ""
        return f"Layout({list(self.shape)}, {marks}{order})"


def same_cut(a: Layout, b: Layout) -> bool:
    """Tell whether every rank holds the same indices, and the same reductions are pending.

    Axes of one rank do not count. The meshes may differ where nothing is pending.

    Example:
        >>> mesh = AbstractMesh("cpu", (2,))
        >>> plain, blocks = (Layout(mesh, (p,), (8,)) for p in (Shard(0), Shard(0, block=2)))
        >>> plain == blocks, same_cut(plain, blocks)
        (False, True)
    """
    if a.shape != b.shape or set(a.mesh.ranks) != set(b.mesh.ranks):
        return False
    pending = [
        [
            (axis, p)
            for axis, p in enumerate(x.placements)
            if p.is_partial() and x.mesh.shape[axis] > 1
        ]
        for x in (a, b)
    ]
    if a.mesh.shape == b.mesh.shape and a.mesh.ranks == b.mesh.ranks:
        pairs = zip(a.shape, a.simple_chains, b.simple_chains, strict=True)
        return pending[0] == pending[1] and all(_same_held(*pair) for pair in pairs)
    return not any(pending) and all(a.intervals(rank) == b.intervals(rank) for rank in a.mesh.ranks)


@lru_cache(maxsize=8192)
def _same_held(size: int, a: Chain, b: Chain) -> bool:
    if a == b:
        return True
    return all(
        held_by(size, a, tuple([places[step.axis] for step in a]))
        == held_by(size, b, tuple([places[step.axis] for step in b]))
        for places in places_of((a, b))
    )


def _check_partials(placements: Sequence[Placement], where: str) -> None:
    """Refuse a mix of reductions whose order would matter."""
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    if len(ops) > 1 and not ops <= {"sum", "avg"}:
        raise LayoutError(
            describe(
                where,
                "Partial ops on several mesh axes must be the same, or sum and avg",
                "Reduce one of them first",
                placements=tuple(placements),
            )
        )


def _check_sizes(layout: Layout) -> None:
    """Refuse a block that does not divide what it cuts, and packed sizes that are not its sum."""
    for dim, chain in enumerate(layout.chains):
        if all(isinstance(p, Shard) and p.block == 1 for _, _, p in chain):
            continue
        sizes = frozenset((layout.shape[dim],))
        for step in chain:
            _check_cut(layout, step, sizes, dim)
            sizes = sizes_left(sizes, step)


def _check_cut(layout: Layout, step: Cut, sizes: frozenset[int], dim: int) -> None:
    placement, name = step.placement, layout.mesh.axis_names[step.axis]
    if isinstance(placement, Shard) and any(size % placement.block for size in sizes):
        raise LayoutError(
            describe(
                "Layout",
                f"block must divide what axis {name!r} cuts of dim {dim}",
                "Pass a block that divides it",
                sizes=sorted(sizes, reverse=True),
                block=placement.block,
            )
        )
    if isinstance(placement, Packed) and sizes != frozenset((sum(placement.sizes),)):
        raise LayoutError(
            describe(
                "Layout",
                f"packed sizes must add up to what axis {name!r} cuts of dim {dim}",
                "Pass the sizes of the parts that are packed there",
                cuts=sorted(sizes, reverse=True),
                sizes=placement.sizes,
            )
        )


def _least_order(layout: Layout) -> tuple[int, ...]:
    """Write an order of axes in one way: empty if left to right would cut alike."""
    order, mesh = layout.order, layout.mesh
    if not order:
        return ()
    if sorted(order) != list(range(mesh.ndim)):
        raise LayoutError(
            describe(
                "Layout",
                f"order must name each of the {mesh.ndim} axes once",
                "Pass the axes from the one that cuts first to the one that cuts last",
                order=order,
            )
        )
    dims = [p.cut_dim for p in layout.placements]
    written = list(order)
    least: list[int] = []
    while written:
        free = [
            axis
            for i, axis in enumerate(written)
            if dims[axis] is None or dims[axis] not in [dims[other] for other in written[:i]]
        ]
        least.append(min(free))
        written.remove(min(free))
    return () if least == sorted(least) else tuple(least)
