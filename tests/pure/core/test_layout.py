# SPDX-License-Identifier: Apache-2.0
"""Layout against the oracle's index lists: nesting, uneven and empty shards, blocks, rank order."""

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core import (
    AbstractMesh,
    Layout,
    Packed,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    chunk_sizes,
    same_cut,
)
from hyper_parallel.core.nesting import held_by, without
from hyper_parallel.core.placement import REDUCE_OPS
from hyper_parallel.errors import LayoutError
from support import oracle

MESH = AbstractMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize(
    "size, num_chunks, block, sizes",
    [
        (5, 4, 1, (2, 2, 1, 0)),
        (9, 4, 1, (3, 3, 3, 0)),
        (0, 3, 1, (0, 0, 0)),
        (2, 4, 1, (1, 1, 0, 0)),
        (3 * 64, 2, 64, (128, 64)),
        (12, 4, 4, (4, 4, 4, 0)),
    ],
)
def test_chunk_sizes_are_those_of_torch_chunk(size, num_chunks, block, sizes):
    assert chunk_sizes(size, num_chunks, block) == sizes


def test_chunk_sizes_match_the_oracle_and_cover_everything():
    for blocks, n, block in itertools.product(range(14), range(1, 6), range(1, 4)):
        size = blocks * block
        chunks = [oracle.chunk(list(range(size)), n, i, block) for i in range(n)]
        assert chunk_sizes(size, n, block) == tuple(map(len, chunks))
        assert [i for part in chunks for i in part] == list(range(size))


def flat(intervals):
    return [i for start, stop in intervals for i in range(start, stop)]


