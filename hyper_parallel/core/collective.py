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
    "all_gather",  # S -> R
    "reduce_scatter",  # P -> S
    "all_to_all",  # S(a) -> S(b)
    "slice",  # R -> S, local
    "fill",  # R or S -> P: the own share, the reduction's identity elsewhere, local
    "scale",  # P(sum) <-> P(avg), local
]

COMMUNICATING: frozenset[str] = frozenset(
    ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan.

    Args:
        kind: what it does.
        axes: the mesh axes whose ranks take part; today always one.
        src: the layout before the step.
        dst: the layout after it; differs from `src` only on `axes`.
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
        names = "+".join(self.src.mesh.axis_names[axis] for axis in self.axes)
        moved = ", ".join(
            f"{self.src.placements[axis]!r} -> {self.dst.placements[axis]!r}" for axis in self.axes
        )
        return f"{self.kind}[{names}: {moved}]"


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that turn `src` into `dst`, in order. The same on every rank.

    Example:
        >>> from hyper_parallel.core import AbstractMesh, Layout, Partial, Replicate, plan
        >>> mesh = AbstractMesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> print(plan(Layout(mesh, (Partial(),), (8,)), Layout(mesh, (Replicate(),), (8,))))
        all_reduce[tp: P(sum) -> R]
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]

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
