# SPDX-License-Identifier: Apache-2.0
"""The search: no state's bound is above what is left of the cheapest way, which it finds."""

import heapq
import itertools
import math
import random
from collections import defaultdict

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hyper_parallel.core import AbstractMesh, Layout, Partial, Replicate, Shard, StridedShard
from hyper_parallel.core.cost import Link, LinkModel
from hyper_parallel.core.layout import same_cut
from hyper_parallel.core.plan import problem_of
from hyper_parallel.core.search import cheapest_way
from hyper_parallel.core.space import Space
from hyper_parallel.errors import LayoutError

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
MODELS = [
    LinkModel(),
    LinkModel(launch=1e-9),
    LinkModel(links=(Link(1e-6, 1e11), Link(1e-5, 1e10), Link(2e-6, 5e10))),
]


def times_left(space):
    """Find what the way from each state to the end takes, without any bound."""
    arriving = defaultdict(list)
    for here in range(len(space)):
        for move in space.moves(here, math.inf):
            arriving[move.target].append((here, move.cost))
    found, queue = {}, [(0, space.end)]
    while queue:
        left, there = heapq.heappop(queue)
        if there not in found:
            found[there] = left
            for here, cost in arriving[there]:
                heapq.heappush(queue, (left + cost, here))
    return found


def check_bound(src, dst, model):
    """Compare the bound of every state, and the way that is found with it."""
    if same_cut(src, dst):
        return
    problem = problem_of(src, dst, 4, model)
    space = Space(problem)
    left = times_left(space)
    assert len(left) == len(space)
    for state, least in left.items():
        assert space.bounds[state] <= least, (src, dst, space.state(state))
    assert cheapest_way(problem).cost == left[0], (src, dst)


@st.composite
def pairs(draw):
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=3)))
    assume(math.prod(sizes) <= 24)
    mesh = AbstractMesh("cpu", sizes)
    ops = draw(st.sampled_from([("sum", "avg"), ("sum",), ("max",)]))
    options = [Replicate(), *map(Partial, ops)]
    for dim in range(len(shape)):
        options += [Shard(dim), Shard(dim), StridedShard(dim, 2)]
    found = []
    for _ in range(2):
        placements = tuple(draw(st.sampled_from(options)) for _ in sizes)
        try:
            order = tuple(draw(st.permutations(range(len(sizes)))))
            found.append(Layout(mesh, placements, shape, order))
        except LayoutError:
            assume(False)
    return tuple(found)


@given(pairs(), st.sampled_from(MODELS))
def test_no_bound_is_above_what_is_left(pair, model):
    check_bound(*pair, model)


@pytest.mark.parametrize("shape", [(4096, 4096), (1023, 1025)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 4), (3, 2), (2, 2, 2)], ids=str)
def test_no_bound_is_above_what_is_left_of_large_tensors(sizes, shape):
    mesh, draw = AbstractMesh("cpu", sizes), random.Random(0)
    layouts = [
        Layout(mesh, ps, shape) for ps in itertools.product((R, P, S0, S1), repeat=len(sizes))
    ]
    for _ in range(8):
        check_bound(*draw.sample(layouts, 2), MODELS[0])


@pytest.mark.parametrize(
    "src, dst",
    [
        ((S1, P, S1), (P, R, R)),
        ((S0, P, S1), (P, S1, S1)),
        ((P, S1, S1), (S1, P, R)),
    ],
    ids=str,
)
def test_the_bound_knows_that_a_share_is_filled_in_place(src, dst):
    mesh = AbstractMesh("cpu", (2, 2, 2))
    check_bound(*(Layout(mesh, ps, (4096, 4096)) for ps in (src, dst)), MODELS[0])


def test_the_cheapest_way_is_found_where_a_bound_is_too_high():
    mesh = AbstractMesh("cpu", (2, 4))
    ends = Layout(mesh, (S1, P), (7, 3)), Layout(mesh, (S1, S1), (7, 3), (1, 0))
    problem = problem_of(*ends, 4, MODELS[0])
    space = Space(problem)
    left = times_left(space)
    assert any(space.bounds[state] > least for state, least in left.items())
    assert cheapest_way(problem).cost == left[0]
