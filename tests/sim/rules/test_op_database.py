# SPDX-License-Identifier: Apache-2.0
"""A fixed sample of torch's own op database on DTensors: values and gradients are the plain ones.

The whole database takes minutes: `python benchmarks/op_coverage.py`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's op database needs it; `pip install expecttest`")

import op_coverage
from _op_cases import compare

BY_RULE = (
    "__getitem__ add addmm amax argmax cat cumsum einsum expand flatten gather index_add index_put"
    " index_select linalg.vector_norm masked_fill matmul max.reduction_with_dim mean mul"
    " nn.functional.conv2d nn.functional.cross_entropy nn.functional.embedding nn.functional.gelu"
    " nn.functional.group_norm nn.functional.layer_norm nn.functional.linear"
    " nn.functional.mse_loss nn.functional.nll_loss nn.functional.rms_norm"
    " nn.functional.scaled_dot_product_attention permute repeat_interleave reshape scatter_add"
    " softmax split squeeze stack sum take_along_dim topk transpose unbind var view where"
).split()


@pytest.fixture(scope="module")
def database():
    infos = op_coverage.infos(None)
    return {f"{i.name}.{i.variant_test_name}".rstrip("."): i for i in infos}


@pytest.mark.parametrize("name", BY_RULE)
def test_op_of_the_database_is_exact_by_its_rule(name, database):
    row = op_coverage.run_op(database[name], 2, 3)
    assert row.counts["rule"] > 0
    assert not row.counts["wrong"], row.notes
    assert not row.counts["refused"], row.notes


@pytest.mark.parametrize("name", ["add", "index_fill", "masked_fill", "cumsum", "tril"])
def test_in_place_op_of_the_database_is_exact(name, database):
    row = op_coverage.run_op(database[name], 2, 4, in_place=True)
    assert row.counts["rule"] > 0
    assert not row.counts["wrong"], row.notes


def test_a_difference_is_told():
    assert compare(torch.ones(2), torch.zeros(2)) is not None
    assert "shape" in compare(torch.ones(2), torch.ones(3))
    assert "dtype" in compare(torch.ones(2), torch.ones(2).double())
    assert compare(None, torch.ones(2)) == "nothing came"
    assert compare(torch.ones(2), torch.ones(2)) is None
