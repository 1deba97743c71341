# SPDX-License-Identifier: Apache-2.0
"""Plan steps as data: what one step moves, over which mesh axes, from which layout to which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hyper_parallel.core.layout import Layout

__all__ = ["COMMUNICATING", "Plan", "Step", "StepKind"]

StepKind = Literal[
    "all_reduce",  # P -> R
    "all_gather",  # cut -> R
    "reduce_scatter",  # P -> cut
    "all_to_all",  # any cut -> any other; pending reductions stay as they are
    "exchange",  # as all_to_all, to another mesh of the same ranks; nothing is pending
    "slice",  # R -> cut, local
    "fill",  # R or cut -> P: the own share, the reduction's identity elsewhere, local
    "scale",  # P(sum) <-> P(avg), local
]

COMMUNICATING: frozenset[str] = frozenset(
    ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange")
)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan.

    Args:
        kind: what it does.
        axes: the mesh axes whose ranks take part together, ascending. Their joint group lists its
            ranks row-major by coordinate.
        src: the layout before the step.
        dst: the layout after it.
    """

    kind: StepKind
    axes: tuple[int, ...]
    src: Layout
    dst: Layout

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange data in this step."""
        return self.kind in COMMUNICATING

    def __repr__(self) -> str:
        if self.src.mesh != self.dst.mesh:
            return f"{self.kind}[{self.src} -> {self.dst}]"
        names = self.src.mesh.axis_names
        pairs = list(zip(self.src.placements, self.dst.placements, strict=True))
        changed = [axis for axis, (before, after) in enumerate(pairs) if before != after]
        named = changed == list(self.axes)
        moved = ", ".join(
            f"{pairs[axis][0]!r} -> {pairs[axis][1]!r}" + ("" if named else f" @{names[axis]}")
            for axis in changed
        )
        orders = (self.src.order, self.dst.order)
        order = "" if orders[0] == orders[1] else f", order {orders[0]} -> {orders[1]}"
        return f"{self.kind}[{'+'.join(names[axis] for axis in self.axes)}: {moved}{order}]"


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that turn `src` into `dst`, in order. The same on every rank.

    Args:
        src: the layout before.
        dst: the layout after.
        steps: what to do; a step starts where the one before ended, though perhaps written
            otherwise (see `same_cut`).
        seconds: the estimate of the link model it was planned with.

    Example:
        >>> from hyper_parallel.core import AbstractMesh, Layout, Partial, Replicate, plan
        >>> mesh = AbstractMesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> print(plan(Layout(mesh, (Partial(),), (8,)), Layout(mesh, (Replicate(),), (8,))))
        all_reduce[tp: P(sum) -> R]
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    seconds: float = 0.0

    @property
    def communicates(self) -> bool:
        """Whether any step exchanges data."""
        return any(step.communicates for step in self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        return "\n".join(map(repr, self.steps)) or "(nothing to do)"
