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
from hyper_parallel.dtensor.read import refuse_other_tensors, whole_of
from hyper_parallel.errors import LayoutError
from hyper_parallel.parallel.targets import (
    ClassIndices,
    ClassProbabilities,
    Goal,
    VocabShard,
    accumulate_in,
)
from hyper_parallel.parallel.vocab import log_softmax, loss_rows, picked_rows, sum_over

__all__ = ["Loss", "is_probability", "loss_parallel"]

Tensor = torch.Tensor


@contextmanager
def loss_parallel() -> Generator[None]:
    """Within it, losses of DTensor logits do not gather them.

    Serves F.cross_entropy and F.nll_loss, and log_softmax and softmax along a cut dim (and so
    nn.CrossEntropyLoss and the like) with all their arguments: class indices or probabilities,
    weight, ignore_index, label_smoothing, every reduction. Averages are those of the whole batch,
    however the batch is cut. Other calls are served as always, and plain logits count as whole: of
    plain local ones `vocab_parallel_cross_entropy` gives the loss. Backward may run inside or
    after; a function that torch.utils.checkpoint calls again must enter the context itself. It
    nests, and ends with the block even on an exception.

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
class Loss:
    """A loss of rows of logits: where these lie, and what F.cross_entropy is told besides.

    Args:
        place: which classes this rank holds.
        rows: where the rows' results lie.
        where: what was called, for errors.
        weight: [V], a weight for each class, a DTensor or plain; or None.
        ignore_index: the target that does not count.
        reduction: "none", "mean" or "sum".
        label_smoothing: between 0 and 1.
    """

    place: VocabShard
    rows: Layout
    where: str = "loss_parallel"
    weight: Any = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def of(self, logits: Tensor, target: Any) -> Tensor:
        """Give the local result, of logits [N, v]; probabilities are this rank's part, [N, v]."""
        if not is_probability(target):
            goal = self.classes(target, logits.dtype)
            return self.finish(loss_rows(logits, None, goal), goal, logits)
        p = target.to(accumulate_in(logits.dtype))
        weight = self._checked_weight(logits.dtype)
        own = None if weight is None else self.place.own(weight.to(p.dtype))
        odds = ClassProbabilities(self.place, p, own, self.label_smoothing)
        return self.finish(loss_rows(logits, p, odds), odds, logits)

    def classes(self, target: Any, dtype: torch.dtype) -> ClassIndices:
        """Read a target of class indices, a DTensor or plain; `dtype` is that of the logits."""
        refuse_other_tensors(target, self.where)
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise LayoutError(
                self.where,
                "target must be integer classes",
                "Cast it with long(); cross_entropy takes probabilities, too",
                dtype=target.dtype,
            )
        weight = self._checked_weight(dtype)
        return ClassIndices.of(
            self.bring(target, self.rows),
            self.place,
            accumulate_in(dtype),
            weight=weight,
            ignore_index=self.ignore_index,
            smoothing=self.label_smoothing,
        )

    def bring(self, target: Any, layout: Layout) -> Tensor:
        """Give this rank's part of a target in the layout that the loss needs."""
        if tuple(target.shape) != layout.shape:
            raise LayoutError(
                self.where,
                f"target must have the global shape {layout.shape}",
                "Pass class indices, one a row, or probabilities shaped as the logits",
                target=tuple(target.shape),
            )
        if not isinstance(target, DTensor):
            is_whole = target.is_floating_point() or counts_as_replicated(DTensor, target)
            if _cutting(layout) and not is_whole:
                raise LayoutError(
                    self.where,
                    "a target must be a DTensor where an axis cuts the batch",
                    "Say where it lies with DTensor.from_local or distribute_tensor",
                    placements=layout.placements,
                )
            target = declared(DTensor, target, layout.replicated)
        if target._layout != layout:  # type: ignore[union-attr]
            target = redistributed(target, layout)
        return target.to_local()  # type: ignore[union-attr]

    def _checked_weight(self, dtype: torch.dtype) -> Tensor | None:
        """Refuse what F.cross_entropy would refuse; give the class weights, whole."""
        weight, vocab = self.weight, self.place.vocab
        fix = "Pass what F.cross_entropy takes"
        if weight is not None:
            refuse_other_tensors(weight, self.where)
        if not dtype.is_floating_point:
            wrong: dict[str, Any] = {"dtype": dtype}
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
            return whole_of(DTensor, weight)
        raise LayoutError(self.where, must, fix, **wrong)

    def finish(self, rows: Tensor, goal: Goal, logits: Tensor) -> Tensor:
        """Reduce the rows' losses over the whole batch; give the local result."""
        mesh, axes, is_mean = self.place.mesh, _cutting(self.rows), self.reduction == "mean"
        result = rows
        if is_mean and isinstance(goal, ClassIndices):
            sums = torch.stack([rows.sum(), goal.weights.sum()])
            total, count = sum_over(sums, mesh, axes).unbind()
            result = total / count
        elif self.reduction != "none":
            result = sum_over(rows.sum(), mesh, axes)
            if is_mean:
                result = result / torch.Size(self.rows.shape).numel()
        # Under autocast losses are float32.
        is_cast = torch.is_autocast_enabled(logits.device.type)
        return result.to(accumulate_in(logits.dtype) if is_cast else logits.dtype)

    def as_dtensor(self, result: Tensor) -> Any:
        """Say where a local result lies."""
        layout = self.rows
        if self.reduction != "none":
            layout = layout.replicated.with_shape(())
        return declared(DTensor, result, layout)


