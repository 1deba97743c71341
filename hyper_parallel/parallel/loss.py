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
from hyper_parallel.dtensor.edges import declared
from hyper_parallel.dtensor.implicit import counts_as_replicated
from hyper_parallel.dtensor.local_op import redistributed
from hyper_parallel.dtensor.read import refuse_other_tensors
from hyper_parallel.errors import LayoutError, describe
from hyper_parallel.parallel.targets import (
    ClassIndices,
    ClassProbabilities,
    Goal,
    VocabShard,
    accumulate_in,
)
from hyper_parallel.parallel.vocab import log_softmax, loss_rows, picked_rows, sum_over

__all__ = [
    "Options",
    "Reading",
    "as_dtensor",
    "entropy",
    "finish",
    "is_probability",
    "loss_parallel",
    "read_classes",
]

Tensor = torch.Tensor


@contextmanager
def loss_parallel() -> Generator[None]:
    """Within it, losses of DTensor logits do not gather them.

    Serves F.cross_entropy and F.nll_loss, and log_softmax and softmax along a cut dim (and so
    nn.CrossEntropyLoss and the like) with all their arguments: class indices or probabilities,
    weight, ignore_index, label_smoothing, every reduction. Averages are those of the whole batch,
    however the batch is cut. Other calls are served as always. Backward may run inside or after; a
    function that torch.utils.checkpoint calls again must enter the context itself. It nests, and
    ends with the block even on an exception.

    Targets are DTensors, or plain tensors where no axis cuts the batch (or inside
    implicit_replication); the weight is a DTensor, or plain and the same on all ranks.

    Yields:
        Nothing. The losses made within are DTensors: Replicate, or placed as the rows with
        reduction="none".

    Communicates:
        Forward: an all-reduce of the rows' maxima and one of two or three sums a row, over the
        axes that cut the classes; where axes cut the batch, one of two numbers over those.
        Backward: nothing for the losses, an all-reduce of a sum a row for (log_)softmax.

    Raises:
        LayoutError: within it: a plain target where an axis cuts the batch, a weight that needs
            a gradient, or arguments that do not fit.
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
        where: what was called, for errors.
    """

    local: Tensor
    place: VocabShard
    rows: Layout
    where: str = "loss_parallel"

    @property
    def batch_axes(self) -> tuple[int, ...]:
        """The axes that cut the rows."""
        return _cutting(self.rows, None)


def _cutting(layout: Layout, dim: int | None) -> tuple[int, ...]:
    """List the axes of more than one rank that cut a dim; None: any dim."""
    pairs = enumerate(zip(layout.placements, layout.mesh.shape, strict=True))
    return tuple(
        axis
        for axis, (p, size) in pairs
        if size > 1 and p.cut_dim is not None and dim in (None, p.cut_dim)
    )


def _read_logits(logits: Any, dim: int) -> Reading | None:
    """Read DTensor logits whose class dim is `dim`; None where it is not cut in plain ranges."""
    layout, mesh = logits.layout, logits.device_mesh
    cut = _cutting(layout, dim)
    plain = all(isinstance(layout.placements[axis], Shard) for axis in cut)
    if not plain or mesh.get_coordinate() is None:
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
    return Reading(logits.to_local().movedim(dim, -1), place, _rows_of(settled, dim))


def _rows_of(layout: Layout, dim: int) -> Layout:
    """Give the layout of what is left when the class dim is reduced."""

    def placed(p: Placement) -> Placement:
        cut: int | None = p.cut_dim
        if cut is None:
            return p
        return Replicate() if cut == dim else replace(p, dim=cut - (cut > dim))  # type: ignore[type-var]

    shape = layout.shape[:dim] + layout.shape[dim + 1 :]
    return replace(layout, placements=tuple(map(placed, layout.placements)), shape=shape)


def _bring(target: Any, layout: Layout, where: str) -> Tensor:
    """Give this rank's part of a target in the layout that the loss needs."""
    if tuple(target.shape) != layout.shape:
        raise LayoutError(
            describe(
                where,
                f"target must have the global shape {layout.shape}",
                "Pass class indices, one a row, or probabilities shaped as the logits",
                target=tuple(target.shape),
            )
        )
    if not isinstance(target, DTensor):
        is_whole = target.is_floating_point() or counts_as_replicated(DTensor, target)
        if _cutting(layout, None) and not is_whole:
            raise LayoutError(
                describe(
                    where,
                    "a target must be a DTensor where an axis cuts the batch",
                    "Say where it lies with DTensor.from_local or distribute_tensor",
                    placements=layout.placements,
                )
            )
        target = declared(DTensor, target, layout.replicated)
    if target._layout != layout:  # type: ignore[union-attr]
        target = redistributed(target, layout)
    return target.to_local()  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class Options:
    """What a loss is told besides logits and target, as F.cross_entropy has it."""

    weight: Any
    ignore_index: int
    reduction: str
    label_smoothing: float = 0.0

    def checked_weight(self, reading: Reading) -> Tensor | None:
        """Refuse what F.cross_entropy would refuse; give the class weights, whole."""
        weight, vocab = self.weight, reading.place.vocab
        fix = "Pass what F.cross_entropy takes"
        if weight is not None:
            refuse_other_tensors(weight, reading.where)
        if not reading.local.is_floating_point():
            wrong: dict[str, Any] = {"dtype": reading.local.dtype}
            must = "logits must be floating"
        elif self.reduction not in ("none", "mean", "sum"):
            wrong = {"reduction": self.reduction}
            must = "reduction must be 'none', 'mean' or 'sum'"
        elif not 0 <= self.label_smoothing <= 1:
            wrong = {"label_smoothing": self.label_smoothing}
            must = "label_smoothing must be between 0 and 1"
        elif weight is not None and tuple(weight.shape) != (vocab,):
            wrong = {"weight": tuple(weight.shape)}
            must = f"weight must have {vocab} entries"
        elif weight is not None and weight.requires_grad and torch.is_grad_enabled():
            wrong = {"requires_grad": True}
            must, fix = "weight must not need a gradient", "Pass weight.detach()"
        else:
            return weight.full_tensor() if isinstance(weight, DTensor) else weight
        raise LayoutError(describe(reading.where, must, fix, **wrong))


