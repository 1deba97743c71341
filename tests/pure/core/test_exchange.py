# SPDX-License-Identifier: Apache-2.0
"""Plans and exchanges as facts: who sends what, how much, and that nothing but layouts matters."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hyper_parallel.core import (
    AbstractMesh,
    Layout,
    Packed,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    plan,
)
from hyper_parallel.core.collective import Step
from hyper_parallel.core.cost import LinkModel
from hyper_parallel.core.exchange import group_ranks, region_shape, transfers
from hyper_parallel.core.search import cheapest_way
from hyper_parallel.errors import LayoutError
from support import oracle

R, S0, S1 = Replicate(), Shard(0), Shard(1)
MODELS = [LinkModel(), LinkModel(launch=1e-9), LinkModel(launch=1.0)]


@st.composite
def layouts(draw, shape, with_partial=True):
    """Draw a legal layout of a shape on a mesh of up to 16 ranks in any order."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    assume(math.prod(sizes) <= 16)
    mesh = AbstractMesh("cpu", sizes, ranks=draw(st.permutations(range(math.prod(sizes)))))
    return draw(legal(mesh, shape, with_partial))


@st.composite
def legal(draw, mesh, shape, with_partial=True):
    """Draw a legal layout on a mesh."""
    options = [Replicate(), *([Partial()] if with_partial else [])]
    for dim, size in enumerate(shape):
        options += [Shard(dim), Shard(dim), StridedShard(dim, 2)]
        options.append(Packed(dim, (size // 2, size - size // 2)))
    placements = tuple(draw(st.sampled_from(options)) for _ in mesh.shape)
    try:
        return Layout(mesh, placements, shape, tuple(draw(st.permutations(range(mesh.ndim)))))
    except LayoutError:
        assume(False)


SHAPE = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def pairs(draw, with_partial=True):
    """Draw two legal layouts of one shape on one mesh."""
    src = draw(layouts(draw(SHAPE), with_partial))
    return src, draw(legal(src.mesh, src.shape, with_partial))


@st.composite
def pairs_on_two_meshes(draw):
    """Draw two legal layouts of one shape with nothing pending, each on a mesh of its own."""
    src = draw(layouts(draw(SHAPE), with_partial=False))
    dst = draw(layouts(src.shape, with_partial=False))
    shift = draw(st.integers(0, src.mesh.size()))
    moved = AbstractMesh("cpu", dst.mesh.shape, ranks=[rank + shift for rank in dst.mesh.ranks])
    return src, Layout(moved, dst.placements, dst.shape, dst.order)


def indices(layout, rank):
    """The flat indices of the global tensor that a rank holds."""
    held = [
        [i for start, stop in own for i in range(start, stop)] for own in layout.intervals(rank)
    ]
    return set(oracle.take(np.arange(math.prod(layout.shape)).reshape(layout.shape), held).flat)


def received(step, rank):
    """How many elements a rank needs in a step that it cannot take from itself."""
    if step.kind == "all_to_all":
        group = group_ranks(step, rank)
        table = transfers(step, rank).receive
        parts = [math.prod(region_shape(part)) for part in table]
        return sum(n for other, n in zip(group, parts, strict=True) if other != rank)
    return len(indices(step.dst, rank) - indices(step.src, rank))


@given(pairs(), st.sampled_from(MODELS))
def test_what_one_rank_sends_is_what_the_other_expects(pair, model):
    for step in plan(*pair, model=model):
        if step.kind != "all_to_all":
            continue
        check_tables(step)


def check_tables(step):
    """Everyone in the step has a table; what one sends the other expects; each part comes once."""
    members = {*step.src.mesh.ranks, *step.dst.mesh.ranks}
    tables = {rank: transfers(step, rank) for rank in members}
    for rank, table in tables.items():
        group = group_ranks(step, rank)
        assert len(table.send) == len(table.receive) == len(group)
        inside = rank in step.dst.mesh.ranks
        covered = np.zeros(
            (step.dst.local_shape(rank) or (1,)) if inside else (0,) * max(len(step.dst.shape), 1),
            int,
        )
        for other, part in zip(group, table.receive, strict=True):
            sent = tables[other].send[group_ranks(step, other).index(rank)]
            assert region_shape(sent) == region_shape(part)
            held = [[i for start, stop in runs for i in range(start, stop)] for runs in part]
            covered[np.ix_(*held)] += 1
        assert (covered == 1).all()


@given(pairs_on_two_meshes())
def test_what_one_mesh_sends_is_what_the_other_expects(pair):
    for step in plan(*pair):
        if step.kind == "exchange":
            check_tables(step)


EVEN = [((4,), (S0,)), ((4,), (R,)), ((2, 4), (R, S0)), ((2, 4), (S1, R)), ((2, 2), (S0, S1))]


@pytest.mark.parametrize("shift", [0, 2, 8])
@pytest.mark.parametrize("src, dst", list(itertools.product(EVEN, repeat=2)), ids=str)
def test_replicas_share_what_they_send_to_another_mesh(src, dst, shift):
    """No rank sends more than its share of what the ranks of the next mesh have not got."""
    ends = [
        Layout(
            AbstractMesh("cpu", sizes, ranks=range(first, first + math.prod(sizes))), ps, (32, 32)
        )
        for (sizes, ps), first in ((src, 0), (dst, shift))
    ]
    step = Step("exchange", tuple(range(len(dst[0]))), *ends)
    lacking = sum(
        len(indices(ends[1], rank))
        - (
            len(indices(ends[1], rank) & indices(ends[0], rank))
            if rank in ends[0].mesh.ranks
            else 0
        )
        for rank in ends[1].mesh.ranks
    )
    sent = {}
    for rank in ends[0].mesh.ranks:
        parts = zip(group_ranks(step, rank), transfers(step, rank).send, strict=True)
        sent[rank] = sum(math.prod(region_shape(part)) for other, part in parts if other != rank)
    assert sum(sent.values()) == lacking
    if shift == 8:
        assert max(sent.values()) <= max(lacking // len(sent), math.prod(ends[0].largest_shape))


@given(pairs(with_partial=False), st.sampled_from(MODELS))
def test_a_plan_receives_at_least_what_is_needed_and_not_held(pair, model):
    src, dst = pair
    steps = plan(src, dst, model=model)
    for rank in src.mesh.ranks:
        needed = len(indices(dst, rank) - indices(src, rank))
        assert sum(received(step, rank) for step in steps) >= needed
        if [step.kind for step in steps] == ["all_to_all"]:
            assert received(steps.steps[0], rank) == needed


@given(pairs(), st.sampled_from(MODELS))
def test_a_plan_does_not_depend_on_ranks_names_or_history(pair, model):
    src, dst = pair

    def facts(a, b):
        steps = plan(a, b, model=model)
        moves = [(step.kind, step.axes, step.src.chains, step.dst.chains) for step in steps]
        return moves, steps.seconds

    plain = AbstractMesh("npu", src.mesh.shape, mesh_dim_names=["x", "y", "z"][: src.mesh.ndim])
    renamed = [Layout(plain, at.placements, at.shape, at.order) for at in pair]
    expected = facts(src, dst)
    assert facts(*renamed) == expected
    cheapest_way.cache_clear()
    src.mesh.plans.clear()
    facts(dst, src)
    assert facts(src, dst) == expected


@given(pairs(), st.sampled_from(MODELS))
def test_a_plan_never_takes_longer_than_by_gathering_all_or_one_exchange(pair, model):
    src, dst = pair
    whole = src.with_placements([Replicate()] * src.mesh.ndim)
    direct = plan(src, whole, model=model).seconds + plan(whole, dst, model=model).seconds
    stays = [p for p, q in zip(src.placements, dst.placements, strict=True) if p == q]
    if not any(p.is_partial() for p in stays):
        assert plan(src, dst, model=model).seconds <= direct + 1e-11
    if not src.has_partial and not dst.has_partial and plan(src, dst, model=model).communicates:
        axes = [axis for axis, n in enumerate(src.mesh.shape) if n > 1]
        size = 4 * math.prod(dst.largest_shape) * src.mesh.size()  # every rank sends all it has
        once = model.seconds(src.mesh.shape, axes, size=size)
        assert plan(src, dst, model=model).seconds <= once + 1e-11


@pytest.mark.parametrize("shape", [(8, 8), (64, 24)], ids=str)
@pytest.mark.parametrize("sizes", [(4,), (2, 4), (2, 2, 2)], ids=str)
def test_one_exchange_moves_the_least_between_all_even_layouts(sizes, shape):
    """With dear launches every move is one step, and it receives the lower bound."""
    mesh, model = AbstractMesh("cpu", sizes), LinkModel(launch=1.0)
    options = [Replicate(), Shard(0), Shard(1)]
    layouts = [Layout(mesh, ps, shape) for ps in itertools.product(options, repeat=mesh.ndim)]
    for src, dst in itertools.permutations(layouts, 2):
        steps = plan(src, dst, model=model).steps
        assert len([step for step in steps if step.communicates]) <= 1
        if any(step.kind == "all_to_all" for step in steps):
            assert len(steps) == 1
