# SPDX-License-Identifier: Apache-2.0
"""Layout: which part of a global tensor each rank of a mesh holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hyper_parallel.core.mesh import AbstractMesh
from hyper_parallel.core.placement import Partial, Placement, Shard, cotangent, normalize
from hyper_parallel.errors import LayoutError, describe

__all__ = ["Layout", "chunk_bounds", "chunk_sizes"]


def chunk_bounds(size: int, num_chunks: int, index: int, block: int = 1) -> tuple[int, int]:
    """Give the half-open range that chunk `index` of `num_chunks` covers (torch.chunk's sizes).

    Example:
        >>> [chunk_bounds(5, 4, i) for i in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    chunk = -(-(size // block) // num_chunks) * block
    return min(index * chunk, size), min((index + 1) * chunk, size)


def chunk_sizes(size: int, num_chunks: int, block: int = 1) -> tuple[int, ...]:
    """Give the sizes of all chunks, in order.

    Example:
        >>> chunk_sizes(9, 4)
        (3, 3, 3, 0)
    """
    bounds = (chunk_bounds(size, num_chunks, i, block) for i in range(num_chunks))
    return tuple(stop - start for start, stop in bounds)


@dataclass(frozen=True)
class Layout:
    """A mesh, one placement per mesh axis, and the global shape.

    Several axes on one dim nest from left to right: each cuts what the earlier ones left.

    Args:
        mesh: the mesh.
        placements: one placement per mesh axis; negative dims are made positive.
        shape: the global shape.

    Raises:
        LayoutError: the number of placements is not the mesh's ndim, a dim is out of range, a
            block does not divide what it cuts, or Partial ops that do not commute are mixed.

    Example:
        >>> mesh = AbstractMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> layout = Layout(mesh, (Shard(0), Shard(0)), (5, 3))
        >>> [layout.local_shape(rank) for rank in mesh.ranks]
        [(2, 3), (1, 3), (1, 3), (1, 3)]
    """

    mesh: AbstractMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
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
        _check_blocks(self)
        object.__setattr__(self, "_hash", hash((self.mesh, self.placements, self.shape)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.mesh, self.placements, self.shape)  # the hash is this process's own

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
        return self.with_placements(cotangent(self.placements)) if self.has_partial else self

    def with_placements(self, placements: Sequence[Placement]) -> Layout:
        """Give the layout of the same tensor under other placements."""
        return replace(self, placements=tuple(placements))

    def with_shape(self, shape: Sequence[int]) -> Layout:
        """Give the same placements for another global shape."""
        return replace(self, shape=tuple(shape))

    def slices(self, rank: int) -> tuple[slice, ...]:
        """Give the part of the global tensor that global rank `rank` holds, one slice per dim.

        Raises:
            LayoutError: `rank` is not in the mesh.
        """
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            raise LayoutError(
                describe(
                    "Layout.slices",
                    f"rank must be in the mesh {self.mesh.ranks}",
                    "Ask a rank of the mesh",
                    rank=rank,
                )
            )
        held = self.held_before(self.mesh.ndim, coordinate)
        return tuple(slice(start, stop) for start, stop in held)

    def held_before(self, axis: int, coordinate: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Give the range of each dim that is left after the axes before `axis` have cut."""
        held = [(0, size) for size in self.shape]
        for i in range(axis):
            placement = self.placements[i]
            if isinstance(placement, Shard):
                start, stop = held[placement.dim]
                low, high = chunk_bounds(
                    stop - start, self.mesh.shape[i], coordinate[i], placement.block
                )
                held[placement.dim] = (start + low, start + high)
        return tuple(held)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Give the shape of what global rank `rank` holds; `(0,)` for a rank outside the mesh.

        Example:
            >>> layout = Layout(AbstractMesh("cpu", (4,)), (Shard(0),), (5, 2))
            >>> layout.local_shape(3), layout.local_shape(9)
            ((0, 2), (0,))
        """
        if self.mesh.coordinate(rank) is None:
            return (0,)
        return tuple(s.stop - s.start for s in self.slices(rank))

    def axis_sizes(self, axis: int, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Give the sizes that mesh axis `axis` cuts its dim in, as seen from `coordinate`.

        Raises:
            LayoutError: the axis does not cut a dim.
        """
        placement = self.placements[axis]
        if not isinstance(placement, Shard):
            raise LayoutError(
                describe(
                    "Layout.axis_sizes",
                    "the axis must be a Shard",
                    "Ask an axis that cuts a dim",
                    axis=axis,
                    placement=placement,
                )
            )
        start, stop = self.held_before(axis, coordinate)[placement.dim]
        return chunk_sizes(stop - start, self.mesh.shape[axis], placement.block)

    def sizes_before(self, axis: int, dim: int) -> set[int]:
        """Give every size of tensor dim `dim` that some coordinate has before mesh axis `axis`."""
        sizes = {self.shape[dim]}
        for i in range(axis):
            placement = self.placements[i]
            if isinstance(placement, Shard) and placement.dim == dim:
                n, block = self.mesh.shape[i], placement.block
                sizes = {piece for size in sizes for piece in chunk_sizes(size, n, block)}
        return sizes

    def __repr__(self) -> str:
        names = self.mesh.axis_names
        marks = ", ".join(f"{p!r}@{name}" for p, name in zip(self.placements, names, strict=True))
        return f"Layout({list(self.shape)}, {marks})"


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


def _check_blocks(layout: Layout) -> None:
    """Refuse a block that does not divide what it cuts: the dim, or what earlier axes left."""
    for axis, placement in enumerate(layout.placements):
        if not isinstance(placement, Shard) or placement.block == 1:
            continue
        sizes = layout.sizes_before(axis, placement.dim)
        if any(size % placement.block for size in sizes):
            raise LayoutError(
                describe(
                    "Layout",
                    f"block must divide what axis {layout.mesh.axis_names[axis]!r} cuts of dim"
                    f" {placement.dim}",
                    "Pass a block that divides it",
                    sizes=sorted(sizes, reverse=True),
                    block=placement.block,
                )
            )