def read_classes(reading: Reading, target: Any, options: Options) -> ClassIndices:
    """Read a target of class indices, a DTensor or plain."""
    refuse_other_tensors(target, reading.where)
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise LayoutError(
            describe(
                reading.where,
                "target must be integer classes",
                "Cast it with long(); cross_entropy takes probabilities, too",
                dtype=target.dtype,
            )
        )
    weight = options.checked_weight(reading)
    return ClassIndices.of(
        _bring(target, reading.rows, reading.where),
        reading.place,
        accumulate_in(reading.local.dtype),
        weight=weight,
        ignore_index=options.ignore_index,
        smoothing=options.label_smoothing,
    )


def entropy(reading: Reading, target: Any, options: Options) -> Tensor:
    """Give the local result; a target of probabilities is this rank's part, [N, v]."""
    goal: Goal
    if is_probability(target):
        dtype, place = accumulate_in(reading.local.dtype), reading.place
        weight = options.checked_weight(reading)
        own = None if weight is None else place.own(weight.to(dtype))
        goal = ClassProbabilities(place, target.to(dtype), own, options.label_smoothing)
    else:
        goal = read_classes(reading, target, options)
    return finish(loss_rows(reading.local, goal), goal, reading, options.reduction)


def is_probability(target: Any) -> bool:
    """Tell targets that are probabilities from those that are classes."""
    return isinstance(target, Tensor) and target.is_floating_point()


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
    reading = _served_logits(input, size_average, reduce)
    if reading is None:
        return NotImplemented
    if is_probability(target):
        refuse_other_tensors(target, reading.where)
        part = _bring(target, input.layout.cotangent, reading.where)
        target = part.movedim(min(input.ndim - 1, 1), -1)
    options = Options(weight, ignore_index, reduction, label_smoothing)
    return as_dtensor(entropy(reading, target, options), reading, reduction)


def _served_logits(input: Any, size_average: Any, reduce: Any) -> Reading | None:
    """Read the logits of a call that is served here."""
    if not isinstance(input, DTensor) or not input.ndim:
        return None
    if size_average is not None or reduce is not None:
        return None
    return _read_logits(input, min(input.ndim - 1, 1))


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
    reading = _served_logits(input, size_average, reduce)
    if reading is None:
        return NotImplemented
    goal = read_classes(reading, target, Options(weight, ignore_index, reduction))
    loss = finish(picked_rows(reading.local, goal), goal, reading, reduction)
    return as_dtensor(loss, reading, reduction)


def finish(rows: Tensor, goal: Goal, reading: Reading, reduction: str) -> Tensor:
    """Reduce the rows' losses over the whole batch; give the local result."""
    if reduction == "none":
        result = rows
    elif isinstance(goal, ClassIndices) and reduction == "mean":
        total, count = _over_batch(torch.stack([rows.sum(), goal.weights.sum()]), reading).unbind()
        result = total / count
    else:
        result = _over_batch(rows.sum(), reading)
        if reduction == "mean":
            result = result / torch.Size(reading.rows.shape).numel()
    return result.to(_loss_dtype(reading.local))


def _over_batch(x: Tensor, reading: Reading) -> Tensor:
    return sum_over(x, reading.place.mesh, reading.batch_axes)


def as_dtensor(loss: Tensor, reading: Reading, reduction: str) -> Any:
    """Say where the result of `finish` lies."""
    layout = reading.rows if reduction == "none" else reading.rows.replicated.with_shape(())
    return declared(DTensor, loss, layout)


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
    if not isinstance(input, DTensor) or not isinstance(dim, int):
        return NotImplemented
    if not -input.ndim <= dim < input.ndim:
        return NotImplemented
    dim %= input.ndim
    given = input if dtype is None else input.to(dtype)
    reading = _read_logits(given, dim) if _cutting(input.layout, dim) else None
    if reading is None or not reading.local.is_floating_point():
        return NotImplemented
    result = log_softmax(reading.local, reading.place).movedim(-1, dim)
    return declared(DTensor, result, input._layout.cotangent)


def _softmax(input: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Serve softmax likewise; the logarithm is not rounded in between."""
    dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype) or input.dtype
    result = _log_softmax(input, *args[:1], dtype=accumulate_in(dtype), **kwargs)
    return result if result is NotImplemented else result.exp().to(dtype)


_SERVED: dict[str, Callable[..., Any]] = {
    F.cross_entropy.__name__: _cross_entropy,
    F.nll_loss.__name__: _nll_loss,
    F.log_softmax.__name__: _log_softmax,
    F.softmax.__name__: _softmax,
}
