# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal: by rich where it is installed, else as aligned text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["show_table"]

Rows = Sequence[Sequence[str]]


def show_table(title: str, rows: Rows) -> None:
    """Print a table.

    Args:
        title: printed above it.
        rows: the heading, then the rows; all of one length.
    """
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print("\n".join([title, *_aligned(rows), ""]))
        return
    console, table = Console(), Table(title=title, title_justify="left")
    for i, heading in enumerate(rows[0]):
        is_number = all(_is_number(row[i]) for row in rows[1:])
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(table)


def _is_number(text: str) -> bool:
    return text.replace(".", "").replace("-", "").isdigit() or not text


def _aligned(rows: Rows) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return [f"  {line}".rstrip() for line in lines]
