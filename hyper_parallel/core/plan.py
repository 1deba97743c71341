# SPDX-License-Identifier: Apache-2.0
"""plan(src, dst): the cheapest sequence of one-axis steps between two layouts of one tensor.

[Note: innermost] Axes that cut one tensor dim nest from left to right, so an axis can gather,
cut or exchange a dim only while no later axis cuts that same dim.

The search is Dijkstra over the placements that occur in `src` or `dst`, and Replicate, per axis.
Everything is a pure function of frozen values, so every rank finds the same plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import lru_cache

from hyper_parallel.core.collective import Plan, Step, StepKind
from hyper_parallel.core.layout import Layout, chunk_sizes
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard
from hyper_parallel.errors import LayoutError, PlanError, describe

__all__ = ["plan"]

# One collective launch costs as much as this many elements; only the order of plans depends on it.
_LAUNCH_ELEMENTS = 4096.0

_Placements = tuple[Placement, ...]


@lru_cache(maxsize=8192)
def plan(src: Layout, dst: Layout) -> Plan:
    """Find the steps that turn `src` into `dst`.

    Args:
        src: the layout the ranks hold.
        dst: the layout they shall hold; same mesh, same global shape.

    Returns:
        The plan; empty when every rank holds the same part of the same value before and after:
        equal layouts, any change of an axis of size 1, blocks that cut alike.

    Raises:
        LayoutError: the global shapes differ.
        PlanError: the meshes differ.

    Example:
        >>> from hyper_parallel.core import AbstractMesh, Layout, Shard
        >>> mesh = AbstractMesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> plan(Layout(mesh, (Shard(0),), (8, 8)), Layout(mesh, (Shard(1),), (8, 8))).steps
        (all_to_all[tp: S(0) -> S(1)],)
    """
    if src.shape != dst.shape:
        raise LayoutError(
            describe(
                "plan",
                "src and dst must have one global shape",
                "Redistribute does not change shapes",
                src=src.shape,
                dst=dst.shape,
            )
        )
    if src.mesh != dst.mesh:
        raise PlanError(
            describe(
                "plan",
                "src and dst must be on one mesh",
                "Moving a tensor to another mesh is not supported yet; gather it with"
                " full_tensor() and distribute it again",
                src=src.mesh,
                dst=dst.mesh,
            )
        )
    return Plan(src, dst, _search(src, dst))


def _search(src: Layout, dst: Layout) -> tuple[Step, ...]:
    choices = [
        tuple(dict.fromkeys((d, s, Replicate())))
        for s, d in zip(src.placements, dst.placements, strict=True)
    ]
    best: dict[_Placements, float] = {src.placements: 0.0}
    came: dict[_Placements, tuple[_Placements, Step | None]] = {}
    queue: list[tuple[float, int, _Placements]] = [(0.0, 0, src.placements)]
    order = 0
    while queue:
        cost, _, here = heapq.heappop(queue)
        if here == dst.placements:
            return _path(came, src.placements, here)
        if cost > best[here]:
            continue
        for step, there in _neighbours(src.with_placements(here), choices):
            price = cost + (0.0 if step is None else _price(step))
            if price < best.get(there, math.inf):
                order += 1
                best[there] = price
                came[there] = (here, step)
                heapq.heappush(queue, (price, order, there))
    raise PlanError(f"no plan from {src} to {dst}")  # cannot be: Replicate is always reachable


def _path(
    came: dict[_Placements, tuple[_Placements, Step | None]], start: _Placements, end: _Placements
) -> tuple[Step, ...]:
    steps: list[Step] = []
    while end != start:
        end, step = came[end]
        if step is not None:
            steps.append(step)
    return tuple(reversed(steps))


def _neighbours(
    here: Layout, choices: list[tuple[Placement, ...]]
) -> Iterator[tuple[Step | None, _Placements]]:
    """Yield each one-axis step from `here`, and the placements after it."""
    for axis, options in enumerate(choices):
        for option in options:
            if option == here.placements[axis]:
                continue
            placements = (*here.placements[:axis], option, *here.placements[axis + 1 :])
            try:
                there = here.with_placements(placements)
            except LayoutError:  # reductions that do not commute, or a block that does not divide
                continue
            if here.mesh.shape[axis] == 1 or _same_cut(here, there, axis):
                yield None, placements
                continue
            kind = _kind(here, axis, option)
            if kind is not None:
                yield Step(kind, (axis,), here, there), placements


def _same_cut(here: Layout, there: Layout, axis: int) -> bool:
    """Tell whether the axis cuts one dim into the same pieces, though with other blocks."""
    now, then = here.placements[axis], there.placements[axis]
    if not (isinstance(now, Shard) and isinstance(then, Shard) and now.dim == then.dim):
        return False
    n = here.mesh.shape[axis]
    return all(
        chunk_sizes(size, n, now.block) == chunk_sizes(size, n, then.block)
        for size in here.sizes_before(axis, now.dim)
    )


def _kind(here: Layout, axis: int, option: Placement) -> StepKind | None:
    """Name the step that turns the axis into `option`, or None where no single step does."""
    now = here.placements[axis]
    for placement in (now, option):
        if isinstance(placement, Shard) and any(
            later.is_shard(placement.dim) for later in here.placements[axis + 1 :]
        ):
            return None  # see [Note: innermost]
    if isinstance(now, Partial):
        if isinstance(option, Partial):
            return "scale" if {now.reduce_op, option.reduce_op} == {"sum", "avg"} else None
        return "reduce_scatter" if isinstance(option, Shard) else "all_reduce"
    if isinstance(option, Partial):
        return "fill"
    if isinstance(now, Shard):
        if isinstance(option, Shard):
            return "all_to_all" if option.dim != now.dim else None
        return "all_gather"
    return "slice"


def _price(step: Step) -> float:
    """Estimate what the busiest rank receives, in elements, plus the launch."""
    if not step.communicates:
        return 1.0  # a local pass is not quite free, so that plans have no idle steps
    n = step.src.mesh.shape[step.axes[0]]
    before, after = _largest(step.src), _largest(step.dst)
    share = (n - 1) / n
    moved = {
        "all_reduce": 2 * share * before,
        "all_gather": share * after,
        "reduce_scatter": share * before,
        "all_to_all": share * before,
    }[step.kind]
    return _LAUNCH_ELEMENTS + moved


def _largest(layout: Layout) -> int:
    """Give the number of elements the first coordinate holds; chunks never grow along an axis."""
    held = layout.held_before(layout.mesh.ndim, (0,) * layout.mesh.ndim)
    return math.prod(stop - start for start, stop in held)
