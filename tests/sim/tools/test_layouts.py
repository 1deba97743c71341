# SPDX-License-Identifier: Apache-2.0
"""The tools for layouts, on DTensors."""

import torch

from hyper_parallel import Replicate, Shard, distribute_tensor, explain_redistribute, simulate
from hyper_parallel import visualize_sharding as show
from support.dtensors import line


def test_visualize_sharding_prints_once_for_all_ranks(capsys):
    @simulate(2)
    def show_rows():
        show(distribute_tensor(torch.ones(5), line(2), [Shard(0)]), "rows")

    show_rows()
    assert capsys.readouterr().out == (
        "rows\nLayout([5], S(0)@tp)\n  0:3     3:5\n  rank 0  rank 1\n"
    )


@simulate(2)
def test_explain_redistribute_takes_the_layout_of_a_dtensor():
    mesh = line(2)
    x = distribute_tensor(torch.ones(6, 2, dtype=torch.float64), mesh, [Shard(0)])
    whole = x.redistribute(mesh, [Replicate()])
    found = explain_redistribute(x.layout, whole.layout, itemsize=x.dtype.itemsize)
    assert found.received == whole.to_local().nbytes - x.to_local().nbytes == 48
