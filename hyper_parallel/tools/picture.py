# SPDX-License-Identifier: Apache-2.0
"""Draw a move: per rank and state a box for the tensor, with what the rank holds coloured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from hyper_parallel.core import Estimate, Layout
from hyper_parallel.core.estimate import StepEstimate, bytes_text, seconds_text
from hyper_parallel.core.interval import Intervals, intersect, whole

__all__ = ["draw"]

_MOST_RANKS = 16
_INCHES = 1.5  # per unit
_BETWEEN = 2.2  # columns are this far apart, of which a box takes 1
_TAB20 = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
_COLORS = (*_TAB20[::2], *_TAB20[1::2])  # strong ones first
_Part = tuple[Intervals, Intervals]


def draw(explanation: Estimate) -> Figure:
    """Draw one row per rank, and one column per state, from before the first step to the last."""
    states = [explanation.src, *(one.step.dst for one in explanation.steps)]
    ranks = _ranks(states)[:_MOST_RANKS]
    dims = _dims_to_draw(states)
    height, notes = _height(explanation.src, dims), _notes(explanation, states, dims)
    bottom = -1.2 * height * len(ranks)
    axes = _canvas(states, bottom, notes)
    colors = _colors(explanation.src, dims)
    for column, state in enumerate(states):
        left = column * _BETWEEN
        title = "\n".join(
            f"{p!r}@{name}" for p, name in zip(state.placements, state.mesh.axis_names, strict=True)
        )
        axes.text(left + 0.5, 0, title, ha="center", va="bottom", family="monospace")
        for row, rank in enumerate(ranks):
            corner = (left, -(row + 1) * height * 1.2)
            _draw_box(axes, state, rank, dims, (corner, height, colors))
    for row, rank in enumerate(ranks):
        axes.text(-0.1, -(row + 0.6) * height * 1.2, f"rank {rank}", ha="right", va="center")
    for column, one in enumerate(explanation.steps):
        _draw_arrow(axes, one, (column * _BETWEEN + 1, bottom / 2))
    return axes.figure  # type: ignore[return-value]


def _canvas(states: Sequence[Layout], bottom: float, notes: Sequence[str]) -> Axes:
    """Make a figure in which a box is 1 wide, its origin at the top left box; write the notes."""
    left, right = -0.8, (len(states) - 1) * _BETWEEN + 1.2
    spare = max(4.4 - (right - left), 0) / 2  # for the notes
    low, top = bottom - 0.15 - 0.13 * len(notes), 0.1 + 0.12 * max(x.mesh.ndim for x in states)
    figure = Figure(figsize=((right - left + 2 * spare) * _INCHES, (top - low) * _INCHES))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(left - spare, right + spare), ylim=(low, top))
    axes.set_axis_off()
    middle = (left + right) / 2
    axes.text(middle, bottom - 0.1, "\n".join(notes), ha="center", va="top", size="small")
    return axes


def _ranks(states: Sequence[Layout]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(rank for state in states for rank in state.mesh.ranks))


def _dims_to_draw(states: Sequence[Layout]) -> tuple[int, ...]:
    """Choose two dims at most: first those that some state cuts."""
    ndim = states[0].ndim
    cut = [d for d in range(ndim) if any(state.simple_chains[d] for state in states)]
    return tuple(sorted([*cut, *(d for d in range(ndim) if d not in cut)][:2]))


def _height(layout: Layout, dims: Sequence[int]) -> float:
    """Give a box's height for a width of 1: roughly in proportion, and never too thin."""
    if len(dims) < 2:
        return 0.3
    rows, columns = (max(layout.shape[d], 1) for d in dims)
    return min(max(rows / columns, 0.3), 0.8)


def _part(layout: Layout, rank: int, dims: Sequence[int]) -> _Part:
    """Give what a rank holds along the drawn dims, as rows and columns; a vector is one row."""
    if 0 in layout.local_shape(rank):
        return (), ()
    held = layout.intervals(rank)
    rows, columns = [whole(1), whole(1), *(held[d] for d in dims)][-2:]
    return rows, columns


