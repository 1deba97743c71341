# SPDX-License-Identifier: Apache-2.0
"""Placements: what one mesh axis does to a tensor. Values only; they never communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hyper_parallel.errors import LayoutError, describe

__all__ = ["REDUCE_OPS", "Partial", "Placement", "Replicate", "Shard", "cotangent", "normalize"]

REDUCE_OPS: Final = ("sum", "avg", "max", "min", "product")


class Placement:
    """Common base of `Replicate`, `Shard` and `Partial`."""

    __slots__ = ()

    def is_replicate(self) -> bool:
        """Tell whether every rank of the axis holds the whole value."""
        return False

    def is_shard(self, dim: int | None = None) -> bool:
        """Tell whether the axis cuts a tensor dim (`dim`, or any)."""
        del dim
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Tell whether the axis holds a pending reduction (`reduce_op`, or any)."""
        del reduce_op
        return False


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the whole value.

    Example:
        >>> Replicate()
        R
    """

    def is_replicate(self) -> bool:
        """Tell that every rank of the axis holds the whole value."""
        return True

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
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(
                describe("Shard", "dim must be an int", "Pass the tensor dim to cut", dim=self.dim)
            )
        is_int = isinstance(self.block, int) and not isinstance(self.block, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_int or self.block < 1:
            raise LayoutError(
                describe(
                    "Shard",
                    "block must be an int of at least 1",
                    "Pass the number of elements that stay together, or leave it out",
                    block=self.block,
                )
            )

    def is_shard(self, dim: int | None = None) -> bool:
        """Tell whether it is `dim` that is cut; any dim if None."""
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        return f"S({self.dim})" if self.block == 1 else f"S({self.dim}, block={self.block})"


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
            raise LayoutError(
                describe(
                    "Partial",
                    f"reduce_op must be one of {', '.join(REDUCE_OPS)}",
                    "Pass one of these names",
                    reduce_op=self.reduce_op,
                )
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Tell whether `reduce_op` is pending; any op if None."""
        return reduce_op is None or reduce_op == self.reduce_op

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
            raise LayoutError(
                describe(
                    where,
                    "every placement must be a Replicate, Shard or Partial",
                    "Pass a sequence with one placement per mesh axis",
                    placement=placement,
                )
            )
        if isinstance(placement, Shard):
            if ndim == 0:
                raise LayoutError(
                    describe(
                        where,
                        "a tensor of 0 dims must be Replicate or Partial",
                        "Replicate it",
                        placement=placement,
                    )
                )
            if not -ndim <= placement.dim < ndim:
                raise LayoutError(
                    describe(
                        where,
                        f"Shard dim must be in [{-ndim}, {ndim}) for a tensor of {ndim} dims",
                        "Pass a dim the tensor has",
                        dim=placement.dim,
                    )
                )
            if placement.dim < 0:
                placement = Shard(placement.dim + ndim, placement.block)
        result.append(placement)
    return tuple(result)
