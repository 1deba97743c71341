# SPDX-License-Identifier: Apache-2.0
"""visualize_sharding: print which rank holds which slice of a tensor of one or two dims."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core import Layout
from hyper_parallel.core.estimate import align
from hyper_parallel.core.interval import Intervals, whole
from hyper_parallel.errors import HyperParallelError, LayoutError

__all__ = ["visualize_sharding"]

_WHERE = "visualize_sharding"


def visualize_sharding(dtensor: Any, header: str = "", use_rich: bool = False) -> None:
    """Print which rank holds which slice of a DTensor, or of what a Layout describes.

    A DTensor is printed by the first rank of its mesh alone.

    Args:
        dtensor: of one or two dims.
        header: printed above the table.
        use_rich: draw the table with rich, which must be installed.

    Raises:
        LayoutError: `dtensor` is neither, or has another number of dims.
        HyperParallelError: rich is asked for and not installed.

    Example:
        >>> from hyper_parallel.core import AbstractMesh, Layout, Shard
        >>> mesh = AbstractMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> visualize_sharding(Layout(mesh, (Shard(0), Shard(1)), (5, 4)))
        Layout([5, 4], S(0)@dp, S(1)@tp)
             0:2     2:4
        0:3  rank 0  rank 1
        3:5  rank 2  rank 3
    """
    layout = dtensor if isinstance(dtensor, Layout) else getattr(dtensor, "layout", None)
    if not isinstance(layout, Layout) or layout.ndim not in (1, 2):
        got = layout if isinstance(layout, Layout) else type(dtensor).__name__
        raise LayoutError(
            _WHERE,
            "dtensor must be a DTensor or a Layout of one or two dims",
            "Use its layout.slices(rank) for other tensors",
            dtensor=got,
        )
    if use_rich:
        _require_rich()
    if not isinstance(dtensor, Layout) and dtensor.device_mesh.get_rank() != layout.mesh.ranks[0]:
        return
    title = f"{header}\n{layout}" if header else f"{layout}"
    table = _table(layout)
    if use_rich:
        _print_rich(title, table)
        return
    print(title, align(table, "<" * len(table[0])), sep="\n")


def _table(layout: Layout) -> list[list[str]]:
    """Give a row per distinct part of the first dim, a column per one of the last, and ranks."""
    holders: dict[tuple[Intervals, Intervals], list[int]] = {}
    for rank in layout.mesh.ranks:
        rows, columns = [whole(1), *layout.intervals(rank)][-2:]
        holders.setdefault((rows, columns), []).append(rank)
    rows, columns = (sorted(set(parts), key=_place) for parts in zip(*holders, strict=True))
    table = [["", *map(_slices, columns)]]
    for row in rows:
        ranks = [holders.get((row, column), []) for column in columns]
        table.append([_slices(row) if layout.ndim == 2 else "", *map(_ranks, ranks)])
    return table


def _place(held: Intervals) -> tuple[bool, Intervals]:
    return not held, held  # empty shards last


def _slices(held: Intervals) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in held) or "nothing"


def _ranks(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}" if ranks else ""


def _require_rich() -> None:
    try:
        import rich  # noqa: F401
    except ImportError as error:
        text, do = "rich must be installed for use_rich=True", "Install it, or leave use_rich out"
        raise HyperParallelError(_WHERE, text, f"{do} ({error})") from error


def _print_rich(title: str, table: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*table[0], title=title, show_lines=True)
    for row in table[1:]:
        drawn.add_row(*row)
    Console().print(drawn)
