# SPDX-License-Identifier: Apache-2.0
"""visualize_sharding of layouts: the table, and what it refuses."""

import sys

import pytest

from hyper_parallel import HyperParallelError, LayoutError, Partial, Replicate, Shard
from hyper_parallel import visualize_sharding as show
from hyper_parallel.core import AbstractMesh, Layout, StridedShard

GRID = AbstractMesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))


def test_a_vector_of_strided_parts_under_a_header(capsys):
    show(Layout(GRID, (Replicate(), StridedShard(0, 2)), (7,)), header="w")
    assert capsys.readouterr().out == (
        "w\n"
        "Layout([7], R@dp, SS(0, 2)@tp)\n"
        "  0:2,4:5    2:4,5:6    6:7\n"
        "  rank 0, 3  rank 1, 4  rank 2, 5\n"
    )


def test_empty_shards_come_last(capsys):
    show(Layout(GRID, (Shard(1), Shard(0)), (2, 3)))
    assert capsys.readouterr().out == (
        "Layout([2, 3], S(1)@dp, S(0)@tp)\n"
        "         0:2     2:3\n"
        "0:1      rank 0  rank 3\n"
        "1:2      rank 1  rank 4\n"
        "nothing  rank 2  rank 5\n"
    )


def test_rich_draws_the_same_cells(capsys):
    pytest.importorskip("rich", reason="rich draws it, and is not installed")
    show(Layout(GRID, (Partial(), Shard(0)), (2, 3)), "w", use_rich=True)
    words = capsys.readouterr().out
    assert words.split()[0] == "w"
    for cell in ("P(sum)@dp", "0:3", "0:1", "nothing", "rank 0, 3", "rank 2, 5"):
        assert cell in words


def test_rich_that_is_missing_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(
        HyperParallelError,
        match=r"visualize_sharding: rich must be installed for use_rich=True. Install it, or leave",
    ):
        show(Layout(GRID, (Replicate(), Replicate()), (2,)), use_rich=True)


@pytest.mark.parametrize("value", ["x", Layout(GRID, (Replicate(),) * 2, (2, 3, 4)), None], ids=str)
def test_refuses_what_it_cannot_draw(value):
    with pytest.raises(
        LayoutError,
        match="visualize_sharding: dtensor must be a DTensor or a Layout of one or two dims, but",
    ):
        show(value)
