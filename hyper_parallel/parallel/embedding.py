# SPDX-License-Identifier: Apache-2.0
"""The local form of a parallel Embedding: ids in, local lookup, output move.

column-wise: the table is S(1), the lookup gives S(-1). Row-wise: the table is S(0) (the
vocabulary), ids of other ranks look up zeros, the lookup gives a pending sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.core import Layout, Partial, Placement, Replicate, Shard
from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.local_forms import masked_embedding
from hyper_parallel.errors import LayoutError, PlanError, describe
from hyper_parallel.parallel.checks import (
    first_tensor,
    is_watched,
    keep_out_of_compile,
    local_shard,
    refuse_missing,
    refuse_other_mesh,
    relocate,
)
from hyper_parallel.parallel.edge import hand_out
from hyper_parallel.parallel.sizes import global_shape
from hyper_parallel.runtime import DeviceMesh

__all__ = ["EmbeddingForward", "refuse_options"]


def refuse_options(module: nn.Embedding, kind: str, where: str) -> None:
    """Refuse the options whose meaning needs the whole table.

    Raises:
        PlanError: max_norm, sparse, or (row-wise) scale_grad_by_freq is set.
    """
    options = {
        "max_norm": module.max_norm is not None,
        "sparse": module.sparse,
        "scale_grad_by_freq": kind == "rowwise" and module.scale_grad_by_freq,
    }
    for name, is_set in options.items():
        if is_set:
            raise PlanError(
                describe(
                    where,
                    f"an Embedding must not use {name}",
                    "Leave the option out, or leave this module out of the plan",
                    **{name: getattr(module, name)},
                )
            )


class EmbeddingForward:
    """The forward of an nn.Embedding under ColwiseParallel or RowwiseParallel."""

    shards = True

    def __init__(self, module: nn.Embedding, mesh: DeviceMesh, where: str, **declared: Any):
        """Set up; `declared`: kind, input_layout, output_layout, use_local_output, even_shards."""
        self.module, self.mesh, self.where = module, mesh, where
        self.column: bool = declared["kind"] == "colwise"
        self.ids_place: Placement = declared["input_layout"]
        self.y_place: Placement = declared["output_layout"]
        self.use_local_output: bool = declared["use_local_output"]
        self.even_shards: bool = declared["even_shards"]
        cut = self.y_place
        self.block = cut.block if isinstance(cut, Shard) and cut.dim == -1 else 1

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Look up plain ids, or ids in a DTensor."""
        if is_watched():
            return keep_out_of_compile(self.__call__, self.where, (input,), {})
        try:
            return self._forward(input)
        except LayoutError as error:
            relocate(error, self.where)

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        ids = self._whole_ids(input)
        weight: Any = self.module._parameters.get("weight")
        if weight is None:
            refuse_missing("weight", self.where)
        local_shard(weight, self.where)
        local_weight = weight.to_local()
        y = self._look_up(ids, local_weight)
        shape = (*ids.shape, self.module.embedding_dim)
        made = Shard(len(shape) - 1, self.block) if self.column else Partial()
        laid = DTensor.from_local(y, self.mesh, [made], shape=shape)
        return hand_out(laid, self.mesh, self.y_place, self.use_local_output)

    def _whole_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Give the ids on every rank, as a plain tensor."""
        first_tensor(self.where, (ids,), {})
        if not isinstance(ids, DTensor):
            if self.ids_place.is_replicate():
                return ids
            shape = global_shape(
                ids, self.mesh, self.ids_place, where=self.where, even_shards=self.even_shards
            )
            ids = DTensor.from_local(ids, self.mesh, [self.ids_place], shape=shape)
        refuse_other_mesh(ids, self.mesh, self.where)
        return ids.redistribute(self.mesh, [Replicate()]).to_local()

    def _look_up(self, ids: torch.Tensor, local_weight: torch.Tensor) -> torch.Tensor:
        module = self.module
        if self.column:
            return F.embedding(
                ids,
                local_weight,
                module.padding_idx,
                scale_grad_by_freq=module.scale_grad_by_freq,
            )
        table = Layout(self.mesh, (Shard(0),), (module.num_embeddings,))
        start = table.slices(self.mesh.get_rank())[0].start
        return masked_embedding(ids, local_weight, start, module.num_embeddings, module.padding_idx)
