# SPDX-License-Identifier: Apache-2.0
"""explain_redistribute: what a move between two layouts will do, as a table or as a picture."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.core import Estimate, Layout, LinkModel, plan
from hyper_parallel.errors import HyperParallelError, LayoutError

__all__ = ["Explanation", "explain_redistribute"]

_SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True)
class Explanation(Estimate):
    """What each step of a move does: `str` gives a table, `save` draws it; see `Estimate`."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw who holds what before and after each step.

        A colour is one part of the tensor as it lay before; hatched is what waits for a reduction.
        A tensor of more than two dims is shown along two of them, which the picture says.

        Args:
            path: the file, of suffix .svg, .png or .pdf; it is written at once or not at all.

        Raises:
            HyperParallelError: another suffix, or matplotlib is not installed.
        """
        where = "Explanation.save"
        file = Path(path)
        if file.suffix not in _SUFFIXES:
            text = f"path must end in one of {_SUFFIXES}"
            raise HyperParallelError(where, text, "Name such a file", path=str(path))
        try:
            from hyper_parallel.tools.picture import draw
        except ImportError as error:
            text = "matplotlib must be installed"
            do = f"Install it, as with pip install 'hyper-parallel[plot]' ({error})"
            raise HyperParallelError(where, text, do) from error
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            draw(self).savefig(unfinished, format=file.suffix[1:], dpi=120)
            os.replace(unfinished, file)
        finally:
            with contextlib.suppress(FileNotFoundError):
                unfinished.unlink()


def explain_redistribute(
    src: Layout, dst: Layout, *, itemsize: int = 4, model: LinkModel | None = None
) -> Explanation:
    """Explain the steps that turn `src` into `dst`, before anything is sent.

    Needs no framework. The layout of a DTensor is its `layout`.

    Args:
        src: the layout the ranks hold.
        dst: the layout they shall hold, as in `plan`.
        itemsize: bytes per element.
        model: what launches, hops and bytes cost; by default the one of `plan`.

    Returns:
        The steps, each with its group, bytes and seconds, and what any plan must move at least.

    Raises:
        LayoutError: `src` or `dst` is not a Layout, or the global shapes differ.

    Example:
        >>> from hyper_parallel import Layout, Replicate, Shard, explain_redistribute
        >>> from hyper_parallel.core import AbstractMesh
        >>> mesh = AbstractMesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> rows, whole = (Layout(mesh, (p,), (4096, 1024)) for p in (Shard(0), Replicate()))
        >>> explanation = explain_redistribute(rows, whole, itemsize=2)
        >>> print(explanation)
        from Layout([4096, 1024], S(0)@tp)
        to   Layout([4096, 1024], R@tp)
        2 bytes an element
        <BLANKLINE>
        step                       group         sent  received  estimate
        all_gather[tp: S(0) -> R]  tp: 4 ranks  6 MiB     6 MiB   43.5 us
        <BLANKLINE>
        least to receive: 6 MiB, which some rank lacks; this plan: 1.00 times that
        link model 'two-level': 10 us a launch; tp 1 us a hop, 200 GB/s
        Bytes are those of the busiest rank, seconds those of the model: nothing was measured.
        >>> explanation.received == explanation.needed == 6 * 2**20
        True
    """
    for name, value in (("src", src), ("dst", dst)):
        if not isinstance(value, Layout):
            text, got = f"{name} must be a Layout", type(value).__name__
            do = "Make one with Layout(mesh, placements, shape), or pass the layout of a DTensor"
            raise LayoutError("explain_redistribute", text, do, **{name: got})
    found = plan(src, dst, itemsize=itemsize, model=model)
    return Explanation.of(
        found.src, found.dst, found.steps, itemsize=found.itemsize, model=found.model
    )