def _colors(src: Layout, dims: Sequence[int]) -> dict[_Part, tuple[float, ...]]:
    """Give each part of the tensor, as it lies in `src`, a colour of its own."""
    parts = dict.fromkeys(_part(src, rank, dims) for rank in src.mesh.ranks)
    return {part: _COLORS[i % len(_COLORS)] for i, part in enumerate(parts)}


def _draw_box(axes: Axes, state: Layout, rank: int, dims: Sequence[int], where: tuple) -> None:
    """Draw what one rank holds in one state, in the colours of the parts it comes from."""
    corner, height, colors = where
    sizes = [state.shape[d] for d in dims]
    rows, columns = [1, 1, *sizes][-2:]
    scale = (1 / max(columns, 1), height / max(rows, 1))
    held = _part(state, rank, dims)
    outline = list(_boxes((whole(rows), whole(columns)), rows, corner, scale))
    axes.add_collection(PolyCollection(outline, facecolors="white", edgecolors="0.6"))
    for part, color in colors.items():
        both = (intersect(held[0], part[0]), intersect(held[1], part[1]))
        pieces = list(_boxes(both, rows, corner, scale))
        hatch = "////" if state.has_partial else None
        axes.add_collection(
            PolyCollection(pieces, facecolors=[color], edgecolors="white", hatch=hatch, lw=0.4)
        )


def _boxes(
    part: _Part, num_rows: int, corner: tuple[float, float], scale: tuple[float, float]
) -> Iterator[list[tuple[float, float]]]:
    """Yield the corners of each rectangle of a part; row 0 is at the top."""
    for top, bottom in part[0]:
        for left, right in part[1]:
            xs = [corner[0] + scale[0] * x for x in (left, right)]
            ys = [corner[1] + scale[1] * (num_rows - y) for y in (top, bottom)]
            yield [(xs[0], ys[0]), (xs[1], ys[0]), (xs[1], ys[1]), (xs[0], ys[1])]


def _draw_arrow(axes: Axes, one: StepEstimate, start: tuple[float, float]) -> None:
    x, y = start
    end = (x + _BETWEEN - 1 - 0.1, y)
    axes.annotate("", xy=end, xytext=(x + 0.1, y), arrowprops={"arrowstyle": "->"})
    middle = (x + end[0]) / 2 + 0.05
    axes.text(middle, y + 0.05, f"{one.step.kind}\n{one.group}", ha="center", va="bottom", size=9)
    if one.received:
        cost = f"{bytes_text(one.received)} received\n{seconds_text(one.seconds)}"
        axes.text(middle, y - 0.05, cost, ha="center", va="top", size=9)


def _notes(explanation: Estimate, states: Sequence[Layout], dims: Sequence[int]) -> list[str]:
    """Say what the drawing leaves out."""
    src, notes = explanation.src, [f"global shape {list(explanation.src.shape)}"]
    if any(state.has_partial for state in states):
        notes[0] += "; hatched: waits for a reduction"
    if src.ndim > len(dims):
        hidden = [d for d in range(src.ndim) if d not in dims]
        cut = [d for d in hidden if any(state.simple_chains[d] for state in states)]
        notes.append(f"drawn along dims {', '.join(map(str, dims))} of {src.ndim}")
        if cut:
            notes[-1] += f"; what is not drawn: the cuts of {', '.join(f'dim {d}' for d in cut)}"
    num_ranks = len(_ranks(states))
    if num_ranks > _MOST_RANKS:
        notes.append(f"the first {_MOST_RANKS} of {num_ranks} ranks")
    if explanation.received:
        notes.append(
            f"{bytes_text(explanation.received)} received, {bytes_text(explanation.needed)} at"
            f" least; {seconds_text(explanation.seconds)} by link model {explanation.model.name!r}"
        )
    return notes
