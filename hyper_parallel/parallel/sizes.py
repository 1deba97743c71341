# SPDX-License-Identifier: Apache-2.0
"""What a plain local tensor, declared to be a shard, is a shard of.

[Note: sizes] A shard of a sequence does not tell the global length: 3 and 2 rows of 5 both look
like even shards. Within one forward pass of a parallelized module the ranks exchange the local
size once (one small integer each) and then know it. A tensor whose size was fixed upstream
(the output of a RowwiseParallel) costs no exchange; `even_shards=True` promises there is no need.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from hyper_parallel.core import Layout, Placement, Shard, chunk_sizes
from hyper_parallel.errors import LayoutError, describe
from hyper_parallel.runtime import DeviceMesh

__all__ = ["global_shape", "learn", "open_scope"]

_scopes = threading.local()


def _known() -> dict[DeviceMesh, tuple[int, ...]] | None:
    """Give what this forward pass knows, or None outside of one."""
    return getattr(_scopes, "known", None)


def open_scope(module: nn.Module) -> None:
    """Make each forward of `module` one scope of knowledge; the outermost scope counts."""
    if getattr(module, "_hyper_parallel_scope", False):
        return
    module._hyper_parallel_scope = True  # type: ignore[assignment]
    module.register_forward_pre_hook(_enter, prepend=True)
    module.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, args: Any) -> None:
    del module, args
    depth = getattr(_scopes, "depth", 0)
    if depth == 0:
        _scopes.known = {}
    _scopes.depth = depth + 1


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    del module, args, output
    _scopes.depth = max(getattr(_scopes, "depth", 1) - 1, 0)
    if _scopes.depth == 0:
        _scopes.known = None


def learn(mesh: DeviceMesh, size: int) -> None:
    """Note that this forward pass cuts a dim of global `size`."""
    known = _known()
    if known is not None:
        known.setdefault(mesh, chunk_sizes(size, mesh.size()))


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
        At most one exchange of one integer per forward pass; see [Note: sizes].

    Raises:
        LayoutError: the ranks' sizes are not the chunks of one global size.
    """
    shape = list(local.shape)
    if not isinstance(placement, Shard):
        return tuple(shape)
    dim = Layout(mesh, (placement,), [max(s, 1) * placement.block for s in shape]).placements[0].dim  # type: ignore[attr-defined]
    if even_shards or mesh.size() == 1:
        shape[dim] *= mesh.size()
    else:
        shape[dim] = sum(_sizes(local.shape[dim], mesh, dim, where))
    return tuple(shape)


def _sizes(size: int, mesh: DeviceMesh, dim: int, where: str) -> tuple[int, ...]:
    known = _known()
    mine = mesh.get_local_rank()
    found = None if known is None else known.get(mesh)
    if found is not None:
        if found[mine] == size:
            return found
        raise LayoutError(
            describe(
                where,
                f"a plain shard must have {found[mine]} entries on dim {dim}, as the others of this"
                f" forward pass (sizes by rank: {found})",
                "Pass a DTensor, which knows its global shape, or even_shards=True",
                size=size,
            )
        )
    sizes = tuple(n for (n,) in mesh.communicator(0).all_gather_ints([size]))
    if sizes != chunk_sizes(sum(sizes), len(sizes)):
        raise LayoutError(
            describe(
                where,
                f"the shards of dim {dim} must have torch.chunk's sizes"
                f" {chunk_sizes(sum(sizes), len(sizes))}",
                "Cut the input with torch.chunk, or pass a DTensor",
                sizes=sizes,
            )
        )
    if known is not None:
        known[mesh] = sizes
    return sizes
