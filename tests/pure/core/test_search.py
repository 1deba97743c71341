# SPDX-License-Identifier: Apache-2.0
"""The search: its bound never hides a cheaper way."""

import itertools
import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hyper_parallel.core import AbstractMesh, Layout, Partial, Replicate, Shard, StridedShard
from hyper_parallel.core import plan as planned
from hyper_parallel.core.cost import Link, LinkModel
from hyper_parallel.core.search import cheapest_way
from hyper_parallel.core.space import Space
from hyper_parallel.errors import LayoutError

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
MODELS = [
    LinkModel(),
    LinkModel(launch=1e-9),
    LinkModel(links=(Link(1e-6, 1e11), Link(1e-5, 1e10), Link(2e-6, 5e10))),
]


def cost(src, dst, model):
    src.mesh.plans.clear()
    cheapest_way.cache_clear()
    return round(planned(src, dst, model=model).seconds * 1e12)


def check_bound(src, dst, model):
    """Compare with a search that has no bound but that one launch is needed."""
    with_bound = cost(src, dst, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Space, "bound", lambda self, number: 0)
        assert with_bound == cost(src, dst, model), (src, dst)


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
def test_the_bound_hides_no_cheaper_way(pair, model):
    check_bound(*pair, model)


@pytest.mark.parametrize("shape", [(4096, 4096), (1023, 1025)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 4), (3, 2), (2, 2, 2)], ids=str)
def test_the_bound_hides_no_cheaper_way_of_large_tensors(sizes, shape):
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