def is_probability(target: Any) -> bool:
    """Tell targets that are probabilities from those that are classes."""
    return isinstance(target, Tensor) and target.is_floating_point()


def _cutting(layout: Layout, dim: int | None = None) -> tuple[int, ...]:
    """List the axes of more than one rank that cut a dim; None: any dim."""
    pairs = enumerate(zip(layout.placements, layout.mesh.shape, strict=True))
    return tuple(
        axis
        for axis, (p, size) in pairs
        if size > 1 and p.cut_dim is not None and dim in (None, p.cut_dim)
    )


def _read_logits(
    logits: Any, dim: int, options: dict[str, Any] | None = None
) -> tuple[Tensor, Loss] | None:
    """Give the local logits of a DTensor, class dim `dim` last; None if not cut in plain ranges."""
    layout, mesh = logits.layout, logits.device_mesh
    cut = _cutting(layout, dim)
    plain = all(isinstance(layout.placements[axis], Shard) for axis in cut)
    if not plain or mesh.get_coordinate() is None:
        return None
    settled = layout.cotangent
    if settled != layout:
        logits = redistributed(logits, settled)
    held = settled.intervals(mesh.get_rank())[dim]
    start, stop = held[0] if held else (0, 0)
    place = VocabShard(mesh, cut, start, stop - start, settled.shape[dim])
    loss = Loss(place, _rows_of(settled, dim), **(options or {}))
    return logits.to_local().movedim(dim, -1), loss


def _rows_of(layout: Layout, dim: int) -> Layout:
    """Give the layout of what is left when the class dim is reduced."""

    def placed(p: Placement) -> Placement:
        cut: int | None = p.cut_dim
        if cut is None:
            return p
        return Replicate() if cut == dim else replace(p, dim=cut - (cut > dim))  # type: ignore[type-var]

    shape = layout.shape[:dim] + layout.shape[dim + 1 :]
    return replace(layout, placements=tuple(map(placed, layout.placements)), shape=shape)


def _read_call(input: Any, args: Any, options: dict[str, Any]) -> tuple[Tensor, Loss] | None:
    """Read a call of a loss of torch.nn.functional, which passes options on by name."""
    is_old = options.pop("size_average", None) is not None
    is_old |= options.pop("reduce", None) is not None
    if args or is_old or not isinstance(input, DTensor) or not input.ndim:
        return None
    return _read_logits(input, min(input.ndim - 1, 1), options)


def _cross_entropy(input: Any, target: Any, *args: Any, **options: Any) -> Any:
    """Serve F.cross_entropy."""
    found = _read_call(input, args, options)
    if found is None:
        return NotImplemented
    logits, loss = found
    if is_probability(target):
        refuse_other_tensors(target, loss.where)
        part = loss.bring(target, input.layout.cotangent)
        target = part.movedim(min(input.ndim - 1, 1), -1)
    return loss.as_dtensor(loss.of(logits, target))


def _nll_loss(input: Any, target: Any, *args: Any, **options: Any) -> Any:
    """Serve F.nll_loss."""
    found = _read_call(input, args, options)
    if found is None:
        return NotImplemented
    log_probs, loss = found
    goal = loss.classes(target, log_probs.dtype)
    return loss.as_dtensor(loss.finish(picked_rows(log_probs, goal), goal, log_probs))


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
    found = _read_logits(given, dim) if _cutting(input.layout, dim) else None
    if found is None or not given.is_floating_point():
        return NotImplemented
    logits, loss = found
    result = log_softmax(logits, loss.place).movedim(-1, dim)
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
