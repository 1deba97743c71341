# SPDX-License-Identifier: Apache-2.0
"""plan: one step where one will do, none where nothing changes, never dearer than need be."""

import itertools
import math

import pytest

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
from hyper_parallel.core.cost import Link, LinkModel
from hyper_parallel.core.exchange import region_shape, transfers
from hyper_parallel.core.placement import REDUCE_OPS
from hyper_parallel.errors import LayoutError

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SUM, AVG, MAX = Partial("sum"), Partial("avg"), Partial("max")
LINE = AbstractMesh("cpu", (4,), mesh_dim_names=("tp",))
GRID = AbstractMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def kinds(mesh, src, dst, shape=(8, 8)):
    return [step.kind for step in plan(Layout(mesh, src, shape), Layout(mesh, dst, shape))]


@pytest.mark.parametrize("shape", [(8, 8), (5, 3), (512, 4096)], ids=str)
def test_plan_on_one_axis_has_the_documented_steps(shape):
    def line(src, dst):
        return kinds(LINE, (src,), (dst,), shape)

    assert line(R, S0) == ["slice"]
    assert line(S0, R) == ["all_gather"]
    assert line(S0, S1) == ["all_to_all"]
    for op, dim in itertools.product(REDUCE_OPS, (0, 1)):
        assert line(Partial(op), R) == ["all_reduce"]
        assert line(Partial(op), Shard(dim)) == ["reduce_scatter"]
        assert line(R, Partial(op)) == line(Shard(dim), Partial(op)) == ["fill"]
    for a, b in itertools.permutations(REDUCE_OPS, 2):
        steps = ["scale"] if {a, b} == {"sum", "avg"} else ["all_reduce", "fill"]
        assert line(Partial(a), Partial(b)) == steps


@pytest.mark.parametrize(
    "src, dst, backward",
    [
        (R, R, []),
        (R, S0, ["all_gather"]),
        (S0, R, ["slice"]),
        (S0, S1, ["all_to_all"]),
        (SUM, R, []),
        (SUM, S0, ["all_gather"]),
        (SUM, SUM, []),
        (R, SUM, []),
        (S0, SUM, ["slice"]),
        (AVG, S0, ["all_gather"]),
        (MAX, R, []),
    ],
    ids=str,
)
def test_plan_of_cotangents_is_the_gradient_table(src, dst, backward):
    given, wanted = (Layout(LINE, (p,), (8, 8)).cotangent for p in (dst, src))
    assert [step.kind for step in plan(given, wanted)] == backward


def test_plan_is_empty_where_nothing_changes():
    packed = (StridedShard(1, 2), Packed(0, (4, 4)), Packed(1, (2, 6), blocks=(1, 3)))
    for placement in (R, S0, S1, Shard(1, block=2), *packed, *map(Partial, REDUCE_OPS)):
        assert kinds(LINE, (placement,), (placement,)) == []


def test_plan_is_empty_between_layouts_of_one_cut():
    assert kinds(LINE, (S0,), (Shard(0, block=2),), (8, 8)) == []
    assert kinds(LINE, (S0,), (Shard(0, block=2),), (6, 8)) == []
    assert kinds(GRID, (Shard(0, block=2), S0), (S0, Shard(0, block=2)), (8,)) == []
    assert kinds(LINE, (StridedShard(0, 2),), (Packed(0, (4, 4)),)) == []
    assert kinds(LINE, (S0,), (R,), (0, 3)) == []
    assert kinds(LINE, (S1,), (R,), (0, 3)) == ["all_gather"]


def test_plan_between_other_pieces_of_one_dim_is_one_exchange():
    assert kinds(LINE, (S0,), (Shard(0, block=3),), (6, 8)) == ["all_to_all"]
    assert kinds(GRID, (Shard(0, block=3), S0), (S0, S0), (9,)) == ["all_to_all"]
    assert kinds(GRID, (S0, R), (R, Shard(0, block=2)), (6,)) == ["all_to_all"]
    assert kinds(LINE, (Packed(0, (4, 4)),), (S0,)) == ["all_to_all"]
    assert kinds(LINE, (SUM,), (Packed(0, (4, 2, 2)),)) == ["reduce_scatter"]
    assert kinds(LINE, (Packed(0, (4, 2, 2)),), (R,)) == ["all_gather"]


def test_plan_to_a_strided_shard_is_one_step():
    strided = (StridedShard(0, 2), S0)  # axis 1 outside axis 0
    assert kinds(GRID, strided, (S0, S0)) == ["all_to_all"]
    assert kinds(GRID, (R, S0), strided) == ["slice"]
    assert kinds(GRID, strided, (R, S0)) == ["all_gather"]
    assert kinds(GRID, (SUM, S0), strided) == ["reduce_scatter"]
    ordered = Layout(GRID, (S0, S0), (8, 8), (1, 0))
    assert len(plan(ordered, Layout(GRID, strided, (8, 8)))) == 0


