# SPDX-License-Identifier: Apache-2.0
"""Placements: what one mesh axis does to a tensor. Values only; they never communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hyper_parallel.core.interval import chunk_sizes
from hyper_parallel.errors import LayoutError

__all__ = [
    "REDUCE_OPS",
    "Packed",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "cotangent",
    "normalize",
]

_FIX_DIM: Final = "Pass the tensor dim to cut"
REDUCE_OPS: Final = ("sum", "avg", "max", "min", "product")


class Placement:
    """Common base of `Replicate`, `Shard`, `StridedShard`, `Packed` and `Partial`."""

    __slots__ = ()

    @property
    def cut_dim(self) -> int | None:
        """The tensor dim that the axis cuts, in any way, or None."""
        return getattr(self, "dim", None)

    def parts(self, size: int) -> tuple[tuple[int, int], ...]:
        """List (size, block) of the parts of `size` entries that are cut one by one.

        A rank holds its chunk of each part; empty where the placement cuts nothing.
        """
        del size
        return ()

    def is_replicate(self) -> bool:
        """Tell whether every rank of the axis holds the whole value."""
        return isinstance(self, Replicate)

    def is_shard(self, dim: int | None = None) -> bool:
        """Tell whether the axis cuts a tensor dim (`dim`, or any) in plain chunks, as `Shard`."""
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Tell whether the axis holds a pending reduction (`reduce_op`, or any)."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the whole value.

    Example:
        >>> Replicate()
        R
    """

    def __repr__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The axis cuts tensor dim `dim` in chunks of ceil(blocks / n) blocks, as torch.chunk does.

    Trailing ranks may hold short or empty shards (5 over 4 ranks: 2, 2, 1, 0).

    Args:
        dim: the tensor dim that is cut; negative counts from the end.
        block: cut only between blocks of this many elements (attention heads, groups).

    Raises:
        LayoutError: `dim` is not an int, or `block` is not a positive int.

    Example:
        >>> Shard(0), Shard(1, block=64)
        (S(0), S(1, block=64))
    """

    dim: int
    block: int = 1

    def __post_init__(self) -> None:
        _check_int("Shard", "dim", self.dim, _FIX_DIM)
        fix = "Pass the number of elements that stay together, or leave it out"
        _check_int("Shard", "block", self.block, fix, least=1)

    def parts(self, size: int) -> tuple[tuple[int, int], ...]:
        """Give the one part that is cut: all of it."""
        return ((size, self.block),)

    def __repr__(self) -> str:
        return f"S({self.dim})" if self.block == 1 else f"S({self.dim}, block={self.block})"


@dataclass(frozen=True, slots=True)
class StridedShard(Placement):
    """The axis cuts tensor dim `dim` in `split_factor` chunks, and then each of those in n.

    A rank holds its chunk of each. It writes a nesting order other than left to right: with even
    sizes, `(StridedShard(d, n1), Shard(d))` on axes of n0 and n1 ranks is axis 1 outside axis 0.

    Args:
        dim: the tensor dim that is cut; negative counts from the end.
        split_factor: number of chunks that are cut one by one; with 1 it is a `Shard`.

    Raises:
        LayoutError: `dim` is not an int, or `split_factor` is not a positive int.

    Example:
        >>> StridedShard(0, 2)
        SS(0, 2)
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        _check_int("StridedShard", "dim", self.dim, _FIX_DIM)
        fix = "Pass the number of chunks that are cut one by one"
        _check_int("StridedShard", "split_factor", self.split_factor, fix, least=1)

    def parts(self, size: int) -> tuple[tuple[int, int], ...]:
        """Give the chunks that are cut one by one."""
        return tuple((part, 1) for part in chunk_sizes(size, self.split_factor) if part)

    def __repr__(self) -> str:
        return f"SS({self.dim}, {self.split_factor})"


