# SPDX-License-Identifier: Apache-2.0
"""Layout: which part of a global tensor each rank of a mesh holds."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from hyper_parallel.core.interval import Intervals, count
from hyper_parallel.core.mesh import AbstractMesh
from hyper_parallel.core.nesting import (
    Chain,
    Cut,
    canonical,
    held_at,
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
from hyper_parallel.errors import LayoutError

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
        where, ndim = "Layout", self.mesh.ndim
        if len(self.placements) != ndim:
            must = f"placements must have one entry per mesh axis ({ndim})"
            fix, got = "Pass one placement per axis", tuple(self.placements)
            raise LayoutError(where, must, fix, placements=got)
        shape = tuple(int(size) for size in self.shape)
        if any(size < 0 for size in shape):
            fix = "Pass the global shape"
            raise LayoutError(where, "sizes must not be negative", fix, shape=shape)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "placements", normalize(self.placements, len(shape), where=where))
        _check_partials(self.placements)
        object.__setattr__(self, "order", _least_order(self))
        _check_sizes(self)
        object.__setattr__(self, "_hash", hash(self._written()))

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Layout):
            return self is other
        return self._hash == other._hash and self._written() == other._written()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, self._written()  # the hash is this process's own

    def _written(self) -> tuple[Any, ...]:
        return (self.mesh, self.placements, self.shape, self.order)

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
        return Layout.of(self.mesh, cotangent(self.placements), self.shape, self.order)

    @cached_property
    def replicated(self) -> Layout:
        """The layout in which every rank holds the whole value."""
        return self.with_placements((Replicate(),) * self.mesh.ndim)

    @cached_property
    def pending(self) -> tuple[str | None, ...]:
        """The reduction that is pending on each axis; None on those of one rank."""
        pairs = zip(self.placements, self.mesh.shape, strict=True)
        return tuple(p.reduce_op if isinstance(p, Partial) and n > 1 else None for p, n in pairs)

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
        cls,
        mesh: AbstractMesh,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...],
        order: tuple[int, ...] = (),
    ) -> Layout:
        """Give the layout of these facts, the same object each time: to look up, not to make."""
        key = (placements, shape, order)
        found = mesh.layouts.get(key)
        if found is None:
            if len(mesh.layouts) >= _MAX_LAYOUTS:
                mesh.layouts.clear()
            made = cls(mesh, placements, shape, order)
            found = mesh.layouts.setdefault((made.placements, made.shape, made.order), made)
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
            must = f"rank must be in the mesh {self.mesh.ranks}"
            raise LayoutError("Layout.intervals", must, "Ask a rank of the mesh", rank=rank)
        return self.intervals_at(coordinate)

    def intervals_at(self, coordinate: Sequence[int]) -> tuple[Intervals, ...]:
        """Give the indices of each dim that are held at a coordinate of the mesh."""
        return tuple(
            held_at(size, chain, coordinate)
            for size, chain in zip(self.shape, self.chains, strict=True)
        )

    def slices(self, rank: int) -> tuple[slice, ...]:
        """Give the part of the global tensor that global rank `rank` holds, one slice per dim.

        Raises:
            LayoutError: `rank` is not in the mesh, or what it holds of a dim is not one slice.
        """
        held = self.intervals(rank)
        if any(len(own) > 1 for own in held):
            must = "the rank must hold one range of each dim"
            fix = "Use intervals(rank) for strided and packed shards"
            raise LayoutError("Layout.slices", must, fix, layout=self, rank=rank)
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
    if a.mesh.shape == b.mesh.shape and a.mesh.ranks == b.mesh.ranks:
        chains = zip(a.shape, a.simple_chains, b.simple_chains, strict=True)
        return a.pending == b.pending and all(_same_held(*pair) for pair in chains)
    if any(a.pending) or any(b.pending):
        return False
    return all(a.intervals(rank) == b.intervals(rank) for rank in a.mesh.ranks)


@lru_cache(maxsize=8192)
def _same_held(size: int, a: Chain, b: Chain) -> bool:
    return a == b or all(
        held_at(size, a, places) == held_at(size, b, places) for places in places_of((a, b))
    )


def _check_partials(placements: Sequence[Placement]) -> None:
    """Refuse a mix of reductions whose order would matter."""
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    if len(ops) > 1 and not ops <= {"sum", "avg"}:
        must = "Partial ops on several mesh axes must be the same, or sum and avg"
        fix = "Reduce one of them first"
        raise LayoutError("Layout", must, fix, placements=tuple(placements))


def _check_sizes(layout: Layout) -> None:
    """Refuse a block that does not divide what it cuts, and packed sizes that are not its sum."""
    for dim, chain in enumerate(layout.chains):
        if all(isinstance(step.placement, Shard) and step.placement.block == 1 for step in chain):
            continue
        sizes = frozenset((layout.shape[dim],))
        for step in chain:
            placement, name = step.placement, layout.mesh.axis_names[step.axis]
            cuts = sorted(sizes, reverse=True)
            if isinstance(placement, Shard) and any(size % placement.block for size in sizes):
                must = f"block must divide what axis {name!r} cuts of dim {dim}"
                fix, block = "Pass a block that divides it", placement.block
                raise LayoutError("Layout", must, fix, sizes=cuts, block=block)
            if isinstance(placement, Packed) and cuts != [sum(placement.sizes)]:
                must = f"packed sizes must add up to what axis {name!r} cuts of dim {dim}"
                fix, parts = "Pass the sizes of the parts that are packed there", placement.sizes
                raise LayoutError("Layout", must, fix, cuts=cuts, sizes=parts)
            sizes = sizes_left(sizes, step)


def _least_order(layout: Layout) -> tuple[int, ...]:
    """Write an order of axes in one way: empty if left to right would cut alike."""
    order, ndim = layout.order, layout.mesh.ndim
    if not order:
        return ()
    if sorted(order) != list(range(ndim)):
        must = f"order must name each of the {ndim} axes once"
        fix = "Pass the axes from the one that cuts first to the one that cuts last"
        raise LayoutError("Layout", must, fix, order=order)
    # Only the axes that cut one dim must stay in order; of the others the first goes first.
    nested: dict[Any, list[int]] = {}
    for axis in order:
        dim = layout.placements[axis].cut_dim
        nested.setdefault(("whole", axis) if dim is None else dim, []).append(axis)
    least = tuple(heapq.merge(*nested.values()))
    return () if least == tuple(range(ndim)) else least