def test_plan_takes_no_step_on_an_axis_of_one_rank():
    every = (R, S0, S1, *map(Partial, REDUCE_OPS))
    one = AbstractMesh("cpu", (1,))
    assert all(kinds(one, (a,), (b,)) == [] for a, b in itertools.product(every, repeat=2))
    thin = AbstractMesh("cpu", (2, 1))
    assert kinds(thin, (S0, S0), (R, S0)) == ["all_gather"]
    assert kinds(thin, (S0, S0), (S1, SUM)) == ["all_to_all"]
    assert kinds(AbstractMesh("cpu", (2, 1, 2)), (SUM, S0, SUM), (R, R, R)) == ["all_reduce"]


def test_plan_changes_one_axis_in_one_step_when_it_is_innermost():
    assert kinds(GRID, (R, S0), (S0, S0)) == ["all_to_all"]  # another order of cuts
    assert kinds(GRID, (S0, R), (S0, S0)) == ["slice"]
    assert kinds(GRID, (S0, S0), (S0, R)) == ["all_gather"]
    assert kinds(GRID, (S0, SUM), (S0, S0)) == ["reduce_scatter"]
    assert kinds(GRID, (S0, S1), (S0, R)) == ["all_gather"]
    assert kinds(GRID, (S0, S0), (S0, S1)) == ["all_to_all"]
    assert kinds(GRID, (S0, S1), (SUM, S1)) == ["fill"]


UNIFORM = LinkModel(links=(Link(1e-6, 1e11), Link(1e-6, 1e11)))


@pytest.mark.parametrize(
    "src, dst, small, big",
    [
        ((S0, SUM), (R, R), "all_reduce1 all_gather0", "reduce_scatter1 all_gather0 all_gather1"),
        ((R, SUM), (S0, R), "slice0 all_reduce1", "slice0 all_reduce1"),
        ((SUM, SUM), (R, R), "all_reduce01", "reduce_scatter1 all_reduce0 all_gather1"),
        ((SUM, R), (R, R), "all_reduce0", "slice1 all_reduce0 all_gather1"),
        ((SUM, R), (S0, S0), "slice1 reduce_scatter0", "slice1 reduce_scatter0"),
        ((SUM, R), (S0, S1), "slice1 reduce_scatter0", "slice1 reduce_scatter0"),
        ((S0, S0), (R, R), "all_gather01", "all_gather0 all_gather1"),
        ((SUM, SUM), (S0, S1), "reduce_scatter01", "reduce_scatter1 reduce_scatter0"),
        ((S0, S1), (S1, S0), "all_to_all01", "all_to_all1 all_to_all0 all_to_all1"),
        ((R, S0), (S0, S0), "all_to_all1", "all_to_all1"),
        ((S0, R), (R, S0), "all_to_all0", "all_to_all0 all_to_all1"),
    ],
    ids=str,
)
def test_plan_on_two_axes_fuses_small_moves_and_spares_the_slow_axis(src, dst, small, big):
    mesh = AbstractMesh("cpu", (4, 4))

    def words(shape):
        steps = plan(Layout(mesh, src, shape), Layout(mesh, dst, shape))
        return " ".join(step.kind + "".join(map(str, step.axes)) for step in steps)

    assert words((16, 16)) == small
    assert words((8192, 8192)) == big


def test_plan_fuses_all_axes_of_equal_links():
    mesh = AbstractMesh("cpu", (4, 4))
    src, dst = (Layout(mesh, (p, p), (8192, 8192)) for p in (SUM, R))
    steps = plan(src, dst, model=UNIFORM).steps
    assert [(step.kind, step.axes) for step in steps] == [("all_reduce", (0, 1))]
    assert plan(src, dst, itemsize=2, model=UNIFORM).seconds < plan(src, dst, model=UNIFORM).seconds


def passes_by(src, dst, via):
    """Whether a plan may pass by a layout: what is pending there is so, alike, at an end."""
    for a, b, c in zip(src, dst, via, strict=True):
        if a.is_partial() and a == b != c:
            return False
        if c.is_partial() and c not in (a, b):
            return False
        if (
            b.is_partial()
            and a != b
            and c not in (a, b)
            and (c.cut_dim is not None or a in (S0, S1))
        ):
            return False
    return True


@pytest.mark.parametrize("mesh", [(2, 4), (3, 2)], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (4096, 512), (7, 3), (4095, 513)], ids=str)
def test_plan_is_never_dearer_than_a_way_over_any_layout(mesh, shape):
    mesh = AbstractMesh("cpu", mesh)
    layouts = [Layout(mesh, pair, shape) for pair in itertools.product((R, S0, S1, SUM), repeat=2)]
    layouts += [Layout(mesh, (p, p), shape, (1, 0)) for p in (S0, S1)]
    layouts += [Layout(mesh, (p, StridedShard(0, mesh.shape[0])), shape) for p in (R, SUM)]
    costs = {pair: plan(*pair).seconds for pair in itertools.product(layouts, repeat=2)}
    for src, dst, via in itertools.product(layouts, repeat=3):
        if passes_by(src.placements, dst.placements, via.placements):
            assert costs[src, dst] <= costs[src, via] + costs[via, dst] + 1e-11, (src, dst, via)


