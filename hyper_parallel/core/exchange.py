# SPDX-License-Identifier: Apache-2.0
"""Who sends which part of its array to whom in a step, as positions in the local arrays.

[Note: holders] In a direct exchange the ranks that cut alike hold replicas. What a rank needs it
takes from itself if it can; else from a replica at its own place of the first axis, which connects
nodes, where there are several; among these, the ranks that need one and the same part are numbered
and dealt out in turn (exactly where one dim's cuts divide the other's, else nearly), so that the
replicas share the work. Every rank derives its own rows of the table from the step alone, and what
one sends is what the other expects. A rank outside the mesh before sends nothing, one outside the
mesh after receives nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hyper_parallel.core.collective import Step
from hyper_parallel.core.interval import Intervals, count, intersect, positions, whole
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import AbstractMesh

__all__ = [
    "Region",
    "Transfers",
    "group_ranks",
    "is_local",
    "parts_of",
    "region_shape",
    "transfers",
]

# The runs of positions along each dim of a local array; their product is a part of the array.
Region = tuple[Intervals, ...]


def region_shape(region: Region) -> tuple[int, ...]:
    """Give the shape of a part of an array."""
    return tuple(map(count, region))


def group_ranks(step: Step, rank: int) -> tuple[int, ...]:
    """List the ranks that take part in a step with `rank`, in the order of the joint group.

    Between meshes of other ranks these are the ranks of both, ascending: no result depends on it.
    """
    before, after = step.src.mesh, step.dst.mesh
    if set(before.ranks) != set(after.ranks):
        return tuple(sorted({*before.ranks, *after.ranks}))
    return after.submesh_ranks(step.axes, rank=rank)


def parts_of(whole: Layout, rank: int, pieces: Layout, ranks: Sequence[int]) -> list[Region]:
    """Give where, in what `rank` holds of `whole`, lies what others hold of `pieces`."""
    held = whole.intervals(rank)
    return [_common(held, pieces.intervals(other)) for other in ranks]


def _common(own: Region | None, other: Region | None) -> Region:
    """Give where, in what one rank holds, lies what another holds too."""
    assert own is not None and other is not None
    return tuple(map(positions, map(intersect, own, other), own))


def is_local(before: Layout, after: Layout) -> bool:
    """Tell whether every rank holds all that it needs after a step; nothing is pending."""
    ranks = after.mesh.ranks
    return set(ranks) <= set(before.mesh.ranks) and all(
        tuple(map(intersect, before.intervals(rank), after.intervals(rank)))
        == after.intervals(rank)
        for rank in ranks
    )


@dataclass(frozen=True, slots=True)
class Transfers:
    """One rank's rows of a direct exchange, by position in the group; the own part is in both.

    A tensor without dims counts as one of shape (1,), so that there is a part that is empty.

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
    takes = _holders(step, ranks)
    before, after = _held(step.src, rank), _held(step.dst, rank)
    nothing: Region = ((),) * max(len(step.src.shape), 1)
    send = [
        _common(before, _held(step.dst, other)) if takes(other, rank) else nothing
        for other in ranks
    ]
    receive = [
        _common(after, _held(step.src, other)) if takes(rank, other) else nothing for other in ranks
    ]
    return Transfers(tuple(send), tuple(receive))


def _held(layout: Layout, rank: int) -> Region | None:
    """Give what a rank holds; one index of one dim for a tensor without dims; None outside."""
    coordinate = layout.mesh.coordinate(rank)
    if coordinate is None:
        return None
    return layout.intervals_at(coordinate) or (whole(1),)


# Tells whether the first rank takes from the second what that one holds.
_Takes = Callable[[int, int], bool]


def _holders(step: Step, ranks: Sequence[int]) -> _Takes:
    """Say who takes from whom; see [Note: holders]."""
    mesh = step.src.mesh
    axes = range(mesh.ndim) if step.kind == "exchange" else step.axes
    cuts, free = _split(step.src, axes)
    num_replicas = math.prod(mesh.shape[axis] for axis in free)
    places = {
        rank: (_number(mesh, coordinate, cuts), _number(mesh, coordinate, free))
        for rank, coordinate in _coordinates(mesh, ranks)
    }
    turns = _turns(step, ranks, cuts)
    per_node = num_replicas // mesh.shape[0] if free[:1] == [0] else num_replicas

    def takes(taker: int, giver: int) -> bool:
        if giver not in places or taker not in turns:
            return False
        cut, replica = places[giver]
        if taker not in places:
            return replica == turns[taker] % num_replicas
        own_cut, own_replica = places[taker]
        if own_cut == cut:
            return own_replica == replica
        # The first axis is the outermost digit.
        return replica == own_replica // per_node * per_node + turns[taker] % per_node

    return takes


def _turns(step: Step, ranks: Sequence[int], cuts_before: Sequence[int]) -> dict[int, int]:
    """Number the ranks of the mesh after a step so that those who need one part differ.

    The number has a digit per dim, for the pieces of it that lie in one piece before, and one for
    the replicas.
    """
    mesh = step.dst.mesh
    axes = range(mesh.ndim) if step.kind == "exchange" else step.axes
    _, free = _split(step.dst, axes)
    digits: list[tuple[int, list[int]]] = []
    for before, after in zip(step.src.simple_chains, step.dst.simple_chains, strict=True):
        num_before = math.prod(cut.num_ranks for cut in before if cut.axis in cuts_before)
        own = [cut.axis for cut in after if cut.axis in axes]
        digits.append((max(math.prod(mesh.shape[axis] for axis in own) // num_before, 1), own))
    digits.append((math.prod(mesh.shape[axis] for axis in free), free))
    found: dict[int, int] = {}
    for rank, coordinate in _coordinates(mesh, ranks):
        turn = 0
        for radix, own in digits:
            turn = turn * radix + _number(mesh, coordinate, own) % radix
        found[rank] = turn
    return found


def _split(layout: Layout, axes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tell the axes that cut from those along which ranks hold replicas."""
    cutting = {cut.axis for chain in layout.simple_chains for cut in chain}
    return (
        [axis for axis in axes if axis in cutting],
        [axis for axis in axes if axis not in cutting],
    )


def _coordinates(mesh: AbstractMesh, ranks: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    for rank in ranks:
        coordinate = mesh.coordinate(rank)
        if coordinate is not None:
            yield rank, coordinate


def _number(mesh: AbstractMesh, coordinate: Sequence[int], axes: Sequence[int]) -> int:
    number = 0
    for axis in axes:
        number = number * mesh.shape[axis] + coordinate[axis]
    return number
