# SPDX-License-Identifier: Apache-2.0
"""plan(src, dst): the cheapest sequence of steps between two layouts of one tensor.

A pure function of frozen values, so every rank finds the same plan, whatever it planned before.

[Note: two meshes] Between meshes one exchange moves everything, straight from who has it to who
needs it, over a group of exactly the ranks of both. What is pending is reduced before, on the mesh
it is pending on. Where the destination holds copies, each of its ranks may take a piece over the
slow links between meshes, and the mesh gathers them over its own. These ways compete by time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hyper_parallel.core.collective import Step
from hyper_parallel.core.cost import TWO_LEVEL, LinkModel
from hyper_parallel.core.estimate import Estimate
from hyper_parallel.core.exchange import is_local
from hyper_parallel.core.layout import Layout, same_cut
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard
from hyper_parallel.core.search import cheapest_way
from hyper_parallel.core.states import Problem, State
from hyper_parallel.errors import LayoutError

__all__ = ["Plan", "plan"]

_MAX_PLANS = 8192


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that turn `src` into `dst`, in order. The same on every rank.

    Args:
        src: the layout before.
        dst: the layout after.
        steps: what to do; a step starts where the one before ended, though perhaps written
            otherwise (see `same_cut`).
        seconds: what the search took it to take; see `Estimate` for each step's part.
        itemsize: bytes per element that it was planned for.
        model: the link model that it was planned with.

    Example:
        >>> from hyper_parallel.core import AbstractMesh, Layout, Partial, Replicate, plan
        >>> mesh = AbstractMesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> print(plan(Layout(mesh, (Partial(),), (8,)), Layout(mesh, (Replicate(),), (8,))))
        from Layout([8], P(sum)@tp)
        to   Layout([8], R@tp)
        4 bytes an element
        <BLANKLINE>
        step                         group        sent  received  estimate
        all_reduce[tp: P(sum) -> R]  tp: 4 ranks  48 B      48 B     12 us
        <BLANKLINE>
        least to receive: 32 B, which some rank lacks; this plan: 1.50 times that
        link model 'two-level': 10 us a launch; tp 1 us a hop, 200 GB/s
        Bytes are those of the busiest rank, seconds those of the model: nothing was measured.
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    seconds: float = 0.0
    itemsize: int = 4
    model: LinkModel = TWO_LEVEL

    @property
    def communicates(self) -> bool:
        """Whether any step exchanges data."""
        return any(step.communicates for step in self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        estimate = Estimate.of(
            self.src, self.dst, self.steps, itemsize=self.itemsize, model=self.model
        )
        return str(estimate)


def plan(src: Layout, dst: Layout, *, itemsize: int = 4, model: LinkModel | None = None) -> Plan:
    """Find the steps that turn `src` into `dst`.

    Args:
        src: the layout the ranks hold.
        dst: the layout they shall hold; of the same global shape, on this or any other mesh.
        itemsize: bytes per element.
        model: what launches, hops and bytes cost; by default the first of several mesh axes is
            slow, as between nodes.

    Returns:
        The cheapest plan; empty when every rank holds the same part of the same value before and
        after: equal layouts, any change of an axis of size 1, placements that cut alike.

    Raises:
        LayoutError: the global shapes differ.

    Example:
        >>> from hyper_parallel.core import AbstractMesh, Layout, Shard
        >>> mesh = AbstractMesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> plan(Layout(mesh, (Shard(0),), (8, 8)), Layout(mesh, (Shard(1),), (8, 8))).steps
        (all_to_all[tp: S(0) -> S(1)],)
    """
    plans = src.mesh.plans  # kept there, so that no cache outlives the mesh and its groups
    key = (src, dst, itemsize, model)
    found = plans.get(key)
    if found is None:
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        model = model or TWO_LEVEL
        found = _plan(src, dst, itemsize, model)
        found = plans[key] = replace(found, itemsize=itemsize, model=model)
    return found


def _plan(src: Layout, dst: Layout, itemsize: int, model: LinkModel) -> Plan:
    if src.shape != dst.shape:
        must, fix = "src and dst must have one global shape", "Redistribute does not change shapes"
        raise LayoutError("plan", must, fix, src=src.shape, dst=dst.shape)
    if same_cut(src, dst):
        return Plan(src, dst, ())
    if src.mesh == dst.mesh:
        return _plan_on_one_mesh(src, dst, itemsize, model)
    return _plan_between_meshes(src, dst, itemsize, model)


def _plan_between_meshes(src: Layout, dst: Layout, itemsize: int, model: LinkModel) -> Plan:
    """Reduce on the mesh of `src`, exchange directly, gather or fill on the mesh of `dst`."""
    found: list[tuple[int, int, int, Plan]] = []
    for before, after in itertools.product(_starts(src), _landings(dst)):
        first = _plan_on_one_mesh(src, before, itemsize, model)
        last = _plan_on_one_mesh(after, dst, itemsize, model)
        middle, seconds = _crossing(before, after, itemsize, model)
        steps = (*first.steps, *middle, *last.steps)
        seconds += first.seconds + last.seconds
        plan = Plan(src, dst, steps, seconds)
        found.append((round(seconds * 1e12), len(steps), len(found), plan))
    return min(found)[-1]


def _crossing(
    before: Layout, after: Layout, itemsize: int, model: LinkModel
) -> tuple[tuple[Step, ...], float]:
    """Give the step between two layouts with nothing pending, on different meshes, and its time."""
    if same_cut(before, after):
        return (), 0.0
    axes = tuple(range(after.mesh.ndim))
    if is_local(before, after):
        return (Step("slice", axes, before, after),), 0.0
    received = math.prod(after.largest_shape)
    sent = -(-received * after.mesh.size() // before.mesh.size())
    num_ranks = len({*before.mesh.ranks, *after.mesh.ranks})
    seconds = model.seconds_between(num_ranks, size=max(received, sent) * itemsize)
    return (Step("exchange", axes, before, after),), seconds


def _starts(src: Layout) -> list[Layout]:
    """List what may cross to another mesh: the value, or what is left of it cut where pending."""
    pending = [axis for axis, p in enumerate(src.placements) if p.is_partial()]
    return [*_cut(src, pending), src.cotangent] if pending else [src]


def _landings(dst: Layout) -> list[Layout]:
    """List what may arrive on another mesh: `dst`, or pieces where `dst` is whole or pending."""
    pending = [axis for axis, p in enumerate(dst.placements) if p.is_partial()]
    whole = [axis for axis, p in enumerate(dst.placements) if p.cut_dim is None]
    inner = [axis for axis in whole if axis > 0]
    found = [dst.cotangent]
    for axes in (pending, whole, inner):
        found += _cut(dst, axes)
    return list(dict.fromkeys(found))


def _cut(layout: Layout, axes: list[int]) -> list[Layout]:
    """Cut the largest uncut dim, if there is one, along axes; replicate what else is pending."""
    uncut = [dim for dim, chain in enumerate(layout.chains) if not chain]
    if not uncut or not axes:
        return []
    piece = Shard(max(uncut, key=layout.shape.__getitem__))
    whole = layout.cotangent
    placements = [piece if axis in axes else p for axis, p in enumerate(whole.placements)]
    return [replace(whole, placements=tuple(placements))]


def _plan_on_one_mesh(src: Layout, dst: Layout, itemsize: int, model: LinkModel) -> Plan:
    way = cheapest_way(problem_of(src, dst, itemsize, model))
    steps: list[Step] = []
    here = src
    for i, leg in enumerate(way.legs, start=1):
        there = dst if i == len(way.legs) else _layout(src, leg.state)
        steps.append(Step(leg.kind, leg.axes, here, there))
        here = there
    return Plan(src, dst, tuple(steps), way.cost / 1e12)


def problem_of(src: Layout, dst: Layout, itemsize: int, model: LinkModel) -> Problem:
    """State what the search is asked for two layouts on one mesh."""
    start, end = (State(layout.simple_chains, layout.pending) for layout in (src, dst))
    return Problem(src.mesh.shape, src.shape, start, end, itemsize, model)


def _layout(like: Layout, state: State) -> Layout:
    """Write a state as a layout on the mesh of `like`; axes of one rank are replicated."""
    placements: list[Placement] = [
        Replicate() if op is None else Partial(op) for op in state.pending
    ]
    order: list[int] = []
    for chain in state.chains:
        for step in chain:
            placements[step.axis] = step.placement
            order.append(step.axis)
    rest = [axis for axis in range(like.mesh.ndim) if axis not in order]
    return Layout(like.mesh, tuple(placements), like.shape, tuple(order + rest))
