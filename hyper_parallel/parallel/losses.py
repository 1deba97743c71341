# SPDX-License-Identifier: Apache-2.0
"""Losses as functions: of plain local logits, and of hidden states whose logits are never whole."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core import Layout, Partial, Replicate, Shard
from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.interop import from_torch, is_torch_dtensor, torch_placement
from hyper_parallel.dtensor.read import read_mesh, refuse_other_tensors
from hyper_parallel.errors import LayoutError
from hyper_parallel.parallel.loss import Loss, is_probability
from hyper_parallel.parallel.targets import VocabShard
from hyper_parallel.parallel.vocab import linear_rows
from hyper_parallel.runtime import DeviceMesh

__all__ = ["linear_cross_entropy", "vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(  # noqa: PLR0913  # those of F.cross_entropy, and where
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    device_mesh: Any,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Give the cross entropy of plain local logits whose last dim is cut over a mesh.

    Args:
        logits: [..., v], floating, this rank's classes, in rank order.
        target: [...], integer classes of the whole vocabulary, the same on every rank of the mesh;
            or [..., v], probabilities, cut as the logits.
        weight: [vocab_size], a weight for each class, the same on every rank.
        device_mesh: the mesh of one axis that cuts the vocabulary.
        vocab_size: number of classes, if cut by torch.chunk's rule; without it the ranks exchange
            their numbers, which may be any.
        ignore_index: the target that does not count.
        reduction: "none", "mean" or "sum", over what this mesh's ranks hold.
        label_smoothing: between 0 and 1.

    Returns:
        The loss, the same on every rank: a scalar, or [...] for "none".

    Communicates:
        Forward: all-reduces of the rows' maxima and of two or three sums a row; without
        `vocab_size` one exchange of integers. Backward: nothing.

    Raises:
        LayoutError: a mesh of several axes, a number of classes that is not this rank's chunk, or
            arguments that do not fit.
        IndexError: a target that is no class.

    Source:
        Megatron-LM (arXiv:1909.08053), section 3.

    Example:
        >>> import torch
        >>> from hyper_parallel import init_device_mesh, simulate, vocab_parallel_cross_entropy
        >>> @simulate(2)
        ... def loss():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     logits = torch.zeros(3, 2)  # of 4 classes
        ...     target = torch.tensor([0, 3, 1])
        ...     return vocab_parallel_cross_entropy(logits, target, device_mesh=mesh).item()
        >>> [round(x, 4) for x in loss()]
        [1.3863, 1.3863]
    """
    where = "vocab_parallel_cross_entropy"
    mesh = read_mesh(device_mesh, where)
    refuse_other_tensors(logits, where)
    if mesh.ndim != 1 or isinstance(logits, DTensor) or not logits.ndim:
        raise LayoutError(
            where,
            "logits must be plain, with classes on the last dim, and the mesh of one axis",
            'Slice the mesh, as in mesh["tp"]; for DTensors use loss_parallel()',
            logits=type(logits).__name__,
            mesh=mesh,
        )
    if is_probability(target) and (isinstance(target, DTensor) or target.shape != logits.shape):
        raise LayoutError(
            where,
            f"probabilities must be plain and of the logits' shape {tuple(logits.shape)}",
            "Pass this rank's classes only",
            target=tuple(target.shape),
        )
    place = _place(mesh, logits.shape[-1], vocab_size, where)
    rows = Layout(mesh, (Replicate(),), tuple(logits.shape[:-1]))
    loss = Loss(place, rows, where, weight, ignore_index, reduction, label_smoothing)
    return loss.of(logits, target)


def _place(mesh: DeviceMesh, own: int, vocab: int | None, where: str) -> VocabShard:
    """Say which classes a rank with `own` of them holds."""
    if vocab is None:
        sizes = [size for (size,) in mesh.communicator(0).all_gather_ints([own])]
        return VocabShard(mesh, (0,), sum(sizes[: mesh.get_local_rank()]), own, sum(sizes))
    (part,) = Layout(mesh, (Shard(0),), (vocab,)).slices(mesh.get_rank())
    if part.stop - part.start != own:
        raise LayoutError(
            where,
            f"this rank must hold {part.stop - part.start} of {vocab} classes",
            "Cut as torch.chunk does, or leave vocab_size out",
            classes=own,
        )
    return VocabShard(mesh, (0,), part.start, own, vocab)


