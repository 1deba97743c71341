# SPDX-License-Identifier: Apache-2.0
"""The cost model: what a collective over some mesh axes takes, from launches, hops and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["TWO_LEVEL", "Link", "LinkModel", "elements_moved"]


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the ranks along one mesh axis.

    Args:
        latency: seconds per hop from one rank to the next.
        bandwidth: bytes per second that one rank receives.
    """

    latency: float
    bandwidth: float


_FAST = Link(latency=1e-6, bandwidth=200e9)
_SLOW = Link(latency=5e-6, bandwidth=25e9)


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Seconds of a collective: one launch, its hops, and the bytes of its busiest rank.

    Along an axis of n ranks there are ceil(log2(n)) hops. A step over several axes hops along each,
    and pays the slowest link for all its bytes. All kinds hop alike, so that of two plans the one
    with no more launches and bytes on any axis never takes longer.

    Args:
        launch: seconds to start one collective.
        links: one link per mesh axis; by default the first of several axes is a slow one, as
            between nodes, and the others are fast.
        name: what to call it where its figures are shown.

    Example:
        >>> model = LinkModel(launch=1e-5, links=(Link(1e-6, 1e9),))
        >>> round(model.seconds((4,), (0,), size=3000) * 1e6)
        15
    """

    launch: float = 10e-6
    links: tuple[Link, ...] = ()
    name: str = "unnamed"

    def describe(self, axis_names: Sequence[str], *, crosses: bool = False) -> str:
        """Write the model out for a mesh with these axes, and for what crosses to another one."""
        links = [(name, self.link(i, len(axis_names))) for i, name in enumerate(axis_names)]
        if crosses:
            links.append(("between meshes", self.between))
        each = [
            f"{name} {link.latency * 1e6:g} us a hop, {link.bandwidth / 1e9:g} GB/s"
            for name, link in links
        ]
        return f"{self.name!r}: {self.launch * 1e6:g} us a launch; {'; '.join(each)}"

    def link(self, axis: int, ndim: int) -> Link:
        """Give the link along an axis of a mesh of `ndim` axes."""
        if self.links:
            return self.links[axis]
        return _SLOW if axis == 0 and ndim > 1 else _FAST

    @property
    def between(self) -> Link:
        """The link between ranks of two meshes: as slow as the slowest axis."""
        links = self.links or (_SLOW,)
        return Link(max(link.latency for link in links), min(link.bandwidth for link in links))

    def terms(self, mesh_shape: Sequence[int], axes: Iterable[int]) -> tuple[float, float]:
        """Give the seconds of a collective without data, and the seconds per byte."""
        fixed, slowest = self.launch, math.inf
        for axis in axes:
            link, hops = self.link(axis, len(mesh_shape)), (mesh_shape[axis] - 1).bit_length()
            fixed += hops * link.latency
            slowest = min(slowest, link.bandwidth)
        return fixed, 1 / slowest

    def seconds(self, mesh_shape: Sequence[int], axes: Iterable[int], *, size: int) -> float:
        """Estimate a collective.

        Args:
            mesh_shape: number of ranks along each mesh axis.
            axes: the axes whose ranks take part.
            size: bytes that the busiest rank receives (or sends, if that is more).

        Returns:
            Seconds.
        """
        fixed, per_byte = self.terms(mesh_shape, axes)
        return fixed + size * per_byte

    def seconds_between(self, num_ranks: int, *, size: int) -> float:
        """Estimate an exchange between two meshes.

        Args:
            num_ranks: the ranks of both meshes.
            size: bytes of the busiest rank.

        Returns:
            Seconds.
        """
        link = self.between
        return self.launch + (num_ranks - 1).bit_length() * link.latency + size / link.bandwidth


TWO_LEVEL = LinkModel(name="two-level")
"""The model of plans that are given none: slow links along the first of several axes."""


def elements_moved(kind: str, num_ranks: int, whole: int, pieces: tuple[int, int]) -> int:
    """Give the elements that the busiest rank of a collective receives.

    Args:
        kind: "all_reduce", "all_gather" or "reduce_scatter".
        num_ranks: the size of the group.
        whole: the most elements that a rank holds where it holds more: before, or after a gather.
        pieces: the least and the most that a rank holds where it holds less; an all_reduce does
            not ask.

    Returns:
        The number of elements: all but the own piece, and of each other rank at most the largest.
    """
    if kind == "all_reduce":
        return 2 * (whole - whole // num_ranks)
    return min(whole - pieces[0], (num_ranks - 1) * pieces[1])
