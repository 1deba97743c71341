# SPDX-License-Identifier: Apache-2.0
"""What a plain local tensor is declared to be, and whether all ranks declare alike."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from hyper_parallel.core import Layout, Placement
from hyper_parallel.core.placement import normalize
from hyper_parallel.dtensor.read import refuse_other_tensors, refuse_pending
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh

__all__ = ["layout_of_local"]

_WHERE = "DTensor.from_local"
_DTYPES = [value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)]
_CHUNK = 1 << 22


def layout_of_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int] | None,
    run_check: bool,
) -> Layout:
    """Give the layout in which `local` is this rank's part, checking that it is.

    Communicates:
        With `run_check`, what `_check_everywhere` says.

    Raises:
        LayoutError: the local shape does not fit, or an average of integers is asked for.
    """
    refuse_other_tensors(local, _WHERE)
    if shape is not None:
        if not isinstance(shape, Sequence) or not all(isinstance(size, int) for size in shape):
            must = "shape must be a sequence of ints"
            raise LayoutError(_WHERE, must, "Pass the global shape", shape=shape)
        shape = tuple(shape)
    is_inside = mesh.get_coordinate() is not None
    if run_check and is_inside:
        _check_everywhere(local, mesh, placements, shape)
    refuse_pending(local.dtype, placements, _WHERE)
    got = tuple(local.shape)
    if shape is None and not is_inside and got == (0,):
        must = "a rank that is not in the mesh must pass the global shape"
        raise LayoutError(_WHERE, must, "Pass shape=", shape=None, local_shape=got)
    whole = _even_shape(got, mesh, placements) if shape is None else shape
    layout = Layout.of(mesh, placements, whole)
    if is_inside:
        _refuse_misfit(layout, mesh.get_rank(), got)
    return layout


def _even_shape(
    local: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[int, ...]:
    """Give the global shape of which equal parts are cut."""
    sizes = list(local)
    for axis, placement in enumerate(normalize(placements, len(local), where=_WHERE)):
        if placement.cut_dim is not None:
            sizes[placement.cut_dim] *= mesh.shape[axis]
    return tuple(sizes)


def _refuse_misfit(layout: Layout, rank: int, got: tuple[int, ...]) -> None:
    """Refuse a local shape that is not the rank's."""
    expected = layout.local_shape(rank)
    if got != expected:
        raise LayoutError(
            _WHERE,
            f"the local shape on rank {rank} must be {expected} for {layout!r}",
            "Pass shape= with the global shape; shards must have torch.chunk's sizes",
            local_shape=got,
        )


def _check_everywhere(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...] | None,
) -> None:
    """Compare what all ranks of the mesh declare, so that all refuse alike.

    Communicates:
        Two exchanges of integers along each axis, whatever the ranks hold.

    Raises:
        LayoutError: a rank differs; the text is the same on every rank.
    """
    copies = [p.is_replicate() and n > 1 for p, n in zip(placements, mesh.shape, strict=True)]
    mine = {
        "placements (a digest)": _digest(repr(placements).encode()),
        "len(shape), or -1": -1 if shape is None else len(shape),
        "dtype": _DTYPES.index(local.dtype),
        "ndim": local.ndim,
    }
    fingerprint = _fingerprint(local) if any(copies) and not local.is_meta else 0
    every = _exchanged(mesh, [*mine.values(), fingerprint])
    for i, name in enumerate(mine):
        _refuse_difference(name, {rank: held[i] for rank, held in every.items()})
    shapes = _exchanged(mesh, (*local.shape, *(shape or ())))
    _refuse_difference("shape", {rank: held[local.ndim :] for rank, held in shapes.items()})
    got = {rank: held[: local.ndim] for rank, held in shapes.items()}
    # Without `shape` the parts count as even, so the first rank's says what all must be.
    first = got[mesh.ranks[0]]
    whole = _even_shape(first, mesh, placements) if shape is None else shape
    layout = Layout.of(mesh, placements, whole)
    for rank in mesh.ranks:
        _refuse_misfit(layout, rank, got[rank])
    _refuse_unequal_copies(mesh, copies, {rank: held[-1] for rank, held in every.items()})


def _exchanged(mesh: DeviceMesh, values: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Give every rank's values, of which all ranks have equally many."""
    held = tuple(values)
    for axis in reversed(range(mesh.ndim)):  # row-major, as the mesh lists its ranks
        if mesh.shape[axis] > 1:
            held = tuple(itertools.chain(*mesh.communicator(axis).all_gather_ints(held)))
    count = len(values)
    return {rank: held[i * count : (i + 1) * count] for i, rank in enumerate(mesh.ranks)}


def _refuse_difference(name: str, held: dict[int, Any]) -> None:
    """Refuse ranks that do not declare the same."""
    first, *others = held
    for rank in others:
        if held[rank] != held[first]:
            got, expected = held[rank], held[first]
            if name == "dtype":
                got, expected = _DTYPES[got], _DTYPES[expected]
            _refuse(f"{name} on rank {rank} must be as on rank {first}", got, expected)


def _refuse_unequal_copies(mesh: DeviceMesh, copies: list[bool], held: dict[int, int]) -> None:
    """Refuse values that differ along the axes that hold copies."""
    owners: dict[tuple[int, ...], int] = {}
    for rank in mesh.ranks:
        coordinate = mesh.coordinate(rank) or ()
        own = tuple(0 if copy else at for copy, at in zip(copies, coordinate, strict=True))
        owner = owners.setdefault(own, rank)
        if held[rank] != held[owner]:
            prints = [hex(held[at] % (1 << 64)) for at in (rank, owner)]
            _refuse(f"the values (a fingerprint) on rank {rank} must be rank {owner}'s", *prints)


def _refuse(must: str, got: object, expected: object) -> NoReturn:
    do = "Pass parts of one tensor; distribute_tensor makes them from the data of one rank"
    raise LayoutError(_WHERE, must, do, value=got, expected=expected)


def _fingerprint(local: torch.Tensor) -> int:
    """Give 64 bits that tell values apart; NaNs are alike, and so are both zeros."""
    flat = local.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    found = hashlib.blake2b(digest_size=8)
    for piece in flat.split(_CHUNK):
        values = piece.cpu()
        if values.is_floating_point():
            values = (values if values.itemsize >= 4 else values.float()) + 0.0
            values = values.masked_fill(values.isnan(), float("nan"))
        found.update(values.contiguous().view(torch.uint8).numpy().data)
    return int.from_bytes(found.digest(), "big", signed=True)


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
