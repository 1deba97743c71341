# SPDX-License-Identifier: Apache-2.0
"""Estimate: what each step of a plan sends, receives and takes, as fields and as text.

[Note: counted bytes] Bytes are those of the rank that sends, or receives, most. An all-gather, a
reduce-scatter and an all-reduce are counted as a ring, a direct exchange by the parts that ranks
take from each other. What a backend adds to them (padding, a wider dtype) is not counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hyper_parallel.core.collective import Step
from hyper_parallel.core.cost import LinkModel, elements_moved
from hyper_parallel.core.exchange import Region, group_ranks, region_shape, transfers
from hyper_parallel.core.interval import count, intersect
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import AbstractMesh
from hyper_parallel.core.states import stays_pending

__all__ = ["Estimate", "StepEstimate", "align", "bytes_text", "seconds_text"]

_ASK_ALL = 64  # of a larger mesh only the ranks at the ends of its axes are asked
_E = TypeVar("_E", bound="Estimate")


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """What one step moves and takes; see [Note: counted bytes].

    Args:
        step: the step.
        num_ranks: how many ranks take part together; 1 in a local step.
        sent: bytes that a rank sends.
        received: bytes that a rank receives.
        seconds: what the link model says; 0 for a local step.
    """

    step: Step
    num_ranks: int
    sent: int
    received: int
    seconds: float

    @property
    def group(self) -> str:
        """The axes whose ranks take part, and how many there are; "local" where none do."""
        if not self.step.communicates:
            return "local"
        if self.step.kind == "exchange":
            return f"both meshes: {self.num_ranks} ranks"
        names = self.step.dst.mesh.axis_names
        return f"{'+'.join(names[axis] for axis in self.step.axes)}: {self.num_ranks} ranks"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the steps between two layouts move and take; `str` gives a table.

    Args:
        src: the layout before.
        dst: the layout after.
        itemsize: bytes per element.
        model: the link model behind the seconds.
        steps: each step's part, in order.
        needed: bytes that some rank needs and does not hold, so that any plan must let it receive
            as many; of a pending reduction one value of each element that it needs.
    """

    src: Layout
    dst: Layout
    itemsize: int
    model: LinkModel
    steps: tuple[StepEstimate, ...]
    needed: int

    @classmethod
    def of(
        cls: type[_E],
        src: Layout,
        dst: Layout,
        steps: Iterable[Step],
        *,
        itemsize: int,
        model: LinkModel,
    ) -> _E:
        """Estimate the steps of a plan from `src` to `dst`."""
        found = tuple(_estimate(step, itemsize, model) for step in steps)
        return cls(src, dst, itemsize, model, found, _needed(src, dst) * itemsize)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends at most, in all steps."""
        return sum(step.sent for step in self.steps)

    @property
    def received(self) -> int:
        """Bytes that a rank receives at most, in all steps."""
        return sum(step.received for step in self.steps)

    @property
    def seconds(self) -> float:
        """What all steps take, one after the other."""
        return sum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        head = f"from {self.src}\nto   {self.dst}\n{self.itemsize} bytes an element"
        if not self.steps:
            return f"{head}\n\n(nothing to do)"
        rows = [
            (repr(one.step), one.group, one.sent, one.received, one.seconds) for one in self.steps
        ]
        if len(rows) > 1:
            rows.append(("total", "", self.sent, self.received, self.seconds))
        table = [("step", "group", "sent", "received", "estimate")]
        for what, group, *figures in rows:
            if not any(figures):
                table.append((what, group, "-", "-", "-"))
            else:
                sent, received, seconds = figures
                moved = (bytes_text(int(sent)), bytes_text(int(received)))
                table.append((what, group, *moved, seconds_text(seconds)))
        return f"{head}\n\n{align(table, '<<>>>')}\n\n{self._about()}"

    def _about(self) -> str:
        """Say what to compare the figures with, and where they come from."""
        if self.received == 0:
            return "Every rank holds what it needs; nothing is sent."
        crosses = any(one.step.kind == "exchange" for one in self.steps)
        ratio = f"; this plan: {self.received / self.needed:.2f} times that" if self.needed else ""
        return (
            f"least to receive: {bytes_text(self.needed)}, which some rank lacks{ratio}\n"
            f"link model {self.model.describe(self.dst.mesh.axis_names, crosses=crosses)}\n"
            "Bytes are those of the busiest rank, seconds those of the model: nothing was measured."
        )


def _estimate(step: Step, itemsize: int, model: LinkModel) -> StepEstimate:
    if not step.communicates or 0 in step.src.shape:
        return StepEstimate(step, 1, 0, 0, 0.0)
    ranks = _ranks_to_ask(step.src.mesh, step.dst.mesh)
    num_ranks = len(group_ranks(step, ranks[0]))
    sent, received = (n * itemsize for n in _elements(step, num_ranks, ranks))
    size = max(sent, received)
    if step.kind == "exchange":
        seconds = model.seconds_between(num_ranks, size=size)
    else:
        seconds = model.seconds(step.dst.mesh.shape, step.axes, size=size)
    return StepEstimate(step, num_ranks, sent, received, seconds)


def _elements(step: Step, num_ranks: int, ranks: Sequence[int]) -> tuple[int, int]:
    """Give the elements that the busiest rank sends and receives; see [Note: counted bytes]."""
    if step.kind == "all_reduce":
        held = math.prod(step.src.largest_shape)
        moved = elements_moved("all_reduce", num_ranks, held, (held, held))
        return moved, moved
    if step.kind in ("all_gather", "reduce_scatter"):
        sizes = [[math.prod(x.local_shape(rank)) for rank in ranks] for x in (step.src, step.dst)]
        moved = max(abs(a - b) for a, b in zip(*sizes, strict=True))
        return moved, moved
    sent = received = 0
    for rank in ranks:
        table, me = transfers(step, rank), group_ranks(step, rank).index(rank)
        sent = max(sent, _others(table.send, me))
        received = max(received, _others(table.receive, me))
    return sent, received


def _others(regions: Sequence[Region], me: int) -> int:
    """Count the elements of all parts but the own one."""
    return sum(math.prod(region_shape(part)) for i, part in enumerate(regions) if i != me)


def _ranks_to_ask(*meshes: AbstractMesh) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for mesh in meshes:
        every = [
            range(n) if mesh.size() <= _ASK_ALL else sorted({0, 1 % n, n - 1}) for n in mesh.shape
        ]
        found.update(dict.fromkeys(map(mesh.rank_at, itertools.product(*every))))
    return tuple(found)


def _needed(src: Layout, dst: Layout) -> int:
    """Give the elements that some rank needs in `dst` and does not hold in `src`.

    A rank that gets no share of a new pending sum needs nothing, so only the first rank of such an
    axis is asked; and none where the shares begin as the cuts of `src`, which fix no rank's needs.
    """
    alike = src.mesh == dst.mesh
    before, after = dict(enumerate(src.pending)), dict(enumerate(dst.pending))
    kept = {axis for axis, op in after.items() if alike and stays_pending(before[axis], op)}
    gained = {axis for axis, op in after.items() if op and axis not in kept}
    if alike and any(src.placements[axis].cut_dim is not None for axis in gained):
        return 0
    reduces, most = any(op and axis not in kept for axis, op in before.items()), 0
    for rank in _ranks_to_ask(dst.mesh):
        coordinate = dst.mesh.coordinate(rank)
        assert coordinate is not None
        if any(coordinate[axis] for axis in gained):
            continue
        wanted = dst.intervals_at(coordinate)
        need, own = math.prod(map(count, wanted)), 0
        if src.mesh.coordinate(rank) is not None:
            own = math.prod(map(count, map(intersect, wanted, src.intervals(rank))))
        most = max(most, need if reduces else need - own)
    return most


def bytes_text(size: int) -> str:
    """Write a number of bytes with at most three digits before and one behind the point."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(size.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{_short(size / 1024**power)} {units[power]}"


def seconds_text(seconds: float) -> str:
    """Write a time in microseconds, milliseconds or seconds."""
    for unit, least in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= least:
            return f"{_short(seconds / least)} {unit}"
    return f"{_short(seconds * 1e6)} us"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def align(rows: Sequence[Sequence[str]], sides: str) -> str:
    """Write rows of cells as aligned columns, each to its side, "<" or ">"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    )
