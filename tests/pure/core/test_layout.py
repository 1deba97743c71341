# SPDX-License-Identifier: Apache-2.0
"""Layout against the oracle's index lists: nesting, uneven and empty shards, blocks, rank order."""

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core import AbstractMesh, Layout, Partial, Replicate, Shard, chunk_sizes
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


@st.composite
def cases(draw):
    """Draw a grid of ranks, a shape, and placements that may be illegal because of a block."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = math.prod(sizes)
    ranks = draw(st.permutations(range(count + 2)))[:count]
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    options = [Replicate(), Partial()]
    options += [Shard(d, block=b) for d in range(len(shape)) for b in (1, 1, 2, 3)]
    placements = tuple(draw(st.sampled_from(options)) for _ in sizes)
    return np.array(ranks).reshape(sizes), placements, shape


@given(cases())
def test_layout_holds_what_the_oracle_says_or_refuses_with_it(case):
    grid, placements, shape = case
    mesh = AbstractMesh("cpu", grid.shape, ranks=grid.ravel().tolist())
    try:
        expected = {r: oracle.indices(grid, placements, shape, r) for r in mesh.ranks}
    except AssertionError:
        with pytest.raises(LayoutError, match="block must divide"):
            Layout(mesh, placements, shape)
        return
    layout = Layout(mesh, placements, shape)
    for rank, held in expected.items():
        slices = layout.slices(rank)
        assert [list(range(s.start, s.stop)) for s in slices] == held
        assert layout.local_shape(rank) == tuple(map(len, held))
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                sizes = layout.axis_sizes(axis, mesh.coordinate(rank))
                assert len(sizes) == grid.shape[axis]
                assert sum(sizes) in layout.sizes_before(axis, placement.dim)


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
    assert copy == layout and hash(copy) == expected


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


def test_slices_refuse_a_rank_outside_the_mesh():
    layout = Layout(AbstractMesh("cpu", (2,), ranks=(1, 3)), (Shard(0),), (4,))
    with refuse(r"Layout.slices: rank must be in the mesh \(1, 3\), but got rank=0"):
        layout.slices(0)


def test_axis_sizes_refuse_an_axis_that_cuts_nothing():
    layout = Layout(MESH, (Shard(0), Partial()), (4,))
    with refuse(r"Layout.axis_sizes: the axis must be a Shard, but got axis=1, placement=P\(sum\)"):
        layout.axis_sizes(1, (0, 0))
