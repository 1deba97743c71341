# SPDX-License-Identifier: Apache-2.0
"""loss_parallel: cross entropy of logits whose classes are cut between ranks, never gathered."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.core import Layout, Placement, Replicate, Shard
from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.dispatch import served_by
from hyper_parallel.dtensor.local_op import redistributed
from hyper_parallel.dtensor.moves import FromLocal
from hyper_parallel.errors import LayoutError, describe
from hyper_parallel.parallel.vocab import (
    ClassIndices,
    ClassProbabilities,
    Goal,
    VocabShard,
    accumulate_in,
    log_softmax,
    loss_rows,
    picked_rows,
    sum_over,
)
from hyper_parallel.runtime import DeviceMesh

__all__ = [
    "Reading",
    "bring",
    "check_arguments",
    "finish",
    "loss_parallel",
    "read_logits",
    "reduced_loss",
    "whole_weight",
]

Tensor = torch.Tensor


@contextmanager
def loss_parallel() -> Generator[None]:
    """Within it, losses of DTensor logits that are cut along the classes do not gather them.

    Serves F.cross_entropy, F.nll_loss, log_softmax and softmax along the cut dim (and so
    nn.CrossEntropyLoss and the like) with all their arguments: class indices or probabilities,
    weight, ignore_index, label_smoothing, every reduction. Averages are those of the whole batch,
    however the batch is cut. Other calls, and logits cut otherwise, are served as always. Backward
    may run inside or after. It nests, and ends with the block even on an exception.

    Targets are DTensors, or plain tensors where no axis cuts the batch; the weight is a DTensor, or
    plain and the same on all ranks.

    Yields:
        Nothing. The losses made within are DTensors: Replicate, or placed as the rows with
        reduction="none".

    Communicates:
        Forward: an all-reduce of the rows' maxima and one of two or three sums a row, over the
        axes that cut the classes; where axes cut the batch, one of two numbers over those.
        Backward: nothing for the losses, an all-reduce of a sum a row for (log_)softmax.

    Raises:
        LayoutError: within it: a plain target where an axis cuts the batch, or arguments that
            do not fit.
        IndexError: within it: a target that is no class.

    Source:
        Megatron-LM (arXiv:1909.08053), section 3: the loss is fused with the last product.

    Example:
        >>> import torch
        >>> import torch.nn.functional as F
        >>> from hyper_parallel import Shard, distribute_tensor, init_device_mesh
        >>> from hyper_parallel import loss_parallel, simulate
        >>> @simulate(2)
        ... def loss():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     logits = distribute_tensor(torch.eye(4), mesh, [Shard(1)])
        ...     with loss_parallel():
        ...         return F.cross_entropy(logits, torch.arange(4)).to_local().item()
        >>> round(loss()[0], 4) == round(F.cross_entropy(torch.eye(4), torch.arange(4)).item(), 4)
        True
    """
    with served_by(_SERVED):
        yield


@dataclass(frozen=True, slots=True)
class Reading:
    """Logits as the loss reads them.

    Args:
        local: [N, v], this rank's part, the classes last.
        place: which classes these are.
        rows: where the rows' results lie.
        dim: the class dim of the whole logits.
    """

    local: Tensor
    place: VocabShard
    rows: Layout
    dim: int

    @property
    def batch_axes(self) -> tuple[int, ...]:
        """The axes that cut the rows."""
        mesh = self.rows.mesh
        return tuple(
            axis
            for axis, p in enumerate(self.rows.placements)
            if p.cut_dim is not None and mesh.shape[axis] > 1
        )


def read_logits(logits: Any, dim: int) -> Reading | None:
    """Read DTensor logits whose class dim is `dim`; None where no axis cuts it in plain ranges."""
    layout: Layout = logits._layout
    mesh = layout.mesh
    cut = tuple(
        axis
        for axis, p in enumerate(layout.placements)
        if p.cut_dim == dim and mesh.shape[axis] > 1
    )
    plain = all(isinstance(layout.placements[axis], Shard) for axis in cut)
    if not cut or not plain or not isinstance(mesh, DeviceMesh) or not mesh.get_coordinate():
        return None
    settled = replace(
        layout,
        placements=tuple(Replicate() if p.is_partial() else p for p in layout.placements),
    )
    if settled != layout:
        logits = redistributed(logits, settled)
    held = settled.intervals(mesh.get_rank())[dim]
    start, stop = held[0] if held else (0, 0)
    place = VocabShard(mesh, cut, start, stop - start, settled.shape[dim])
    return Reading(logits.to_local().movedim(dim, -1), place, _rows_of(settled, dim), dim)


def _rows_of(layout: Layout, dim: int) -> Layout:
    """Give the layout of what is left when the class dim is reduced."""

    def placed(p: Placement) -> Placement:
        cut: int | None = p.cut_dim
        if cut is None:
            return p
        return Replicate() if cut == dim else replace(p, dim=cut - (cut > dim))  # type: ignore[type-var]

    shape = layout.shape[:dim] + layout.shape[dim + 1 :]
    return replace(layout, placements=tuple(map(placed, layout.placements)), shape=shape)


def bring(tensor: Any, layout: Layout, name: str) -> Tensor:
    """Give this rank's part of an operand in the layout that the loss needs."""
    if tuple(tensor.shape) != layout.shape:
        raise LayoutError(
            describe(
                "loss_parallel",
                f"{name} must have the global shape {layout.shape}",
                "Pass class indices, one a row, or probabilities shaped as the logits",
                **{name: tuple(tensor.shape)},
            )
        )
    if not isinstance(tensor, DTensor):
        if any(p.cut_dim is not None for p in layout.placements) and name == "target indices":
            raise LayoutError(
                describe(
                    "loss_parallel",
                    "a target must be a DTensor where an axis cuts the batch",
                    "Say where it lies with DTensor.from_local or distribute_tensor",
                    placements=layout.placements,
                )
            )
        tensor = FromLocal.apply(DTensor, tensor, layout.replicated, None)
    if tensor._layout != layout:  # type: ignore[union-attr]
        tensor = redistributed(tensor, layout)
    return tensor.to_local()  # type: ignore[union-attr]