@st.composite
def cases(draw):
    """Draw a grid of ranks, a shape, and placements that may be illegal because of a size."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = math.prod(sizes)
    ranks = draw(st.permutations(range(count + 2)))[:count]
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    options = [Replicate(), Partial()]
    for dim, size in enumerate(shape):
        options += [Shard(dim, block=b) for b in (1, 1, 2, 3)]
        options += [StridedShard(dim, factor) for factor in (1, 2, 2, 3)]
        first = draw(st.integers(0, size))
        block = draw(st.sampled_from([b for b in (1, 2, 3) if first % b == 0]))
        options.append(Packed(dim, (first, size - first), (block, 1)))
    placements = tuple(draw(st.sampled_from(options)) for _ in sizes)
    return np.array(ranks).reshape(sizes), placements, shape


@given(cases())
def test_layout_holds_what_the_oracle_says_or_refuses_with_it(case):
    grid, placements, shape = case
    mesh = AbstractMesh("cpu", grid.shape, ranks=grid.ravel().tolist())
    try:
        expected = {r: oracle.indices(grid, placements, shape, r) for r in mesh.ranks}
    except AssertionError:
        with pytest.raises(LayoutError, match=r"block must divide|packed sizes must add up"):
            Layout(mesh, placements, shape)
        return
    layout = Layout(mesh, placements, shape)
    for rank, held in expected.items():
        intervals = layout.intervals(rank)
        assert list(map(flat, intervals)) == held
        assert layout.local_shape(rank) == tuple(map(len, held))
        assert all(a[1] < b[0] for own in intervals for a, b in itertools.pairwise(own))
        if all(len(own) < 2 for own in intervals):
            slices = layout.slices(rank)
            assert [list(range(s.start, s.stop)) for s in slices] == held
    sizes = [tuple(map(len, held)) for held in expected.values()]
    assert layout.largest_shape == tuple(map(max, zip(*sizes, strict=True)))


@given(cases(), st.randoms())
def test_layout_in_another_order_cuts_as_the_transposed_mesh(case, random):
    grid, placements, shape = case
    order = list(range(grid.ndim))
    random.shuffle(order)
    moved = np.transpose(grid, order)
    mesh = AbstractMesh("cpu", grid.shape, ranks=grid.ravel().tolist())
    other = AbstractMesh("cpu", moved.shape, ranks=moved.ravel().tolist())
    try:
        expected = Layout(other, [placements[axis] for axis in order], shape)
    except LayoutError:
        with pytest.raises(LayoutError):
            Layout(mesh, placements, shape, tuple(order))
        return
    layout = Layout(mesh, placements, shape, tuple(order))
    assert all(layout.intervals(rank) == expected.intervals(rank) for rank in mesh.ranks)
    assert Layout(mesh, placements, shape, layout.order) == layout
    for rank, place in zip(mesh.ranks, itertools.product(*map(range, grid.shape)), strict=True):
        simple = [
            [place[cut.axis] for cut in chain if cut.num_ranks > 1]
            for chain in layout.simple_chains
        ]
        assert [len(places) for places in simple] == [len(c) for c in layout.simple_chains]
        held = [
            held_by(size, chain, tuple(places))
            for size, chain, places in zip(shape, layout.simple_chains, simple, strict=True)
        ]
        assert tuple(held) == layout.intervals(rank)


@given(cases(), st.data())
def test_a_chain_without_axes_is_what_their_ranks_hold_together(case, data):
    grid, placements, shape = case
    mesh = AbstractMesh("cpu", grid.shape, ranks=grid.ravel().tolist())
    try:
        layout = Layout(mesh, placements, shape)
    except LayoutError:
        return
    axes = frozenset(data.draw(st.sets(st.integers(0, grid.ndim - 1))))
    for dim, (size, chain) in enumerate(zip(shape, layout.simple_chains, strict=True)):
        left = without(size, chain, axes)
        if left is None:
            continue
        for place in itertools.product(*map(range, grid.shape)):
            own = flat(held_by(size, left, tuple(place[cut.axis] for cut in left)))
            group = mesh.submesh_ranks(sorted(axes), rank=mesh.rank_at(place))
            union = {i for rank in group for i in flat(layout.intervals(rank)[dim])}
            assert own == sorted(union)


@given(cases(), cases())
def test_same_cut_compares_what_ranks_hold(case, other):
    grid, a, shape = case
    mesh = AbstractMesh("cpu", grid.shape, ranks=grid.ravel().tolist())
    b = other[1][: len(a)] + a[len(other[1]) :]
    try:
        layouts = [Layout(mesh, placements, shape) for placements in (a, b)]
    except LayoutError:
        return
    pending = [
        [(i, p) for i, p in enumerate(x) if p.is_partial() and grid.shape[i] > 1] for x in (a, b)
    ]
    held = [[x.intervals(rank) for rank in mesh.ranks] for x in layouts]
    assert same_cut(*layouts) == (pending[0] == pending[1] and held[0] == held[1])


def test_same_cut_of_different_placements():
    def alike(a, b, shape=(8,), mesh=MESH):
        return same_cut(Layout(mesh, a, shape), Layout(mesh, b, shape))

    line, rows = AbstractMesh("cpu", (2,)), Replicate()
    assert alike((StridedShard(0, 2),), (Packed(0, (4, 4)),), mesh=line)
    assert alike((StridedShard(0, 1),), (Shard(0),), mesh=line)
    assert alike((Shard(0, block=2),), (Shard(0),), mesh=line)
    assert not alike((Shard(0, block=4),), (Shard(0),), (12,), mesh=line)
    assert not alike((rows, Partial()), (rows, rows))
    reverse = (StridedShard(0, 2), Shard(0))
    assert Layout(MESH, (Shard(0), Shard(0)), (8,), (1, 0)) != Layout(MESH, reverse, (8,))
    assert same_cut(Layout(MESH, (Shard(0), Shard(0)), (8,), (1, 0)), Layout(MESH, reverse, (8,)))
    uneven = AbstractMesh("cpu", (3, 2))
    ordered = Layout(uneven, (Shard(0), Shard(0)), (7,), (1, 0))
    assert not same_cut(ordered, Layout(uneven, reverse, (7,)))
    assert Layout(uneven, reverse, (7,)).intervals(4) == (((6, 7),),)  # place (2, 0)
    assert ordered.intervals(5) == (((6, 7),),)  # place (2, 1)
    flattened = AbstractMesh("cpu", (4,))
    assert same_cut(Layout(MESH, (Shard(0), Shard(0)), (8,)), Layout(flattened, (Shard(0),), (8,)))
    assert not same_cut(Layout(MESH, (Shard(0),) * 2, (5,)), Layout(flattened, (Shard(0),), (5,)))


def test_two_axes_on_one_dim_nest_from_left_to_right():
    layout = Layout(MESH, (Shard(0), Shard(0)), (5,))
    assert [layout.local_shape(rank) for rank in range(4)] == [(2,), (1,), (1,), (1,)]
    assert Layout(AbstractMesh("cpu", (4,)), (Shard(0),), (5,)).local_shape(1) == (2,)


def test_an_empty_shard_keeps_the_other_dims():
    layout = Layout(AbstractMesh("cpu", (4,)), (Shard(1),), (3, 2, 5))
    assert layout.local_shape(3) == (3, 0, 5)


def test_a_rank_outside_the_mesh_holds_nothing():
    layout = Layout(AbstractMesh("cpu", (2,), ranks=(1, 3)), (Replicate(),), (4, 4))
    assert layout.local_shape(0) == (0,)
    assert layout.local_shape(3) == (4, 4)


def test_layout_normalizes_placements_and_shape():
    layout = Layout(MESH, [Shard(-1), Partial()], [4, 6])
    assert layout.placements == (Shard(1), Partial()) and layout.shape == (4, 6)
    assert layout == Layout(MESH, (Shard(1), Partial()), (4, 6))
    assert hash(layout) == hash(Layout(MESH, (Shard(1), Partial()), (4, 6)))
    assert repr(layout) == "Layout([4, 6], S(1)@dp, P(sum)@tp)"


def test_cotangent_and_copies_of_a_layout():
    layout = Layout(MESH, (Shard(0), Partial("avg")), (4,))
    assert layout.cotangent.placements == (Shard(0), Replicate())
    assert layout.cotangent.cotangent is layout.cotangent
    assert layout.with_shape((6, 2)).shape == (6, 2)
    assert layout.has_partial and not layout.cotangent.has_partial
    assert layout.with_placements([Replicate()] * 2).is_replicated


def test_a_pickled_layout_hashes_as_a_new_one():
    layout = Layout(MESH, (Shard(0), Partial()), (4,))
    expected = hash(layout)
    assert layout.has_partial  # cached on the value
    object.__setattr__(layout, "_hash", 0)  # as if another process had made it
    copy = pickle.loads(pickle.dumps(layout))
    new = Layout(MESH, (Shard(0), Partial()), (4,))
    assert copy == new and hash(copy) == hash(new) == expected


def test_partial_ops_mix_only_where_order_does_not_matter():
    for a, b in itertools.product(REDUCE_OPS, repeat=2):
        if a == b or {a, b} == {"sum", "avg"}:
            Layout(MESH, (Partial(a), Partial(b)), (4,))
        else:
            with pytest.raises(
                LayoutError,
                match=r"Layout: Partial ops on several mesh axes must be the same, or sum and avg, "
                rf"but got placements=\(P\({a}\), P\({b}\)\). Reduce one",
            ):
                Layout(MESH, (Partial(a), Partial(b)), (4,))


def refuse(text):
    return pytest.raises(LayoutError, match=text)


@pytest.mark.parametrize("placements", [(), (Shard(0),), (Shard(0),) * 3], ids=str)
def test_layout_refuses_a_wrong_number_of_placements(placements):
    with refuse(r"Layout: placements must have one entry per mesh axis \(2\), but got placements="):
        Layout(MESH, placements, (4,))


def test_layout_refuses_a_dim_out_of_range():
    with refuse(r"Layout: Shard dim must be in \[-2, 2\) for a tensor of 2 dims, but got dim=2"):
        Layout(MESH, (Replicate(), Shard(2)), (4, 4))


def test_layout_refuses_to_shard_a_tensor_without_dims():
    with refuse("Layout: a tensor of 0 dims must be Replicate or Partial"):
        Layout(MESH, (Replicate(), Shard(0)), ())


def test_layout_refuses_a_negative_size():
    with refuse(r"Layout: sizes must not be negative, but got shape=\(4, -1\)"):
        Layout(MESH, (Replicate(), Replicate()), (4, -1))


def test_layout_refuses_a_block_that_does_not_divide_the_dim():
    with refuse("block must divide what axis 'tp' cuts of dim 1, but got sizes=.6., block=4"):
        Layout(MESH, (Shard(0), Shard(1, block=4)), (4, 6))


def test_layout_refuses_a_block_that_does_not_divide_what_an_outer_axis_left():
    with refuse("block must divide what axis 'tp' cuts of dim 0, but got sizes=.3., block=2"):
        Layout(MESH, (Shard(0), Shard(0, block=2)), (6,))
    assert Layout(MESH, (Shard(0, block=2), Shard(0, block=2)), (6,)).local_shape(0) == (2,)


def test_layout_refuses_packed_sizes_that_do_not_add_up():
    with refuse(
        "packed sizes must add up to what axis 'dp' cuts of dim 0, but got cuts=.8., sizes="
    ):
        Layout(MESH, (Packed(0, (4, 2)), Replicate()), (8,))


def test_layout_refuses_an_order_that_is_not_of_its_axes():
    with refuse(r"Layout: order must name each of the 2 axes once, but got order=\(0, 0\)"):
        Layout(MESH, (Shard(0), Shard(0)), (8,), (0, 0))


def test_slices_refuse_a_rank_outside_the_mesh():
    layout = Layout(AbstractMesh("cpu", (2,), ranks=(1, 3)), (Shard(0),), (4,))
    with refuse(r"Layout.intervals: rank must be in the mesh \(1, 3\), but got rank=0"):
        layout.slices(0)


def test_slices_refuse_several_ranges():
    layout = Layout(AbstractMesh("cpu", (2,)), (StridedShard(0, 2),), (8,))
    with refuse("Layout.slices: the rank must hold one range of each dim, but got layout="):
        layout.slices(0)
