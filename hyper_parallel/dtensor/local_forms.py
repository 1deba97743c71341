# SPDX-License-Identifier: Apache-2.0
"""How ops run on local tensors whose arguments speak of the global ones: sizes and positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.random import drawing
from hyper_parallel.dtensor.signatures import by_name, op_name

__all__ = ["Addressed", "Local", "as_called", "form_of", "masked_embedding"]

Form = Callable[["Local", Any, tuple[Any, ...], dict[str, Any]], Any]
"""Given what the rank knows, the torch function, and the call's arguments."""


@dataclass(frozen=True, slots=True)
class Addressed:
    """A cut dim of which the call gives global positions."""

    dim: int
    start: int
    """The first position that this rank holds."""
    size: int
    """Positions of the whole dim."""


@dataclass(frozen=True, slots=True)
class Local:
    """What this rank's part of an op must know that the local tensors do not tell."""

    form: Form
    """How the op runs on local tensors."""
    whole: tuple[int, ...]
    """Shape of the first result."""
    shape: tuple[int, ...]
    """Shape of this rank's part of it."""
    addressed: tuple[Addressed, ...]
    weights: tuple[float, ...]
    """What the results are multiplied by; empty for nothing."""
    drawn: Layout | None
    """Where random numbers lie that the op draws; None: it draws none."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on local tensors."""
        if self.drawn is None:
            result = self.form(self, func, args, kwargs)
        else:
            with drawing(self.drawn, op_name(func), tree_flatten((args, kwargs))[0]):
                result = self.form(self, func, args, kwargs)
        if not self.weights:
            return result
        if isinstance(result, torch.Tensor):
            return result * self.weights[0]
        pairs = zip(result, self.weights, strict=True)
        return type(result)(part * share for part, share in pairs)