@dataclass(frozen=True, slots=True)
class Packed(Placement):
    """The axis cuts each of several parts that lie packed in tensor dim `dim`, such as [Q|K|V].

    A rank holds its chunk of each part, one after the other.

    Args:
        dim: the tensor dim that is cut; negative counts from the end.
        sizes: the parts' sizes; they must add up to what the axis cuts.
        blocks: for each part the elements that stay together, such as a head's; default 1 each.

    Raises:
        LayoutError: `dim` is not an int, a size is not a non-negative int, or `blocks` are not as
            many positive ints that divide the sizes.

    Example:
        >>> Packed(0, (8, 8)), Packed(0, (8, 4, 4), blocks=(2, 2, 2))
        (Packed(0, (8, 8)), Packed(0, (8, 4, 4), blocks=(2, 2, 2)))
    """

    dim: int
    sizes: tuple[int, ...]
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_int("Packed", "dim", self.dim, _FIX_DIM)
        sizes, blocks = tuple(self.sizes), tuple(self.blocks) or (1,) * len(self.sizes)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "blocks", blocks)
        if not sizes or not all(_is_int(size, least=0) for size in sizes):
            must = "sizes must be non-negative ints, at least one"
            fix = "Pass the size of each part, in order"
            raise LayoutError("Packed", must, fix, sizes=sizes)
        fits = len(blocks) == len(sizes) and all(_is_int(block, least=1) for block in blocks)
        if not fits or any(size % block for size, block in zip(sizes, blocks, strict=True)):
            must = "blocks must be one positive int for each part, and divide its size"
            fix = "Pass the number of elements that stay together in each part"
            raise LayoutError("Packed", must, fix, sizes=sizes, blocks=blocks)

    def parts(self, size: int) -> tuple[tuple[int, int], ...]:
        """Give the packed parts, whatever `size` is; a layout checks that they add up to it."""
        del size
        return tuple(zip(self.sizes, self.blocks, strict=True))

    def __repr__(self) -> str:
        blocks = f", blocks={self.blocks}" if set(self.blocks) != {1} else ""
        return f"Packed({self.dim}, {self.sizes}{blocks})"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Each rank of the axis holds a full-size contribution; the value is their reduction.

    Args:
        reduce_op: "sum", "avg", "max", "min" or "product".

    Raises:
        LayoutError: `reduce_op` is none of these.

    Example:
        >>> Partial(), Partial("max")
        (P(sum), P(max))
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            must = f"reduce_op must be one of {', '.join(REDUCE_OPS)}"
            fix = "Pass one of these names"
            raise LayoutError("Partial", must, fix, reduce_op=self.reduce_op)

    def __repr__(self) -> str:
        return f"P({self.reduce_op})"


def cotangent(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Give the placements of a value's gradient: Partial becomes Replicate, the rest stays.

    Example:
        >>> cotangent((Shard(0), Partial()))
        (S(0), R)
    """
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def normalize(placements: Sequence[Placement], ndim: int, *, where: str) -> tuple[Placement, ...]:
    """Make negative dims positive and refuse dims out of range.

    Args:
        placements: one placement per mesh axis.
        ndim: number of dims of the tensor.
        where: the call to name in errors.

    Returns:
        The placements with dims in `[0, ndim)`.

    Raises:
        LayoutError: a placement is not a `Placement`, or its dim is out of range.
    """
    result: list[Placement] = []
    for placement in placements:
        if not isinstance(placement, Placement):  # pyright: ignore[reportUnnecessaryIsInstance]
            must = "every placement must be a Replicate, Shard, StridedShard, Packed or Partial"
            fix = "Pass a sequence with one placement per mesh axis"
            raise LayoutError(where, must, fix, placement=placement)
        dim = placement.cut_dim
        if dim is not None and ndim == 0:
            must = "a tensor of 0 dims must be Replicate or Partial"
            raise LayoutError(where, must, "Replicate it", placement=placement)
        if dim is not None and not -ndim <= dim < ndim:
            must = f"Shard dim must be in [{-ndim}, {ndim}) for a tensor of {ndim} dims"
            raise LayoutError(where, must, "Pass a dim the tensor has", dim=dim)
        if isinstance(placement, (Shard, StridedShard, Packed)) and placement.dim < 0:
            placement = replace(placement, dim=placement.dim + ndim)
        result.append(placement)
    return tuple(result)


def _check_int(where: str, name: str, value: object, fix: str, least: int | None = None) -> None:
    if not _is_int(value, least):
        must = f"{name} must be an int" + ("" if least is None else f" of at least {least}")
        raise LayoutError(where, must, fix, **{name: value})


def _is_int(value: Any, least: int | None = None) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and (least is None or value >= least)
