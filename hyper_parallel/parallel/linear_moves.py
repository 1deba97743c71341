# SPDX-License-Identifier: Apache-2.0
"""The moves around the matmul of a parallel Linear, worked out from its layouts and shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyper_parallel.core import Layout, Partial, Placement, Plan, Replicate, Shard, plan
from hyper_parallel.dtensor import DTensor
from hyper_parallel.errors import LayoutError
from hyper_parallel.parallel.checks import first_tensor, refuse_other_mesh, relocate
from hyper_parallel.parallel.fused import FusedSide
from hyper_parallel.parallel.sizes import global_shape, learn
from hyper_parallel.runtime import Communicator, DeviceMesh, execute

__all__ = ["LinearEdge", "Moves"]

Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Moves:
    """The four moves around one local matmul; None where nothing has to move."""

    enter: Move | None = None
    leave: Move | None = None
    enter_back: Move | None = None
    leave_back: Move | None = None
    reduce_back: Communicator | None = None  # in place of enter_back: an all-reduce to overlap
    y_layout: Layout | None = None  # set where the shapes were needed
    fused: FusedSide | None = None  # what a backend may do in place of enter, or of leave

    def __deepcopy__(self, memo: dict[int, Any]) -> Moves:
        """Give itself: a copied module works on the same groups."""
        return self


class LinearEdge:
    """Where the tensors around a Linear are, and what moves them; planned once for each shape."""

    def __init__(self, module: nn.Linear, mesh: DeviceMesh, style: Any):
        """Read a ColwiseParallel or RowwiseParallel `style`."""
        self.mesh, self.where = mesh, style.where()
        self.column: bool = style.is_column
        self.block: int = style.block
        self.x_place: Placement = style.input_layouts[0]
        self.y_place: Placement = style.output_layouts[0]
        self.use_local_output: bool = style.use_local_output
        self.even_shards: bool = style.even_shards
        self.sizes = (module.in_features, module.out_features)
        self._planned: dict[tuple[int, ...], Moves] = {}

    def simple(self) -> Moves | None:
        """Give the moves that no shape changes, or None where moves depend on shapes.

        These are column-wise from Replicate to a cut last dim, and row-wise the other way.
        """
        inner, outer = self.x_place, self.y_place
        if self.column:
            inner, outer = outer, inner
        if not (self.use_local_output and outer.is_replicate() and inner.is_shard(-1)):
            return None
        if self.mesh.size() == 1:
            return Moves()
        comm = self.mesh.communicator(0)
        if self.column:
            return Moves(reduce_back=comm)
        fused = self._fused_side(None, Layout(self.mesh, (Shard(0, self.block),), self.sizes[:1]))
        # Not the bound method: see [Note: watched calls].
        return Moves(leave=lambda y: comm.all_reduce(y), fused=fused)

    def moves(self, x: torch.Tensor) -> Moves:
        """Give the moves for this input's global shape; note that of a plain output."""
        try:
            first_tensor(self.where, (x,), {})
            shape = tuple(x.shape) if isinstance(x, DTensor) else self._shape_of_plain(x)
            found = self._planned.get(shape)
            if found is None:
                if len(self._planned) > 256:
                    self._planned.clear()
                found = self._planned[shape] = self._plan(shape)
        except LayoutError as error:
            relocate(error, self.where)
        if found.y_layout is not None and self.use_local_output:
            learn(self.mesh, found.y_layout)
        return found

    def arrive(self, x: DTensor) -> DTensor:
        """Bring a DTensor to the declared input layout, from wherever it says it is."""
        refuse_other_mesh(x, self.mesh, self.where)
        declared = x.layout.with_placements([self.x_place])
        return x if x.layout == declared else x.redistribute(self.mesh, [self.x_place])

    def _shape_of_plain(self, x: torch.Tensor) -> tuple[int, ...]:
        place, mesh, size = self.x_place, self.mesh, self.sizes[0]
        if isinstance(place, Shard) and x.dim() and place.dim in (-1, x.dim() - 1):
            shape = (*x.shape[:-1], size)
            wanted = Layout(mesh, (place,), shape).local_shape(mesh.get_rank())
            if tuple(x.shape) != wanted:
                raise LayoutError(
                    self.where,
                    f"the input must be this rank's shard of in_features={size}:"
                    f" size {wanted[-1]} on dim {x.dim() - 1}",
                    "Cut it as torch.chunk does, or declare input_layouts=Replicate()",
                    size=x.shape[-1],
                )
            return shape
        return global_shape(x, mesh, place, where=self.where, even_shards=self.even_shards)

    def _plan(self, shape: tuple[int, ...]) -> Moves:
        if shape[-1:] != self.sizes[:1]:
            raise LayoutError(
                self.where,
                f"the input's last dim must have the layer's in_features={self.sizes[0]}",
                "Pass the tensor that input_layouts describes",
                global_shape=shape,
                input_layouts=self.x_place,
            )
        mesh, column = self.mesh, self.column
        last = Shard(len(shape) - 1, self.block)
        x = Layout(mesh, (self.x_place,), shape)
        y = Layout(mesh, (self.y_place,), (*shape[:-1], self.sizes[1]))
        used = x.with_placements([Replicate() if column else last])
        made = y.with_placements([last if column else Partial()])
        grad_used = used.with_placements([Partial() if column else last])
        (outer,), inner = (x.placements, made) if column else (y.placements, used)
        fused = None
        if isinstance(outer, Shard) and outer.dim < len(shape) - 1:
            fused = self._fused_side(outer.dim, x if column else y, inner)
        elif outer.is_replicate() and not column:
            fused = self._fused_side(None, inner)
        return Moves(
            enter=_as_move(plan(x, used), mesh),
            leave=_as_move(plan(made, y), mesh),
            enter_back=_as_move(plan(grad_used, x.cotangent), mesh),
            leave_back=_as_move(plan(y.cotangent, made.cotangent), mesh),
            y_layout=y,
            fused=fused,
        )

    def _fused_side(self, dim: int | None, *cuts: Layout) -> FusedSide | None:
        """Give the collective beside the matmul: rows cut in `dim`, or a sum that is spread."""
        n = self.mesh.size()
        if n == 1:
            return None
        is_even = True
        for cut in cuts:
            (place,) = cut.placements
            is_even &= isinstance(place, Shard) and not cut.shape[place.dim] % (n * place.block)
        return FusedSide(self.mesh, self.where, dim, is_even)


def _as_move(steps: Plan, mesh: DeviceMesh) -> Move | None:
    return (lambda local: execute(steps, local, mesh)) if len(steps) else None