def whole_weight(weight: Any) -> Tensor | None:
    """Give the class weights as a plain whole tensor."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def check_arguments(reduction: str, smoothing: float, weight: Tensor | None, vocab: int) -> None:
    """Refuse what F.cross_entropy would refuse, too."""
    if reduction not in ("none", "mean", "sum"):
        wrong: dict[str, Any] = {"reduction": reduction}
        must = "reduction must be 'none', 'mean' or 'sum'"
    elif not 0 <= smoothing <= 1:
        wrong = {"label_smoothing": smoothing}
        must = "label_smoothing must be between 0 and 1"
    elif weight is not None and tuple(weight.shape) != (vocab,):
        wrong = {"weight": tuple(weight.shape)}
        must = f"weight must have {vocab} entries"
    else:
        return
    raise LayoutError(describe("loss_parallel", must, "Pass what F.cross_entropy takes", **wrong))


def _cross_entropy(  # noqa: PLR0913  # torch's signature
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Serve F.cross_entropy."""
    reading = read_logits(input, min(input.ndim - 1, 1)) if isinstance(input, DTensor) else None
    if reading is None or size_average is not None or reduce is not None:
        return NotImplemented
    if target.is_floating_point():
        target = bring(target, input._layout.cotangent, "target").movedim(reading.dim, -1)
    else:
        target = bring(target, reading.rows, "target indices")
    return reduced_loss(
        reading,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def reduced_loss(  # those of F.cross_entropy
    reading: Reading,
    target: Tensor,
    weight: Any,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Any:
    """Give the cross entropy, a DTensor, of this rank's part of logits and targets."""
    weight, place = whole_weight(weight), reading.place
    check_arguments(reduction, label_smoothing, weight, place.vocab)
    dtype = accumulate_in(reading.local.dtype)
    goal: Goal
    if target.is_floating_point():
        own = None if weight is None else place.own(weight.to(dtype))
        goal = ClassProbabilities(target.to(dtype), own, label_smoothing, place.vocab)
    else:
        goal = ClassIndices.of(
            target,
            place,
            dtype,
            weight=weight,
            ignore_index=ignore_index,
            smoothing=label_smoothing,
        )
    return finish(loss_rows(reading.local, goal, place), goal, reading, reduction)


def _nll_loss(  # noqa: PLR0913  # torch's signature
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Serve F.nll_loss."""
    reading = read_logits(input, min(input.ndim - 1, 1)) if isinstance(input, DTensor) else None
    if reading is None or size_average is not None or reduce is not None:
        return NotImplemented
    weight, place = whole_weight(weight), reading.place
    check_arguments(reduction, 0.0, weight, place.vocab)
    goal = ClassIndices.of(
        bring(target, reading.rows, "target indices"),
        place,
        accumulate_in(reading.local.dtype),
        weight=weight,
        ignore_index=ignore_index,
        smoothing=0.0,
    )
    return finish(picked_rows(reading.local, goal, place), goal, reading, reduction)


def finish(rows: Tensor, goal: Goal, reading: Reading, reduction: str) -> Any:
    """Reduce the rows' losses over the whole batch, and wrap the result."""
    layout, local = reading.rows, reading.local
    mesh = reading.place.mesh
    if reduction == "none":
        return FromLocal.apply(DTensor, rows.to(_loss_dtype(local)), layout, None)
    if isinstance(goal, ClassIndices) and reduction == "mean":
        total, count = sum_over(
            torch.stack([rows.sum(), goal.weights.sum()]), mesh, reading.batch_axes
        ).unbind()
        result = total / count
    else:
        result = sum_over(rows.sum(), mesh, reading.batch_axes)
        if reduction == "mean":
            result = result / torch.Size(layout.shape).numel()
    scalar = Layout(mesh, (Replicate(),) * mesh.ndim, ())
    return FromLocal.apply(DTensor, result.to(_loss_dtype(local)), scalar, None)


def _loss_dtype(logits: Tensor) -> torch.dtype:
    """Give the logits' dtype; under autocast losses are float32."""
    if torch.is_autocast_enabled(logits.device.type):
        return accumulate_in(logits.dtype)
    return logits.dtype


def _log_softmax(
    input: Any, dim: int | None = None, *args: Any, dtype: Any = None, _stacklevel: int = 0
) -> Any:
    """Serve log_softmax as F, torch and Tensor have it; `args` may be a stack level or a dtype."""
    dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
    if not isinstance(input, DTensor) or not isinstance(dim, int) or not input.ndim:
        return NotImplemented
    dim %= input.ndim
    reading = read_logits(input if dtype is None else input.to(dtype), dim)
    if reading is None:
        return NotImplemented
    result = log_softmax(reading.local, reading.place).movedim(-1, dim)
    return FromLocal.apply(DTensor, result, input._layout.cotangent, None)


def _softmax(input: Any, *args: Any, **kwargs: Any) -> Any:
    """Serve softmax likewise."""
    result = _log_softmax(input, *args, **kwargs)
    return result if result is NotImplemented else result.exp()


_SERVED: dict[str, Callable[..., Any]] = {
    F.cross_entropy.__name__: _cross_entropy,
    F.nll_loss.__name__: _nll_loss,
    F.log_softmax.__name__: _log_softmax,
    F.softmax.__name__: _softmax,
}
