# SPDX-License-Identifier: Apache-2.0
"""What a loss is told: which classes a rank holds, and how its targets weigh them.

A target gives q, the weight of each class: a one-hot row times its class weight, smoothed, or given
probabilities; [Note: vocabulary loss] in vocab.py says what is made of it.

Legend: N rows (any number of dims), V classes in all, v classes of this rank, the last dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from hyper_parallel.errors import describe
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.rows import reduce

__all__ = ["ClassIndices", "ClassProbabilities", "Goal", "VocabShard", "accumulate_in"]

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which classes this rank holds: `size` of `vocab`, from `start` on; `axes` of `mesh` cut."""

    mesh: DeviceMesh
    axes: tuple[int, ...]
    start: int
    size: int
    vocab: int

    def reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """All-reduce `x`, which is given up, over the ranks that cut the classes."""
        if not self.axes:
            return x
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        return reduce(self.mesh, axes, x.contiguous(), op)

    def own(self, classes: Tensor) -> Tensor:
        """Give this rank's part of a whole [V]."""
        return classes.narrow(0, self.start, self.size)


def accumulate_in(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype that sums of `dtype` are made in."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True, slots=True)
class ClassIndices:
    """Targets that are classes: q is `at` on the target's class, plus `spread` on every class.

    Args:
        place: which classes this rank holds.
        target: [N], int64.
        keep: [N], whether the target counts.
        here: [N], whether it does and this rank holds it.
        index: [N], then its place among the own classes; else 0.
        at: [N], the weight of the target's class.
        mass: [N], the sum of q.
        weights: [N], what the mean divides by, row by row; 0 where the target is ignored.
        spread: [v], what label smoothing gives each own class; None without smoothing.
    """

    place: VocabShard
    target: Tensor
    keep: Tensor
    here: Tensor
    index: Tensor
    at: Tensor
    mass: Tensor
    weights: Tensor
    spread: Tensor | None

    @classmethod
    def of(
        cls,
        target: Tensor,
        place: VocabShard,
        dtype: torch.dtype,
        *,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
    ) -> ClassIndices:
        """Read integer targets [N]; `weight` is the whole [V].

        A target that is no class gets a place beyond the last, at which looking up fails, on every
        rank, as it does without a cut.
        """
        target = target.long()  # the arithmetic of narrower integers wraps around
        keep = target != ignore_index
        local = target - place.start
        here = keep & (local >= 0) & (local < place.size)
        wrong = keep & ((target < 0) | (target >= place.vocab))
        index = torch.where(wrong, max(place.size, 1), torch.where(here, local, 0))
        weights = keep.to(dtype)
        if weight is not None:
            weight = weight.to(dtype)
            known = torch.where(keep, target, 0).clamp(0, place.vocab - 1)
            weights = weight[known].masked_fill(~keep, 0)
        at, mass, spread = weights, weights, None
        if smoothing:
            each = smoothing / place.vocab
            whole = at.new_ones(place.vocab) if weight is None else weight
            spread = place.own(whole) * each
            at = weights * (1 - smoothing)
            mass = at + whole.sum() * each
        return cls(place, target, keep, here, index, at, mass, weights, spread)

    def part(self, start: int, stop: int) -> ClassIndices:
        """Give the rows from `start` to `stop` of all rows in one dim."""
        names = ("target", "keep", "here", "index", "at", "mass", "weights")
        rows = {name: getattr(self, name).reshape(-1)[start:stop] for name in names}
        return replace(self, **rows)

    def counted(self, rows: Tensor) -> Tensor:
        """Give [N] with zeros where the target is ignored, whatever stood there."""
        return rows.masked_fill(~self.keep, 0)

    def look_up(self, x: Tensor) -> Tensor:
        """Give the target's entry of [N, v], [N]; 0 where it is not here.

        Raises:
            IndexError: a target is no class (on an accelerator the device itself stops).
        """
        # An empty shard still checks the targets, and is part of the graph as others are.
        source = x if x.shape[-1] else F.pad(x, (0, 1))
        try:
            found = source.gather(-1, self.index.unsqueeze(-1)).squeeze(-1)
        except RuntimeError as error:
            if "out of bounds" not in str(error):
                raise
            wrong = self.keep & ((self.target < 0) | (self.target >= self.place.vocab))
            raise IndexError(
                describe(
                    "cross_entropy",
                    "every target must be a class or ignore_index",
                    "Check the labels against the number of classes",
                    target=self.target[wrong].unique()[:4].tolist(),
                    classes=self.place.vocab,
                )
            ) from error
        return found.masked_fill(~self.here, 0)

    def sums(self, x: Tensor) -> list[Tensor]:
        """Give this rank's part of sum(q * x), [N] of [N, v]; the mass is known."""
        result = self.look_up(x) * self.at
        if self.spread is not None:
            with torch.autocast(x.device.type, enabled=False):
                result = result + x @ self.spread
        return [result]

    def subtract_from(self, grad: Tensor, scale: Tensor) -> None:
        """Take q * scale off `grad` [N, v], in place; scale is [N]."""
        if not grad.shape[-1]:
            return
        taken = (scale * self.at).masked_fill(~self.here, 0).neg()
        grad.scatter_add_(-1, self.index.unsqueeze(-1), taken.unsqueeze(-1))
        if self.spread is not None:
            grad.addcmul_(scale.unsqueeze(-1), self.spread, value=-1)


@dataclass(frozen=True, slots=True)
class ClassProbabilities:
    """Targets that are probabilities: q is `weight * (p * (1 - smoothing) + smoothing / V)`.

    Args:
        place: which classes this rank holds.
        p: [N, v], this rank's part.
        weight: [v], this rank's part, or None.
        smoothing: between 0 and 1.
    """

    place: VocabShard
    p: Tensor
    weight: Tensor | None
    smoothing: float

    def q(self) -> Tensor:
        """Give q, [N, v]."""
        q = self.p if self.weight is None else self.p * self.weight
        if not self.smoothing:
            return q
        each = self.smoothing / self.place.vocab
        return q * (1 - self.smoothing) + (each if self.weight is None else self.weight * each)

    def counted(self, rows: Tensor) -> Tensor:
        """Give [N] as it is: every row counts."""
        return rows

    def sums(self, x: Tensor) -> list[Tensor]:
        """Give this rank's parts of sum(q * x) and of the mass, [N] of [N, v]."""
        q = self.q()
        return [(q * x).sum(-1), q.sum(-1)]

    def subtract_from(self, grad: Tensor, scale: Tensor) -> None:
        """Take q * scale off `grad` [N, v], in place; scale is [N]."""
        grad.addcmul_(self.q(), scale.unsqueeze(-1), value=-1)

    def grad_of_p(self, minus_log: Tensor, scale: Tensor) -> Tensor:
        """Give the gradient of p, of lse - x [N, v] and the rows' gradient [N]."""
        each = minus_log * (scale * (1 - self.smoothing)).unsqueeze(-1)
        return each if self.weight is None else each * self.weight


Goal = ClassIndices | ClassProbabilities
