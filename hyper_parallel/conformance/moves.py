# SPDX-License-Identifier: Apache-2.0
"""Checks of redistribute: between all placements of one axis, and between some of two axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from hyper_parallel.conformance.here import EMULATED, PASS, Check, Here, Numbers, with_others
from hyper_parallel.core import Layout, Partial, Placement, Replicate, Shard, StridedShard, plan
from hyper_parallel.core.mesh import nest_ranks
from hyper_parallel.runtime import DeviceMesh, execute

__all__ = ["held_by", "move_checks"]

_ONE = (
    *(Replicate(), Shard(0), Shard(1), Shard(0, 2), StridedShard(0, 2)),
    *(Partial("sum"), Partial("avg"), Partial("max"), Partial("product")),
)
_TWO = (
    ((Shard(0), Shard(0)), (Replicate(), Shard(1))),
    ((Partial("sum"), Shard(0)), (Shard(0), Replicate())),
    ((Shard(1), Partial("sum")), (Shard(1), Shard(0))),
    ((Partial("sum"), Partial("sum")), (Replicate(), Replicate())),
    ((Replicate(), Partial("max")), (Shard(0), Shard(0))),
    ((StridedShard(0, 2), Shard(0)), (Shard(1), Replicate())),
)


_BETWEEN = (
    *((Shard(0), Shard(0)), (Replicate(), Shard(1)), (Partial("sum"), Shard(0))),
    *((Shard(1), Replicate()), (Shard(0), Partial("sum"))),
)


def move_checks() -> Iterator[Check]:
    """List the checks."""
    for src, dst in itertools.product(_ONE, _ONE):
        run = partial(_redistribute, (src,), (dst,))
        how = partial(_how, (src, dst))
        yield Check("redistribute", f"{src} -> {dst}", run, how, needs_rank=False)
    for srcs, dsts in _TWO:
        name = f"{', '.join(map(str, srcs))} -> {', '.join(map(str, dsts))}"
        run = partial(_redistribute, srcs, dsts)
        how = partial(_how, (*srcs, *dsts))
        yield Check("redistribute, 2 axes", name, run, how, needs_rank=False)

    for src, dst in _BETWEEN:
        run = partial(_between, src, dst)
        yield Check(
            "redistribute, other ranks", f"{src} -> {dst}", run, with_others, needs_rank=False
        )


def _how(placements: Sequence[Placement], here: Here) -> str:
    """Say whether a move, uneven and empty shards included, is as the backend has it."""
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    ways = {here.reduction(op, here.best_dtype) for op in ops}
    pads = not here.capabilities.uneven_gather and any(p != placements[0] for p in placements)
    return EMULATED if pads or EMULATED in ways else PASS


def held_by(whole: Numbers, layout: Layout, rank: int) -> Numbers:
    """Cut what a rank holds out of a whole array; pending reductions get unlike parts."""
    part = whole
    for dim, intervals in enumerate(layout.intervals(rank)):
        index = [i for start, stop in intervals for i in range(start, stop)]
        part = part.take(index, dim)
    coordinate = layout.mesh.coordinate(rank)
    assert coordinate is not None
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            size = layout.mesh.shape[axis]
            part = _pending(part, placement.reduce_op, coordinate[axis], size)
    return part


def _pending(part: Numbers, op: str, index: int, size: int) -> Numbers:
    """Give one of `size` unlike contributions that reduce to `part`."""
    last = index == size - 1
    if op == "max":
        return part if last else part - 1 - index
    if op == "product":
        return part if last else np.ones_like(part)
    noise = index + 1 if not last else -size * (size - 1) / 2
    if op == "avg":
        return part + noise
    return (part if last else 0 * part) + noise


def _redistribute(srcs: tuple[Placement, ...], dsts: tuple[Placement, ...], here: Here) -> None:
    mesh = here.mesh if len(srcs) == 1 else here.grid
    n = here.world_size
    for shape in ((2 * n, 4), (2 * n + 2, 3), (2, 2), (0, 3)):
        src, dst = Layout(mesh, srcs, shape), Layout(mesh, dsts, shape)
        whole = 1 + here.data(n, shape, "float64")
        move = _move_all if here.capabilities.all_ranks else _move
        move(here, mesh, src, dst, whole)


def _between(src_place: Placement, dst_place: Placement, here: Here) -> None:
    """Move from the first rank to all others, and from all to the others."""
    n = here.world_size
    for ranks in ([0], list(range(n))):
        meshes = [DeviceMesh(here.device_type, each) for each in (ranks, list(range(1, n)))]
        shape = (2 * n + 1, 3)
        src = Layout(meshes[0], (src_place,), shape)
        dst = Layout(meshes[1], (dst_place,), shape)
        move = _move_all if here.capabilities.all_ranks else _move
        move(here, meshes[1], src, dst, 1 + here.data(n, shape, "float64"))


def _move_all(here: Here, mesh: DeviceMesh, src: Layout, dst: Layout, whole: Numbers) -> None:
    """The same where one process holds the arrays of all ranks."""
    dtype, backend = here.best_dtype, cast(Any, here.backend)

    def made(rank: int) -> Any:
        return here.arrays.make(held_by(whole, src, rank), dtype)

    given = nest_ranks([made(rank) for rank in src.mesh.ranks], src.mesh.shape)
    got = backend.redistribute(given, src, dst)
    if dst.has_partial:
        got, dst = backend.redistribute(got, dst, dst.replicated), dst.replicated
    for rank in mesh.ranks:
        mine = got
        for index in mesh.coordinate(rank) or ():
            mine = mine[index]
        here.same(mine, held_by(whole, dst, rank), dtype, f"{src} -> {dst}", rtol=1e-6)


def _move(here: Here, mesh: DeviceMesh, src: Layout, dst: Layout, whole: Numbers) -> None:
    """Run the plan on this rank, which may be outside one of the meshes."""
    rank, dtype = mesh.get_rank(), here.best_dtype

    def made(layout: Layout) -> Numbers:
        outside = layout.mesh.coordinate(rank) is None
        return np.empty(0) if outside else held_by(whole, layout, rank)

    given, what = here.arrays.make(made(src), dtype), f"{src} -> {dst}"
    got = execute(plan(src, dst), given, mesh)
    here.same(given, made(src), dtype, f"{what}: what was given")
    if mesh.get_coordinate() is None:
        return
    assert tuple(got.shape) == dst.local_shape(rank), f"{what}: {tuple(got.shape)}"
    if dst.has_partial:  # the contributions are free, what they reduce to is not
        got = execute(plan(dst, dst.replicated), got, mesh)
        dst = dst.replicated
    here.same(got, made(dst), dtype, what, rtol=1e-6)
