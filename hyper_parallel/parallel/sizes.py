# SPDX-License-Identifier: Apache-2.0
"""What a plain local tensor, declared to be a shard, is a shard of.

[Note: sizes] A shard of a sequence does not tell the global length: 3 and 2 rows of 5 both look
like even shards. Within one forward pass of a parallelized module the ranks exchange the local
size once (one small integer each) and then know it. A tensor whose size was fixed upstream
(the output of a RowwiseParallel) costs no exchange; `even_shards=True` promises there is no need.

Whether to exchange must be decided alike on every rank, so never by the local size. It is decided
by what all ranks know: the mesh, the number of dims and which dim is cut. Where two lengths were
learned for the same dim (an encoder and a decoder), and for the last dim (features of any size),
every plain shard is exchanged anew. What this cannot see: two plain inputs whose lengths nobody
learned, and of which only some ranks hold pieces of different sizes. The rank that sees it refuses;
the others find out when they miss it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from hyper_parallel.core import Layout, Placement, Shard, chunk_sizes
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh

__all__ = ["ScopedForward", "global_shape", "learn", "open_scope"]

_Key = tuple[DeviceMesh, int, Shard]


class _Scope(threading.local):
    """How many scoped forward passes this thread is in, and what the outermost one knows.

    `known` gives the sizes by rank; None where they differ from tensor to tensor.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.known: dict[_Key, tuple[int, ...] | None] = {}


_scope = _Scope()


class ScopedForward:
    """A module's forward as one scope of knowledge. Deep-copies with its module."""

    def __init__(self, original: Any) -> None:
        self.original = original

    @property
    def shards(self) -> bool:
        """Tell whether the forward inside is that of a style that replaced parameters."""
        return getattr(self.original, "shards", False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; what it learned of sizes is forgotten however it ends."""
        if _scope.depth == 0:
            _scope.known = {}
        _scope.depth += 1
        try:
            return self.original(*args, **kwargs)
        finally:
            _scope.depth -= 1


def open_scope(module: nn.Module) -> None:
    """Make each forward of `module` one scope of knowledge; the outermost scope counts."""
    if not isinstance(module.__dict__.get("forward"), ScopedForward):
        module.forward = ScopedForward(module.forward)


def learn(mesh: DeviceMesh, layout: Layout) -> None:
    """Note that this forward pass hands out plain shards of a tensor of this layout."""
    placement = layout.placements[0]
    ndim = len(layout.shape)
    if not _scope.depth or not isinstance(placement, Shard) or placement.dim == ndim - 1:
        return
    sizes = chunk_sizes(layout.shape[placement.dim], mesh.size(), placement.block)
    before = _scope.known.setdefault((mesh, ndim, placement), sizes)
    if before != sizes:
        _scope.known[mesh, ndim, placement] = None


def global_shape(
    local: torch.Tensor, mesh: DeviceMesh, placement: Placement, *, where: str, even_shards: bool
) -> tuple[int, ...]:
    """Give the global shape of a plain local tensor under a declared placement.

    Args:
        local: this rank's part.
        mesh: a mesh of one axis.
        placement: the declared placement.
        where: the style and module, for errors.
        even_shards: the user promises equal shards; nothing is exchanged.

    Returns:
        The global shape.

    Communicates:
        One exchange of one integer, for the first plain shard of its kind in a forward pass; see
        [Note: sizes].

    Raises:
        LayoutError: the ranks' sizes are not the chunks of one global size.
    """
    shape = list(local.shape)
    if not isinstance(placement, Shard):
        return tuple(shape)
    legal = Layout(mesh, (placement,), tuple(max(s, 1) * placement.block for s in shape))
    cut = legal.placements[0]
    assert isinstance(cut, Shard)  # noqa: S101  # ours: normalized from one
    if even_shards or mesh.size() == 1:
        shape[cut.dim] *= mesh.size()
    else:
        shape[cut.dim] = sum(_sizes(shape, mesh, cut, where))
    return tuple(shape)


def _sizes(shape: list[int], mesh: DeviceMesh, cut: Shard, where: str) -> tuple[int, ...]:
    key = (mesh, len(shape), cut)
    size = shape[cut.dim]
    found = _scope.known.get(key) if _scope.depth else None
    if found is None:
        found = _exchange(size, mesh, cut, where)
        if _scope.depth and cut.dim != len(shape) - 1:
            _scope.known.setdefault(key, found)
    mine = mesh.get_local_rank()
    if found[mine] != size:
        raise LayoutError(
            where,
            f"a plain shard must have {found[mine]} entries on dim {cut.dim}, as the others of"
            f" this forward pass (sizes by rank: {found})",
            "Pass a DTensor, which knows its global shape, or even_shards=True",
            size=size,
        )
    return found


def _exchange(size: int, mesh: DeviceMesh, cut: Shard, where: str) -> tuple[int, ...]:
    """Give all ranks' sizes, checked to be the chunks of their sum."""
    sizes = tuple(n for (n,) in mesh.communicator(0).all_gather_ints([size]))
    total = sum(sizes)
    if total % cut.block or sizes != chunk_sizes(total, len(sizes), cut.block):
        rule = f"in blocks of {cut.block}" if cut.block > 1 else chunk_sizes(total, len(sizes))
        raise LayoutError(
            where,
            f"the shards of dim {cut.dim} must have torch.chunk's sizes {rule}",
            "Cut the input with torch.chunk, or pass a DTensor",
            sizes=sizes,
        )
    return sizes
