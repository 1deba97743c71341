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

    def describe(self, axis_names: Sequence[str]) -> str:
        """Write the model out for a mesh with these axes."""
        links = [self.link(axis, len(axis_names)) for axis in range(len(axis_names))]
        each = [
            f"{name} {link.latency * 1e6:g} us a hop, {link.bandwidth / 1e9:g} GB/s"
            for name, link in zip(axis_names, links, strict=True)
        ]
        return f"{self.name!r}: {self.launch * 1e6:g} us a launch; {'; '.join(each)}"

    def link(self, axis: int, ndim: int) -> Link:
        """Give the link along an axis of a mesh of `ndim` axes."""
        if self.links:
            return self.links[axis]
        return _SLOW if axis == 0 and ndim > 1 else _FAST

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


TWO_LEVEL = LinkModel(name="two-level")
"""The model of plans that are given none: slow links along the first of several axes."""


def elements_moved(kind: str, num_ranks: int, before: int, after: int) -> int:
    """Give the elements that a rank of an even collective receives.

    Args:
        kind: "all_reduce", "all_gather" or "reduce_scatter".
        num_ranks: the size of the group.
        before: the most elements that a rank holds before.
        after: the most elements that a rank holds after.

    Returns:
        The number of elements.
    """
    whole = after if kind == "all_gather" else before
    share = whole - whole // num_ranks
    return 2 * share if kind == "all_reduce" else share
