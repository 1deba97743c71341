# SPDX-License-Identifier: Apache-2.0
"""The moves around the matmul of a parallel Linear, worked out from its layouts and shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.core import Layout, Partial, Placement, Plan, Replicate, Shard, plan
from hyper_parallel.dtensor import DTensor
from hyper_parallel.errors import LayoutError, describe
from hyper_parallel.parallel.checks import first_tensor, refuse_other_mesh, relocate
from hyper_parallel.parallel.fused import FusedSide
from hyper_parallel.parallel.sizes import global_shape, learn
from hyper_parallel.runtime import Communicator, DeviceMesh, execute

__all__ = ["LinearMoves", "Moves"]

Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Moves:
    """The four moves around one local matmul; None where nothing has to move."""

    enter: Move | None = None
    leave: Move | None = None
    enter_back: Move | None = None
    leave_back: Move | None = None
    reduce_back: Communicator | None = None  # in place of enter_back: an all-reduce to overlap
    x_layout: Layout | None = None  # set where the shapes were needed
    y_layout: Layout | None = None
    fused: FusedSide | None = None  # what a backend may do in place of enter, or of leave

    def __deepcopy__(self, memo: dict[int, Any]) -> Moves:
        """Give itself: a copied module works on the same groups."""
        return self


class LinearMoves:
    """Where the tensors around a Linear are, and what moves them; planned once for each shape.

    `places` are those of a plain input and of the output, `sizes` in_features and out_features.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        where: str,
        *,
        column: bool,
        places: tuple[Placement, Placement],
        sizes: tuple[int, int],
        even_shards: bool,
    ) -> None:
        self._mesh, self._where, self._column = mesh, where, column
        self._x_place, self._y_place = places
        self._sizes, self._even_shards = sizes, even_shards
        cut = self._y_place if column else self._x_place  # the weight is cut alike
        self.block = cut.block if isinstance(cut, Shard) and cut.dim == -1 else 1
        self._planned: dict[tuple[int, ...], Moves] = {}

    def simple(self) -> Moves | None:
        """Give the moves that no shape changes, or None where moves depend on shapes.

        These are column-wise from Replicate to a cut last dim, and row-wise the other way.
        """
        column, mesh = self._column, self._mesh
        inner = self._y_place if column else self._x_place
        outer = self._x_place if column else self._y_place
        if not outer.is_replicate() or not inner.is_shard(-1):
            return None
        if mesh.size() == 1:
            return Moves()
        comm = mesh.communicator(0)
        if column:
            return Moves(reduce_back=comm)
        features = Layout(mesh, (Shard(0, self.block),), self._sizes[:1])
        fused = FusedSide(mesh, self._where, None, (features,))
        # Not the bound method: see [Note: watched calls].
        return Moves(leave=lambda y: comm.all_reduce(y), fused=fused)

    def of(self, x: torch.Tensor, *, learns: bool) -> Moves:
        """Give the moves for this input's global shape; `learns` the output's for a plain one."""
        try:
            found = self._of(x)
        except LayoutError as error:
            relocate(error, self._where)
        if found.y_layout is not None and learns:
            learn(self._mesh, found.y_layout)
        return found

    def arrive(self, x: DTensor) -> DTensor:
        """Bring a DTensor to the declared input layout, from wherever it says it is."""
        refuse_other_mesh(x, self._mesh, self._where)
        declared = x.layout.with_placements([self._x_place])
        return x if x.layout == declared else x.redistribute(self._mesh, [self._x_place])

    def _of(self, x: torch.Tensor) -> Moves:
        first_tensor(self._where, (x,), {})
        shape = tuple(x.shape) if isinstance(x, DTensor) else self._shape_of_plain(x)
        if shape[-1:] != self._sizes[:1]:
            raise LayoutError(
                describe(
                    self._where,
                    f"the input's last dim must have the layer's in_features={self._sizes[0]}",
                    "Pass the tensor that input_layouts describes",
                    global_shape=shape,
                    input_layouts=self._x_place,
                )
            )
        found = self._planned.get(shape)
        if found is None:
            found = self._plan(shape)
            if len(self._planned) > 256:
                self._planned.clear()
            self._planned[shape] = found
        return found

    def _shape_of_plain(self, x: torch.Tensor) -> tuple[int, ...]:
        place, mesh, size = self._x_place, self._mesh, self._sizes[0]
        if isinstance(place, Shard) and x.dim() and place.dim in (-1, x.dim() - 1):
            shape = (*x.shape[:-1], size)
            wanted = Layout(mesh, (place,), shape).local_shape(mesh.get_rank())
            if tuple(x.shape) != wanted:
                raise LayoutError(
                    describe(
                        self._where,
                        f"the input must be this rank's shard of in_features={size}:"
                        f" size {wanted[-1]} on dim {x.dim() - 1}",
                        "Cut it as torch.chunk does, or declare input_layouts=Replicate()",
                        size=x.shape[-1],
                    )
                )
            return shape
        return global_shape(x, mesh, place, where=self._where, even_shards=self._even_shards)

    def _plan(self, shape: tuple[int, ...]) -> Moves:
        mesh, column = self._mesh, self._column
        y_shape = (*shape[:-1], self._sizes[1])
        last = Shard(len(shape) - 1, self.block)
        x = Layout(mesh, (self._x_place,), shape)
        y = Layout(mesh, (self._y_place,), y_shape)
        used = x.with_placements([Replicate() if column else last])
        made = y.with_placements([last if column else Partial()])
        grad_used = used.with_placements([Partial() if column else last])
        outer, inner = (x, made) if column else (y, used)
        return Moves(
            enter=_as_move(plan(x, used), mesh),
            leave=_as_move(plan(made, y), mesh),
            enter_back=_as_move(plan(grad_used, x.cotangent), mesh),
            leave_back=_as_move(plan(y.cotangent, made.cotangent), mesh),
            x_layout=x,
            y_layout=y,
            fused=_fused_side(mesh, self._where, outer, inner, column=column),
        )


def _fused_side(
    mesh: DeviceMesh, where: str, outer: Layout, inner: Layout, *, column: bool
) -> FusedSide | None:
    """Give the collective beside the matmul, where its rows are cut or a sum of it is spread."""
    (place,) = outer.placements
    if mesh.size() == 1:
        return None
    if isinstance(place, Shard) and place.dim < outer.ndim - 1:
        return FusedSide(mesh, where, place.dim, (outer, inner))
    return FusedSide(mesh, where, None, (inner,)) if place.is_replicate() and not column else None


def _as_move(steps: Plan, mesh: DeviceMesh) -> Move | None:
    return (lambda local: execute(steps, local, mesh)) if len(steps) else None
