# SPDX-License-Identifier: Apache-2.0
"""Plan steps as data: what one step moves, over which mesh axes, from which layout to which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyper_parallel.core.layout import Layout

__all__ = ["COMMUNICATING", "Step", "StepKind"]

StepKind = Literal[
    "all_reduce",  # P -> R
    "all_gather",  # cut -> R
    "reduce_scatter",  # P -> cut
    "all_to_all",  # any cut -> any other; pending reductions stay as they are
    "exchange",  # any cut -> any on another mesh, among the ranks of both; nothing is pending
    "slice",  # R -> cut, local; to another mesh: any cut -> what each rank of it holds already
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
            ranks row-major by coordinate. Between meshes: all axes of that of `dst`.
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
