# SPDX-License-Identifier: Apache-2.0
"""What must hold for a parameter of ours before FSDP2 takes it, checked for all ranks."""

from __future__ import annotations

from hyper_parallel.core import Layout
from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.interop import to_torch
from hyper_parallel.errors import LayoutError, describe

__all__ = ["check_layout", "check_sizes"]


def check_layout(path: str, param: DTensor) -> None:
    """Refuse a parameter whose layout torch has no words for.

    Raises:
        LayoutError: as said.
    """
    if param.layout.has_partial:
        raise LayoutError(
            describe(
                "fully_shard",
                f"parameter {path!r} must not be a pending reduction",
                "Redistribute it to Replicate or Shard first",
                placements=param.placements,
            )
        )
    try:
        to_torch(param)
    except LayoutError as error:
        raise LayoutError(f"fully_shard: parameter {path!r}: {error}") from error


def check_sizes(path: str, layout: Layout, dim: int, num_shards: int) -> None:
    """Refuse local parts that FSDP2 cannot cut in `dim`, on any rank.

    It pads only dim 0, and loses the sizes of a part that is empty in another dim than `dim`.

    Args:
        path: the parameter's name, for errors.
        layout: its layout before FSDP2 cuts it.
        dim: the dim FSDP2 shall cut.
        num_shards: in how many parts.

    Raises:
        LayoutError: as said.
    """
    dim = dim % max(layout.ndim, 1)
    parts = {rank: layout.local_shape(rank) for rank in layout.mesh.ranks}
    uneven = dim > 0 and any(shape[dim] % num_shards for shape in parts.values())
    lost = any(shape[dim] and 0 in shape for shape in parts.values() if shape)
    if uneven:
        must = f"every local part of parameter {path!r} must divide by {num_shards} in dim {dim}"
        do = "Let FSDP2 cut dim 0, which may be uneven, or choose a size that divides"
    elif lost:
        must = f"no local part of parameter {path!r} may be empty in another dim than {dim}"
        do = "Use fewer tensor-parallel ranks, or leave the module out of the plan"
    else:
        return
    shapes = sorted(set(parts.values()), reverse=True)
    raise LayoutError(describe("fully_shard", must, do, layout=layout, local_shapes=shapes))