def as_called(local: Local, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the op on local tensors as it is called."""
    return func(*args, **kwargs)


def form_of(name: str, static: tuple[tuple[str, Any], ...]) -> Form | None:
    """Give how an op runs on a cut dim that its arguments speak of; None: it cannot."""
    if name == "embedding" and dict(static).get("scale_grad_by_freq"):
        return None
    return _FORMS.get(name)


# ---------------------------------------------------------------------- sizes


def _reshape(local: Local, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else next(iter(kwargs.values()))  # the name takes time to find
    return x.reshape(local.shape)


def _expand(local: Local, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else next(iter(kwargs.values()))
    return x.expand(local.shape)


def _named(form: Callable[[Local, Any, dict[str, Any]], Any]) -> Form:
    """Make a form of one that is given the call's arguments by name."""

    def run(local: Local, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return form(local, func, by_name(op_name(func), args, kwargs))

    return run


@_named
def _conv(local: Local, func: Any, given: dict[str, Any]) -> Any:
    """Convolve the groups that this rank holds."""
    weight = given["weight"]
    channel = -1 - (weight.ndim - 2)
    is_transposed = "transpose" in op_name(func)
    channels = local.shape[channel] if is_transposed else given["input"].shape[channel]
    return func(**{**given, "groups": max(channels // weight.shape[1], 1)})


@_named
def _group_norm(local: Local, func: Any, given: dict[str, Any]) -> Any:
    """Normalise the groups that this rank holds."""
    groups = given["num_groups"] * local.shape[1] // local.whole[1]
    return func(**{**given, "num_groups": groups})


@_named
def _npu_attention(local: Local, func: Any, given: dict[str, Any]) -> Any:
    """Attend with the heads that this rank holds."""
    at = 1 if given["input_layout"] == "BNSD" else 2
    heads = given["head_num"] * local.shape[at] // local.whole[at]
    return func(**{**given, "head_num": heads})


# ---------------------------------------------------------------------- positions


def _shift(
    positions: torch.Tensor, at: Addressed, held: int, is_negative_fine: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn global positions into this rank's.

    Returns:
        Positions among the `held` ones, and where another rank holds it (position 0). What is no
        position of the whole dim is none here either, so that the op refuses it on every rank.
    """
    if is_negative_fine:
        positions = torch.where(positions < 0, positions + at.size, positions)
    shifted = positions - at.start
    elsewhere = (shifted < 0) | (shifted >= held)
    is_known = (positions >= 0) & (positions < at.size)
    absent = torch.where(is_known, 0, at.size + held)
    return torch.where(elsewhere, absent, shifted), elsewhere


def masked_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    start: int,
    vocab: int,
    padding_idx: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Look up the global ids that this rank's rows cover; zeros for the others.

    The first row is that of id `start`, of `vocab` in all. What follows is as for F.embedding.

    Raises:
        IndexError: an id outside the vocabulary, on every rank (as the dense lookup does).
    """
    rows = weight.shape[0]
    local, elsewhere = _shift(ids, Addressed(0, start, vocab), rows)
    if rows == 0:
        weight = F.pad(weight, (0, 0, 0, 1))  # an empty shard still checks its ids
    padding = None
    if padding_idx is not None:
        padding = (padding_idx % vocab) - start
        padding = padding if 0 <= padding < rows else None
    looked_up = F.embedding(local, weight, padding, *args, **kwargs)
    return looked_up.masked_fill(elsewhere.unsqueeze(-1), 0)


@_named
def _embedding(local: Local, func: Any, given: dict[str, Any]) -> Any:
    (at,) = local.addressed
    ids, weight = given.pop("input"), given.pop("weight")
    return masked_embedding(ids, weight, at.start, at.size, **given)


@_named
def _index_select(local: Local, func: Any, given: dict[str, Any]) -> Any:
    (at,) = local.addressed
    x = given["input"]
    index, elsewhere = _shift(given["index"], at, x.shape[at.dim])
    shape = [1] * x.ndim
    shape[at.dim] = -1
    return func(x, at.dim, index).masked_fill(elsewhere.reshape(shape), 0)


@_named
def _gather(local: Local, func: Any, given: dict[str, Any]) -> Any:
    (at,) = local.addressed
    index, elsewhere = _shift(given["index"], at, given["input"].shape[at.dim])
    if op_name(func) == "gather":
        return func(given["input"], at.dim, index).masked_fill(elsewhere, 0)
    return func(given["input"], index, at.dim).masked_fill(elsewhere, 0)


def _padded(
    x: torch.Tensor, at: Addressed, positions: torch.Tensor, is_negative_fine: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a row that is dropped after a write; give it as the place of what others hold."""
    held = x.shape[at.dim]
    index, elsewhere = _shift(positions, at, held, is_negative_fine)
    row = x.narrow(at.dim, 0, 1).detach()
    return torch.cat([x, row], at.dim), torch.where(elsewhere & (index == 0), held, index)


@_named
def _write(local: Local, func: Any, given: dict[str, Any]) -> Any:
    (at,) = local.addressed
    x = given["input"]
    padded, index = _padded(x, at, given["index"])
    options = {k: v for k, v in given.items() if k not in ("input", "dim", "index", "src")}
    result = func(padded, at.dim, index, given["src"], **options)
    return result.narrow(at.dim, 0, x.shape[at.dim])


@_named
def _index_put(local: Local, func: Any, given: dict[str, Any]) -> Any:
    (at,) = local.addressed
    x, indices = given["input"], list(given["indices"])
    padded, indices[at.dim] = _padded(x, at, indices[at.dim], is_negative_fine=True)
    result = func(padded, indices, given["values"], given.get("accumulate", False))
    return result.narrow(at.dim, 0, x.shape[at.dim])


@_named
def _select(local: Local, func: Any, given: dict[str, Any]) -> Any:
    (at,) = local.addressed
    return _taken(local, given["input"], [*[slice(None)] * at.dim, given["index"]])


@_named
def _getitem(local: Local, func: Any, given: dict[str, Any]) -> Any:
    index = given["index"]
    return _taken(local, given["input"], list(index) if isinstance(index, tuple) else [index])


def _taken(local: Local, x: torch.Tensor, entries: list[Any]) -> torch.Tensor:
    """Index with positions that this rank holds; what another rank holds is zero here."""
    place = next((i for i, entry in enumerate(entries) if entry is Ellipsis), None)
    if place is not None:
        count = x.ndim - sum(entry is not None and entry is not Ellipsis for entry in entries)
        entries[place : place + 1] = [slice(None)] * count
    by_dim = [i for i, entry in enumerate(entries) if entry is not None]
    absent, elsewhere = False, None
    for at in local.addressed:
        entry = entries[by_dim[at.dim]]
        if isinstance(entry, torch.Tensor):
            shifted, elsewhere = _shift(entry, at, x.shape[at.dim], is_negative_fine=True)
            entries[by_dim[at.dim]] = shifted
            behind = [e for e in entries[by_dim[at.dim] + 1 :] if not isinstance(e, int)]
            extra = len(behind) + x.ndim - len(by_dim)
            elsewhere = elsewhere.reshape((*elsewhere.shape, *[1] * extra))
        else:
            position = entry % at.size - at.start
            is_here = 0 <= position < x.shape[at.dim]
            entries[by_dim[at.dim]] = position if is_here else 0
            absent = absent or not is_here
    result = x[tuple(entries)]
    if absent:
        result = result.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)
    return result if elsewhere is None else result.masked_fill(elsewhere, 0)


_FORMS: dict[str, Form] = {
    **dict.fromkeys("view reshape unflatten squeeze narrow".split(), _reshape),
    "expand": _expand,
    **{f"conv{n}d": _conv for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _conv for n in (1, 2, 3)},
    "group_norm": _group_norm,
    "npu_fusion_attention": _npu_attention,
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _gather,
    "take_along_dim": _gather,
    **dict.fromkeys(
        "scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce".split(),
        _write,
    ),
    "index_put": _index_put,
    "select": _select,
    "__getitem__": _getitem,
}
