# SPDX-License-Identifier: Apache-2.0
"""plan: one step where one will do, none where nothing changes, never dearer than need be."""

import itertools
import math

import numpy as np
import pytest

from hyper_parallel.core import AbstractMesh, Layout, Partial, Replicate, Shard, plan
from hyper_parallel.core.collective import COMMUNICATING
from hyper_parallel.core.placement import REDUCE_OPS
from hyper_parallel.errors import LayoutError, PlanError
from support import oracle

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SUM, AVG, MAX = Partial("sum"), Partial("avg"), Partial("max")
LINE = AbstractMesh("cpu", (4,), mesh_dim_names=("tp",))
GRID = AbstractMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def kinds(mesh, src, dst, shape=(8, 8)):
    return [step.kind for step in plan(Layout(mesh, src, shape), Layout(mesh, dst, shape))]


@pytest.mark.parametrize("shape", [(8, 8), (5, 3), (512, 4096), (0, 3)], ids=str)
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
    for placement in (R, S0, S1, Shard(1, block=2), *map(Partial, REDUCE_OPS)):
        assert kinds(LINE, (placement,), (placement,)) == []


def test_plan_is_empty_for_blocks_that_cut_alike():
    assert kinds(LINE, (S0,), (Shard(0, block=2),), (8, 8)) == []
    assert kinds(LINE, (S0,), (Shard(0, block=2),), (6, 8)) == []
    assert kinds(LINE, (S0,), (Shard(0, block=3),), (6, 8)) == ["all_gather", "slice"]
    assert kinds(GRID, (Shard(0, block=2), S0), (S0, Shard(0, block=2)), (8,)) == []
    assert kinds(GRID, (Shard(0, block=3), S0), (S0, S0), (9,)) != []


def test_plan_passes_by_a_layout_that_a_block_forbids():
    """(S(0), S(0, block=2)) cannot exist here: 3 rows are no whole number of blocks."""
    pieces = kinds(GRID, (S0, R), (R, Shard(0, block=2)), (6,))
    assert pieces == ["all_gather", "slice"]


def test_plan_takes_no_step_on_an_axis_of_one_rank():
    every = (R, S0, S1, *map(Partial, REDUCE_OPS))
    one = AbstractMesh("cpu", (1,))
    assert all(kinds(one, (a,), (b,)) == [] for a, b in itertools.product(every, repeat=2))
    thin = AbstractMesh("cpu", (2, 1))
    assert kinds(thin, (S0, S0), (R, S0)) == ["all_gather"]
    assert kinds(thin, (S0, S0), (S1, SUM)) == ["all_to_all"]


def test_plan_changes_one_axis_in_one_step_when_it_is_innermost():
    assert kinds(GRID, (R, S0), (S0, S0)) != ["slice"]  # another order of cuts
    assert kinds(GRID, (S0, R), (S0, S0)) == ["slice"]
    assert kinds(GRID, (S0, S0), (S0, R)) == ["all_gather"]
    assert kinds(GRID, (S0, SUM), (S0, S0)) == ["reduce_scatter"]
    assert kinds(GRID, (S0, S1), (S0, R)) == ["all_gather"]
    assert kinds(GRID, (S0, S0), (S0, S1)) == ["all_to_all"]
    assert kinds(GRID, (S0, S1), (SUM, S1)) == ["fill"]


def test_plan_reduces_before_it_gathers_and_cuts_before_it_reduces():
    big = (4096, 4096)
    assert kinds(GRID, (S0, SUM), (R, R), big) == ["all_reduce", "all_gather"]
    assert kinds(GRID, (R, SUM), (S0, R), big) == ["slice", "all_reduce"]
    assert kinds(GRID, (SUM, SUM), (S0, S0), big) == ["reduce_scatter", "reduce_scatter"]
    assert kinds(GRID, (SUM, R), (S0, S1), big) == ["slice", "reduce_scatter"]


def price(src, dst, kind):
    """What the busiest rank receives, in elements; a launch costs 4096, a local pass 1."""
    if kind not in COMMUNICATING:
        return 1.0
    pairs = zip(src.placements, dst.placements, strict=True)
    (axis,) = [i for i, (a, b) in enumerate(pairs) if a != b]
    grid = np.array(src.mesh.ranks).reshape(src.mesh.shape)
    sizes = [
        max(math.prod(oracle.local_shape(grid, at.placements, at.shape, r)) for r in at.mesh.ranks)
        for at in (src, dst)
    ]
    n = grid.shape[axis]
    whole = sizes[1] if kind == "all_gather" else sizes[0]
    return 4096.0 + (2 if kind == "all_reduce" else 1) * whole * (n - 1) / n


def cost(src, dst):
    return sum(price(step.src, step.dst, step.kind) for step in plan(src, dst))


@pytest.mark.parametrize("shape", [(8, 8), (4096, 512), (7, 3)], ids=str)
def test_plan_is_never_dearer_than_a_way_over_its_own_choices(shape):
    mesh = AbstractMesh("cpu", (2, 4))
    layouts = [
        Layout(mesh, placements, shape)
        for placements in itertools.product((R, S0, S1, SUM), repeat=2)
    ]
    costs = {pair: cost(*pair) for pair in itertools.product(layouts, repeat=2)}
    for src, dst in itertools.product(layouts, repeat=2):
        choices = zip(src.placements, dst.placements, (R, R), strict=True)
        for via in itertools.product(*choices):
            middle = src.with_placements(via)
            assert costs[src, dst] <= costs[src, middle] + costs[middle, dst] + 1e-6, middle


def test_plan_is_cached_and_prints():
    src, dst = Layout(GRID, (SUM, S1), (8, 8)), Layout(GRID, (R, R), (8, 8))
    found = plan(src, dst)
    assert plan(Layout(GRID, (SUM, S1), (8, 8)), dst) is found
    assert str(found) == "all_reduce[dp: P(sum) -> R]\nall_gather[tp: S(1) -> R]"
    assert found.communicates and len(found) == 2
    assert str(plan(src, src)) == "(nothing to do)" and not plan(src, src).communicates
    assert not plan(dst, src.cotangent).communicates


def test_plan_refuses_another_shape():
    with pytest.raises(
        LayoutError,
        match=r"plan: src and dst must have one global shape, but got src=\(8,\), dst=\(4, 2\)",
    ):
        plan(Layout(LINE, (R,), (8,)), Layout(LINE, (R,), (4, 2)))


def test_plan_refuses_another_mesh():
    other = AbstractMesh("cpu", (4,), ranks=(3, 2, 1, 0), mesh_dim_names=("tp",))
    with pytest.raises(
        PlanError,
        match=r"plan: src and dst must be on one mesh, but got src=AbstractMesh\('cpu', tp=4\), "
        r"dst=.*ranks=\[3, 2, 1, 0\]\). Moving a tensor to another mesh is not supported yet; "
        r"gather it with full_tensor\(\) and distribute it again",
    ):
        plan(Layout(LINE, (S0,), (8,)), Layout(other, (S0,), (8,)))