def test_plan_moves_pieces_in_a_dim_that_neither_end_cuts():
    mesh, shape = AbstractMesh("cpu", (2, 2, 2)), (512, 256, 512)
    src = Layout(mesh, (Shard(0), Partial(), Shard(0)), shape, (1, 2, 0))
    found = plan(src, Layout(mesh, (Shard(2), Replicate(), Shard(2)), shape))
    kinds = ["reduce_scatter", "all_to_all", "all_to_all"]
    assert [step.kind for step in found.steps] == kinds
    assert [step.axes for step in found.steps] == [(1,), (0,), (1, 2)]
    assert all(step.dst.placements[1] == Shard(1) for step in found.steps[:2])


def test_plan_is_cached_and_its_steps_are_written_out():
    src, dst = Layout(GRID, (SUM, S1), (8, 8)), Layout(GRID, (R, R), (8, 8))
    found = plan(src, dst)
    assert plan(Layout(GRID, (SUM, S1), (8, 8)), dst) is found
    assert list(map(repr, found)) == ["all_reduce[dp: P(sum) -> R]", "all_gather[tp: S(1) -> R]"]
    assert found.communicates and len(found) == 2
    assert len(plan(src, src)) == 0 and not plan(src, src).communicates
    assert not plan(dst, src.cotangent).communicates


def test_plan_refuses_another_shape():
    with pytest.raises(
        LayoutError,
        match=r"plan: src and dst must have one global shape, but got src=\(8,\), dst=\(4, 2\)",
    ):
        plan(Layout(LINE, (R,), (8,)), Layout(LINE, (R,), (4, 2)))


def test_plan_to_another_mesh_of_the_same_ranks():
    other = AbstractMesh("cpu", (4,), ranks=(3, 1, 2, 0), mesh_dim_names=("all",))

    def between(src, dst):
        return [s.kind for s in plan(Layout(GRID, src, (8, 8)), Layout(other, dst, (8, 8)))]

    assert between((S0, S0), (S0,)) == ["exchange"]
    assert between((R, R), (R,)) == []
    assert between((R, R), (SUM,)) == ["fill"]
    assert between((SUM, S0), (SUM,)) == ["reduce_scatter", "exchange", "fill"]
    step = plan(Layout(GRID, (S0, R), (8, 8)), Layout(other, (S0,), (8, 8))).steps[0]
    assert repr(step) == "exchange[Layout([8, 8], S(0)@dp, R@tp) -> Layout([8, 8], S(0)@all)]"


def test_plan_to_another_mesh_of_other_ranks():
    pair, next_pair = (AbstractMesh("cpu", (2,), ranks=ranks) for ranks in ((0, 1), (2, 3)))

    def between(a, b, shape=(8, 8)):
        steps = plan(*(Layout(mesh, (p,), shape) for mesh, p in (a, b)))
        return [step.kind for step in steps]

    assert between((pair, S0), (next_pair, S0)) == ["exchange"]
    assert between((pair, S0), (next_pair, R)) == ["exchange"]
    assert between((pair, S0), (next_pair, R), (4096, 4096)) == ["exchange", "all_gather"]
    assert between((pair, R), (next_pair, R), (4096, 4096)) == ["exchange", "all_gather"]
    assert between((pair, SUM), (next_pair, S1)) == ["reduce_scatter", "exchange"]
    assert between((pair, S0), (next_pair, SUM)) == ["exchange", "fill"]
    assert between((LINE, R), (next_pair, S0)) == ["slice"]
    assert between((LINE, R), (next_pair, R)) == ["slice"]
    assert between((next_pair, R), (LINE, S0)) == ["exchange"]
    assert between((pair, SUM), (next_pair, R), ()) == ["all_reduce", "exchange"]


def test_plan_to_copies_crosses_the_slow_link_once():
    """Each rank of the next stage takes its piece, and the stage gathers."""
    stages = [AbstractMesh("cpu", (8,), ranks=range(i, i + 8)) for i in (0, 8)]
    src, dst = (Layout(mesh, (R,), (4096, 4096)) for mesh in stages)
    crossing, gather = plan(src, dst).steps
    assert (crossing.kind, gather.kind) == ("exchange", "all_gather")
    table = transfers(crossing, 3)
    sent = [math.prod(region_shape(part)) for part in table.send]
    assert sum(sent) == 4096 * 4096 // 8 and sent[8 + 3] == sum(sent)