def linear_cross_entropy(  # noqa: PLR0913  # torch's signature, and the chunk
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int = 1024,
) -> torch.Tensor:
    """Give the cross entropy of `input @ linear_weight^T`, holding few rows of logits at a time.

    Args:
        input: [..., H]; a DTensor, or plain and the same on every rank of the weight's mesh.
        linear_weight: [V, H], a DTensor, as a ColwiseParallel layer has it, ours or torch's.
        target: [...], integer classes; a DTensor, or plain as `input`.
        linear_bias: [V], a DTensor.
        weight: [V], a weight for each class, the same on every rank.
        reduction: "none", "mean" or "sum".
        ignore_index: the target that does not count.
        label_smoothing: between 0 and 1.
        chunk_size: rows whose logits are held at one time, in forward and again in backward.

    Returns:
        The loss: a scalar, or [...] for "none"; a DTensor if `input` is one.

    Communicates:
        Forward: for each chunk all-reduces of its rows' maxima and of two sums a row. Backward:
        an all-reduce of the gradient of `input`.

    Raises:
        LayoutError: a weight that is not a DTensor, or arguments that do not fit.
        IndexError: a target that is no class.

    Source:
        Cut Your Losses in Large-Vocabulary Language Models (arXiv:2411.09009), for the idea to
        make logits again in backward.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, distribute_tensor, init_device_mesh
        >>> from hyper_parallel import linear_cross_entropy, simulate
        >>> @simulate(2)
        ... def loss():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     head = distribute_tensor(torch.zeros(4, 8), mesh, [Shard(0)])
        ...     return linear_cross_entropy(torch.ones(3, 8), head, torch.tensor([0, 3, 1])).item()
        >>> [round(x, 4) for x in loss()]
        [1.3863, 1.3863]
    """
    where = "linear_cross_entropy"
    refuse_other_tensors(input, where)
    head = _layout_of(linear_weight, "linear_weight", where)
    _check_linear(input, head, linear_bias, chunk_size)
    mesh = head.mesh
    assert isinstance(mesh, DeviceMesh)  # noqa: S101
    cut = tuple(a for a, p in enumerate(head.placements) if p.cut_dim == 0 and mesh.shape[a] > 1)
    part = head.slices(mesh.get_rank())[0]
    place = VocabShard(mesh, cut, part.start, part.stop - part.start, head.shape[0])
    x, rows = _hidden(input, mesh, cut)
    w = _local_parameter(linear_weight, head, rows)
    bias = None if linear_bias is None else _local_parameter(linear_bias, head, rows)
    loss = Loss(place, rows, where, weight, ignore_index, reduction, label_smoothing)
    goal = loss.classes(target, x.dtype)
    found = linear_rows(x.reshape(-1, x.shape[-1]), w, bias, goal, chunk_size)
    result = loss.finish(found.reshape(x.shape[:-1]), goal, x)  # type: ignore[union-attr]
    return loss.as_dtensor(result) if isinstance(input, DTensor) else result


def _check_linear(input: torch.Tensor, head: Layout, bias: Any, chunk_size: int) -> None:
    """Refuse operands that do not fit each other."""
    where = "linear_cross_entropy"
    lies = None if bias is None else _layout_of(bias, "linear_bias", where)
    wrong: dict[str, Any]
    if chunk_size < 1:
        must, fix, wrong = "chunk_size must be positive", "Pass 1024", {"chunk_size": chunk_size}
    elif len(head.shape) != 2 or tuple(input.shape[-1:]) != head.shape[1:]:
        must = "input must be [..., H] and linear_weight [V, H]"
        fix = "Pass the hidden states and the weight of the last layer"
        wrong = {"input": tuple(input.shape), "linear_weight": head.shape}
    elif lies is not None and lies != head.with_shape(head.shape[:1]):
        must = "linear_bias must lie as linear_weight's classes do"
        fix, wrong = "Cut it with the same placements", {"linear_bias": lies}
    else:
        return
    raise LayoutError(where, must, fix, **wrong)


def _layout_of(param: torch.Tensor, name: str, where: str) -> Layout:
    """Read where a parameter lies; it may be cut along the classes only.

    Raises:
        LayoutError: it is plain, or cut otherwise.
    """
    layout = None
    if isinstance(param, DTensor):
        layout = param.layout
    elif is_torch_dtensor(param):
        layout = from_torch(param).layout
    plain = (Replicate, Shard)
    if layout is None or not all(
        isinstance(p, plain) and p.cut_dim in (None, 0) for p in layout.placements
    ):
        raise LayoutError(
            where,
            f"{name} must be a DTensor, cut along the classes or replicated",
            "Give the last layer ColwiseParallel()",
            **{name: type(param).__name__ if layout is None else layout},
        )
    return layout


def _hidden(input: Any, mesh: DeviceMesh, cut: tuple[int, ...]) -> tuple[torch.Tensor, Layout]:
    """Give the local hidden states, the same on the axes `cut`, and the layout of their rows.

    Their gradient is a pending sum on those axes.
    """
    if not isinstance(input, DTensor):
        input = DTensor.from_local(input, mesh, [Replicate()] * mesh.ndim)
    last = input.ndim - 1
    settled = [
        Replicate() if axis in cut or p.is_partial() or p.cut_dim == last else p
        for axis, p in enumerate(input.placements)
    ]
    input = input.redistribute(mesh, settled)
    shares = [Partial() if axis in cut else p for axis, p in enumerate(settled)]
    rows = Layout(mesh, tuple(settled), tuple(input.shape[:-1]))
    return _as_in_autocast(input.to_local(grad_placements=shares)), rows


def _local_parameter(param: Any, head: Layout, rows: Layout) -> torch.Tensor:
    """Give a parameter's local part, as F.linear takes it under autocast.

    Where an axis cuts the rows its gradient is a pending sum.
    """
    shares = [
        Partial() if r.cut_dim is not None and p.is_replicate() else p
        for p, r in zip(head.placements, rows.placements, strict=True)
    ]
    if isinstance(param, DTensor):
        return _as_in_autocast(param.to_local(grad_placements=shares))
    # Torch reduces a pending gradient where a move, even to where it lies, gives it back.
    param = param.redistribute(placements=param.placements)
    return _as_in_autocast(param.to_local(grad_placements=[torch_placement(p) for p in shares]))


def _as_in_autocast(x: torch.Tensor) -> torch.Tensor:
    """Cast as autocast would; backward, which is outside of it, then has equal dtypes."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))
