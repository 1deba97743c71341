# SPDX-License-Identifier: Apache-2.0
"""What torch's own planner would do between two of our layouts, as steps with their bytes.

Its steps come from its private planner: the greedy one for default orders, its graph search for
others. They are priced once as they are, and once fused where torch could fuse them, on a mesh
that has a flattened group for every set of axes.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as planner
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

from hyper_parallel import core
from hyper_parallel.core.cost import elements_moved

__all__ = ["TorchPlanner"]

Fact = tuple[tuple[int, ...], int]


class TorchPlanner:
    """Torch's planner on one mesh of a fake process group.

    Args:
        mesh_shape: number of ranks along each axis.
        itemsize: bytes per element.
    """

    def __init__(self, mesh_shape: tuple[int, ...], itemsize: int) -> None:
        names = tuple("xyz"[: len(mesh_shape)])
        self._meshes = [init_device_mesh("cpu", mesh_shape, mesh_dim_names=names) for _ in range(2)]
        self._itemsize = itemsize
        for n in range(2, len(names) + 1):
            for group in itertools.combinations(names, n):
                self._meshes[1][group]._flatten("_".join(group))

    def plans(self, src: core.Layout, dst: core.Layout) -> list[list[Fact]]:
        """Give the communicating steps' axes and bytes, as they are and fused.

        Raises:
            RuntimeError: torch has no way.
        """
        ends = [self._spec(at) for at in (src, dst)]
        infos = planner._gen_transform_infos_non_cached(*ends)
        return [
            self._facts(
                src,
                dst,
                planner._optimize_transform_infos(infos, mesh, *(end.placements for end in ends)),
            )
            for mesh in self._meshes
        ]

    def _spec(self, layout: core.Layout) -> DTensorSpec:
        meta = TensorMeta(torch.Size(layout.shape), tuple(range(layout.ndim)), torch.float32)
        order = tuple(
            ShardOrderEntry(tensor_dim=dim, mesh_dims=tuple(cut.axis for cut in chain))
            for dim, chain in enumerate(layout.chains)
            if chain
        )
        placements = tuple(map(_to_torch, layout.placements))
        return DTensorSpec(self._meshes[0], placements, meta, shard_order=order)

    def _facts(self, src: core.Layout, dst: core.Layout, infos: Sequence) -> list[Fact]:
        here, facts = src, []
        order = list(src.order or range(src.mesh.ndim))
        for info in infos:
            axes = tuple(getattr(info, "original_mesh_dims", (info.mesh_dim,)))
            old, new = map(_from_torch, info.src_dst_placements)
            if old.cut_dim is not None and new.is_partial():
                raise RuntimeError("torch plans this step, but refuses to run it")
            for axis in axes:  # a cut that is added is the innermost of its dim
                order.remove(axis)
                order.append(axis)
            there = core.Layout(
                src.mesh,
                tuple(new if axis in axes else p for axis, p in enumerate(here.placements)),
                src.shape,
                tuple(order),
            )
            kind = info._comm_type_key()
            if kind is not None:
                facts.append((axes, self._size(kind, axes, here, there)))
            here = there
        assert here == dst, (src, dst, here)
        return facts

    def _size(self, kind: str, axes: Sequence[int], before: core.Layout, after: core.Layout) -> int:
        """Give the bytes of a step on its busiest rank: every piece is padded to the largest."""
        num_ranks = math.prod(before.mesh.shape[axis] for axis in axes)
        sizes = [math.prod(at.largest_shape) for at in (before, after)]
        if kind == "all_to_all":  # padded on both dims
            dims = [at.placements[axes[0]].cut_dim for at in (before, after)]
            piece = list(before.largest_shape)
            piece[dims[1]] = after.largest_shape[dims[1]]
            return self._itemsize * (num_ranks - 1) * math.prod(piece)
        if kind == "all_reduce":
            return self._itemsize * elements_moved(kind, num_ranks, sizes[0], (0, 0))
        return self._itemsize * (num_ranks - 1) * min(sizes)


def _to_torch(placement: core.Placement):
    if isinstance(placement, core.Shard):
        return Shard(placement.dim)
    return Partial() if placement.is_partial() else Replicate()


def _from_torch(placement) -> core.Placement:
    if placement.is_shard():
        return core.Shard(placement.dim)
    return core.Partial() if placement.is_partial() else core.Replicate()
