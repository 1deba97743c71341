# SPDX-License-Identifier: Apache-2.0
"""Who sends which part of its array to whom in a step, as positions in the local arrays.

[Note: holders] In a direct exchange the ranks that cut alike hold replicas. What a rank needs it
takes from itself if it can, else from the replica whose number, among those, is its own plus its
place among the cuts: a rotation, so that the replicas share the work. Every rank derives its own
rows of the table from the step alone, and what one sends is what the other expects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.core.collective import Step
from hyper_parallel.core.interval import Intervals, count, intersect, positions
from hyper_parallel.core.layout import Layout

__all__ = ["Region", "Transfers", "group_ranks", "parts_of", "region_shape", "transfers"]

# The runs of positions along each dim of a local array; their product is a part of the array.
Region = tuple[Intervals, ...]


def region_shape(region: Region) -> tuple[int, ...]:
    """Give the shape of a part of an array."""
    return tuple(map(count, region))


def group_ranks(step: Step, rank: int) -> tuple[int, ...]:
    """List the ranks that take part in a step with `rank`, in the order of the joint group."""
    return step.dst.mesh.submesh_ranks(step.axes, rank=rank)


def parts_of(whole: Layout, rank: int, pieces: Layout, ranks: Sequence[int]) -> list[Region]:
    """Give where, in what `rank` holds of `whole`, lies what others hold of `pieces`."""
    held = whole.intervals(rank)
    return [
        tuple(map(positions, map(intersect, pieces.intervals(other), held), held))
        for other in ranks
    ]


@dataclass(frozen=True, slots=True)
class Transfers:
    """One rank's rows of a direct exchange, by position in the group; the own part is in both.

    Args:
        send: the parts of the local array before that go to each rank.
        receive: the parts of the local array after that come from each rank.
    """

    send: tuple[Region, ...]
    receive: tuple[Region, ...]


def transfers(step: Step, rank: int) -> Transfers:
    """Say what `rank` sends and receives in a direct exchange; see [Note: holders].

    Args:
        step: an all_to_all, or an exchange between meshes.
        rank: a global rank of the meshes.

    Returns:
        What it sends and receives, by rank of the group.

    Example:
        >>> from hyper_parallel.core import AbstractMesh, Layout, Shard, plan
        >>> mesh = AbstractMesh("cpu", (2,))
        >>> a, b = (Layout(mesh, (Shard(dim),), (4, 2)) for dim in (0, 1))
        >>> transfers(plan(a, b).steps[0], 0).send
        ((((0, 2),), ((0, 1),)), (((0, 2),), ((1, 2),)))
    """
    ranks = group_ranks(step, rank)
    places = _places(step, ranks)
    mine = places[ranks.index(rank)]
    before, after = step.src.intervals(rank), step.dst.intervals(rank)
    nothing: Region = ((),) * len(step.src.shape)
    send: list[Region] = []
    receive: list[Region] = []
    for other, place in zip(ranks, places, strict=True):
        sent = received = nothing
        if place.takes_from(mine):
            both = map(intersect, before, step.dst.intervals(other))
            sent = tuple(map(positions, both, before))
        if mine.takes_from(place):
            both = map(intersect, step.src.intervals(other), after)
            received = tuple(map(positions, both, after))
        send.append(sent)
        receive.append(received)
    return Transfers(tuple(send), tuple(receive))


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's place among the cuts and among the replicas of a group."""

    cut: int
    replica: int
    num_replicas: int

    def takes_from(self, other: _Place) -> bool:
        """Tell whether this rank takes from another what that one holds."""
        if self.cut == other.cut:
            return self.replica == other.replica
        return other.replica == (self.replica + self.cut) % self.num_replicas


def _places(step: Step, ranks: Sequence[int]) -> list[_Place]:
    mesh = step.src.mesh
    axes = step.axes if mesh == step.dst.mesh else range(mesh.ndim)
    cutting = {cut.axis for chain in step.src.simple_chains for cut in chain}
    cuts = [axis for axis in axes if axis in cutting]
    replicas = [axis for axis in axes if axis not in cutting]
    num_replicas = math.prod(mesh.shape[axis] for axis in replicas)
    found: list[_Place] = []
    for rank in ranks:
        coordinate = mesh.coordinate(rank)
        assert coordinate is not None
        numbers = [_number(mesh.shape, coordinate, part) for part in (cuts, replicas)]
        found.append(_Place(numbers[0], numbers[1], num_replicas))
    return found


def _number(shape: Sequence[int], coordinate: Sequence[int], axes: Sequence[int]) -> int:
    number = 0
    for axis in axes:
        number = number * shape[axis] + coordinate[axis]
    return number
