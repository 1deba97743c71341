# SPDX-License-Identifier: Apache-2.0
"""What a plan moves and takes: its text, and its bytes against sets of indices."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core import (
    AbstractMesh,
    Estimate,
    Layout,
    Link,
    LinkModel,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    plan,
)
from hyper_parallel.core.estimate import bytes_text, seconds_text

GRID = AbstractMesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
LINE = AbstractMesh("cpu", (4,), mesh_dim_names=("tp",))
R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial()


def estimate(src, dst, **how):
    found = plan(src, dst, **how)
    return Estimate.of(src, dst, found.steps, itemsize=found.itemsize, model=found.model)


# ---------------------------------------------------------------------- text


def test_text_of_a_reduction_and_a_gather_on_two_axes():
    src, dst = (Layout(GRID, pair, (8192, 4096)) for pair in ((SUM, S0), (R, R)))
    assert str(plan(src, dst, itemsize=2)) == (
        "from Layout([8192, 4096], P(sum)@dp, S(0)@tp)\n"
        "to   Layout([8192, 4096], R@dp, R@tp)\n"
        "2 bytes an element\n"
        "\n"
        "step                         group          sent  received  estimate\n"
        "all_reduce[dp: P(sum) -> R]  dp: 2 ranks  16 MiB    16 MiB  686.1 us\n"
        "all_gather[tp: S(0) -> R]    tp: 4 ranks  48 MiB    48 MiB  263.7 us\n"
        "total                                     64 MiB    64 MiB  949.7 us\n"
        "\n"
        "least to receive: 64 MiB, which some rank lacks; this plan: 1.00 times that\n"
        "link model 'two-level': 10 us a launch; dp 5 us a hop, 25 GB/s; tp 1 us a hop, 200 GB/s\n"
        "Bytes are those of the busiest rank, seconds those of the model: nothing was measured."
    )


def test_text_of_uneven_pieces_under_a_model_of_ones_own():
    model = LinkModel(launch=1e-5, links=(Link(0.0, 1e6),), name="bench")
    src, dst = Layout(LINE, (S0,), (5, 3)), Layout(LINE, (S1,), (5, 3))
    assert str(plan(src, dst, model=model)) == (
        "from Layout([5, 3], S(0)@tp)\n"
        "to   Layout([5, 3], S(1)@tp)\n"
        "4 bytes an element\n"
        "\n"
        "step                          group        sent  received  estimate\n"
        "all_to_all[tp: S(0) -> S(1)]  tp: 4 ranks  16 B      16 B     26 us\n"
        "\n"
        "least to receive: 16 B, which some rank lacks; this plan: 1.00 times that\n"
        "link model 'bench': 10 us a launch; tp 0 us a hop, 0.001 GB/s\n"
        "Bytes are those of the busiest rank, seconds those of the model: nothing was measured."
    )


def test_text_of_a_local_step_and_of_none():
    whole, rows = Layout(LINE, (R,), (5, 3)), Layout(LINE, (S0,), (5, 3))
    assert str(plan(whole, rows)).splitlines()[4:] == [
        "step                  group  sent  received  estimate",
        "slice[tp: R -> S(0)]  local     -         -         -",
        "",
        "Every rank holds what it needs; nothing is sent.",
    ]
    assert str(plan(rows, rows)).splitlines()[4:] == ["(nothing to do)"]


def test_numbers_as_text():
    assert [bytes_text(n) for n in (0, 1, 1023, 1024, 1536, 3 * 2**30, 2**50)] == [
        "0 B", "1 B", "1023 B", "1 KiB", "1.5 KiB", "3 GiB", "1024 TiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0, 12.34e-6, 1e-3, 2.5)] == [
        "0 us",
        "12.3 us",
        "1 ms",
        "2.5 s",
    ]


# ---------------------------------------------------------------------- bytes

placements = st.sampled_from([R, S0, S1, StridedShard(0, 2), SUM, Partial("avg")])
grids = st.sampled_from([GRID, LINE, AbstractMesh("cpu", (3, 2)), AbstractMesh("cpu", (2, 2, 2))])


@st.composite
def moves(draw):
    mesh = draw(grids)
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    return [
        Layout(mesh, tuple(draw(placements) for _ in range(mesh.ndim)), shape) for _ in range(2)
    ]


def indices(layout, rank):
    """Give the indices that a rank holds, one by one."""
    ranges = [[i for run in dim for i in range(*run)] for dim in layout.intervals(rank)]
    return set(itertools.product(*ranges))


@given(moves())
def test_bytes_are_those_that_ranks_lack(ends):
    found = estimate(*ends, itemsize=1)
    for one in found.steps:
        step, held = one.step, {}
        for name, layout in (("before", one.step.src), ("after", one.step.dst)):
            held[name] = {rank: indices(layout, rank) for rank in layout.mesh.ranks}
        lacks = [len(held["after"][rank] - held["before"][rank]) for rank in held["after"]]
        gives = [len(held["before"][rank] - held["after"][rank]) for rank in held["after"]]
        if step.kind in ("all_gather", "all_to_all"):
            assert one.received == max(lacks)
            assert one.sent * len(lacks) >= sum(lacks)
        elif step.kind == "reduce_scatter":
            assert one.sent == one.received == max(gives)
        elif step.kind == "all_reduce":
            size = max(map(len, held["before"].values()))
            assert one.sent == one.received == 2 * (size - size // one.num_ranks)
        else:
            assert one.sent == one.received == one.seconds == 0
            assert one.group == "local"


@given(moves())
def test_no_plan_receives_less_than_what_ranks_lack(ends):
    src, dst = ends
    found = estimate(src, dst, itemsize=1)
    assert found.received >= found.needed
    if not (src.has_partial or dst.has_partial):
        lacks = [len(indices(dst, rank) - indices(src, rank)) for rank in dst.mesh.ranks]
        assert found.needed == max(lacks)
    if src.has_partial and not dst.has_partial and any(found.steps):
        assert found.needed > 0


@given(moves(), st.sampled_from([1, 2, 8]))
def test_seconds_are_those_of_the_search_where_cuts_are_even(ends, itemsize):
    src, dst = (
        Layout(end.mesh, end.placements, tuple(24 * size for size in end.shape)) for end in ends
    )
    found = estimate(src, dst, itemsize=itemsize)
    assert found.seconds == pytest.approx(plan(src, dst, itemsize=itemsize).seconds, abs=1e-11)
    assert found.sent == sum(one.sent for one in found.steps)


def test_a_pending_sum_that_begins_as_shares_has_no_bound():
    src, dst = (Layout(GRID, pair, (8, 8)) for pair in ((S0, S1), (SUM, R)))
    assert estimate(src, dst).needed == 0
    assert str(plan(src, dst)).splitlines()[-3].startswith("least to receive: 0 B, which some rank")


def test_a_pending_sum_that_begins_whole_needs_it_on_the_first_rank():
    src, dst = Layout(GRID, (R, S0), (8, 8)), Layout(GRID, (SUM, R), (8, 8))
    assert estimate(src, dst, itemsize=1).needed == 48


def test_an_empty_tensor_costs_nothing():
    src, dst = Layout(LINE, (SUM,), (0, 3)), Layout(LINE, (R,), (0, 3))
    found = estimate(src, dst)
    assert len(found.steps) == 1
    assert (found.sent, found.received, found.seconds, found.needed) == (0, 0, 0.0, 0)


def test_a_large_mesh_is_asked_at_its_ends():
    mesh = AbstractMesh("cpu", (16, 64), mesh_dim_names=("dp", "tp"))
    src, dst = (Layout(mesh, pair, (1024, 4096)) for pair in ((R, S0), (R, S1)))
    found = estimate(src, dst, itemsize=1)
    piece = math.prod((1024, 4096)) // 64
    assert found.received == found.sent == found.needed == piece - piece // 64


def test_between_meshes():
    turned = AbstractMesh("cpu", (4,), ranks=(3, 1, 2, 0), mesh_dim_names=("all",))
    found = estimate(Layout(LINE, (S0,), (8,)), Layout(turned, (S0,), (8,)), itemsize=1)
    (step,) = found.steps
    assert (step.group, step.received, found.needed) == ("both meshes: 4 ranks", 2, 2)
    pair = AbstractMesh("cpu", (2,), ranks=(5, 1))
    found = estimate(Layout(LINE, (S0,), (8,)), Layout(pair, (S0,), (8,)), itemsize=1)
    (step,) = found.steps
    assert (step.group, step.received, found.needed) == ("both meshes: 5 ranks", 4, 4)
    assert found.seconds == LinkModel().seconds_between(5, size=4)
    assert "all 1 us a hop, 200 GB/s; between meshes 5 us a hop, 25 GB/s" in str(
        estimate(Layout(LINE, (S0,), (8,)), Layout(turned, (S0,), (8,)), itemsize=1)
    )
