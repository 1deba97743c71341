# SPDX-License-Identifier: Apache-2.0
"""Every dtype through every move on one axis: what came out, or what refused it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from hyper_parallel import DTensor, HyperParallelError, Partial, Placement, Replicate, Shard
from hyper_parallel.core.placement import REDUCE_OPS
from hyper_parallel.runtime import DeviceMesh

DTYPES = (
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
)
_BY_BACKEND = "backend must be able to reduce this dtype with this op"
SHAPES = ((5, 3), (), (0, 3))
PENDING = tuple(map(Partial, REDUCE_OPS))


def outcomes(mesh: DeviceMesh) -> dict[tuple[str, str, str], set[str]]:
    """Move tensors of every dtype between every pair of placements.

    Returns:
        By dtype, source and target: "exact", "wrong", or the text of the refusal, over all shapes.
    """
    found: dict[tuple[str, str, str], set[str]] = {}
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        cuts = (Shard(0), Shard(1)) if shape else ()
        for src, dst in itertools.product((Replicate(), *cuts, *PENDING), repeat=2):
            key = (str(dtype).removeprefix("torch."), repr(src), repr(dst))
            found.setdefault(key, set()).add(_outcome(mesh, dtype, shape, src, dst))
    return found


def unexpected(
    found: dict[tuple[str, str, str], set[str]],
    *,
    complex_products: bool,
    irreducible: Sequence[str] = (),
) -> dict[tuple[str, str, str], set[str]]:
    """Give what is neither exact nor refused as it must be.

    Args:
        found: what `outcomes` gave.
        complex_products: whether the backend multiplies complex numbers.
        irreducible: dtypes that the backend cannot reduce at all.
    """
    odd: dict[tuple[str, str, str], set[str]] = {}
    for key, texts in found.items():
        dtype = getattr(torch, key[0])
        legal = {"exact"}
        if dtype.is_complex and {"P(max)", "P(min)"} & set(key):
            legal, refusal = set(), "need numbers that have an order"
        elif not (dtype.is_complex or dtype.is_floating_point) and "P(avg)" in key:
            legal, refusal = set(), "Partial('avg') needs a floating point tensor"
        elif dtype.is_complex and "P(product)" in key and not complex_products:
            refusal = _BY_BACKEND
            if texts == legal:  # it must not be exact for every shape
                odd[key] = texts
        elif key[0] in irreducible and "P(" in key[1] + key[2]:
            refusal = _BY_BACKEND
        else:
            refusal = "no refusal"
        if not all(text in legal or refusal in text for text in texts):
            odd[key] = texts
    return odd


def _outcome(
    mesh: DeviceMesh, dtype: torch.dtype, shape: tuple[int, ...], src: Placement, dst: Placement
) -> str:
    locals_, whole = _made(mesh.size(), dtype, shape, src)
    try:
        given = DTensor.from_local(locals_[mesh.get_local_rank()], mesh, [src], shape=shape)
        moved = given.redistribute(mesh, [dst])
        full = moved.full_tensor()
    except HyperParallelError as error:
        return str(error)
    exact = full.dtype == moved.dtype == dtype and torch.equal(full, whole)
    return "exact" if exact and tuple(full.shape) == shape else "wrong"


def _made(
    size: int, dtype: torch.dtype, shape: tuple[int, ...], src: Placement
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Make every rank's part and the whole value; even values, so that averages are exact."""
    count = torch.Size(shape).numel()
    parts = [(torch.arange(count) * (rank + 1) % 3 * size).reshape(shape) for rank in range(size)]
    if dtype.is_complex:
        parts = [part + (part + size) * 1j for part in parts]
    locals_ = [part.to(dtype) for part in parts]
    if isinstance(src, Partial):
        return locals_, _reduced(locals_, src.reduce_op)
    if src.cut_dim is None:
        return [locals_[0]] * size, locals_[0]
    chunks = list(locals_[1].chunk(size, src.cut_dim))
    empty = locals_[1].narrow(src.cut_dim, 0, 0)
    return chunks + [empty] * (size - len(chunks)), locals_[1]


def _reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in a dtype that is wide enough; a sum of bools is "any", a product is "all"."""
    dtype, stacked = parts[0].dtype, torch.stack(parts)
    if dtype == torch.bool:
        return stacked.all(0) if op in ("product", "min") else stacked.any(0)
    wide = stacked.to(torch.complex128 if dtype.is_complex else torch.float64)
    if op in ("max", "min"):
        wide = wide if not dtype.is_complex else wide.real
        return (wide.amax(0) if op == "max" else wide.amin(0)).to(dtype)
    result = {"sum": wide.sum, "avg": wide.mean, "product": wide.prod}[op](0)
    return result.to(dtype)
