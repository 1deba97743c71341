# SPDX-License-Identifier: Apache-2.0
"""TorchOps: local operations, none of which records a gradient."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.backends._torch.ops import TorchOps
from hyper_parallel.errors import BackendError

ops = TorchOps()


def test_none_records_a_gradient() -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    results = [
        ops.narrow(x, 1, 0, 2),
        ops.cat([x, x], 0),
        ops.movedim(x, 0, 1),
        ops.reshape(x, (6,)),
        ops.contiguous(x.t()),
        ops.clone(x),
        ops.empty((2,), x),
        ops.identity((2,), "max", x),
        ops.scale(x, 2),
    ]
    assert not any(result.requires_grad for result in results)
    ops.copy_into(ops.narrow(x, 0, 0, 1), torch.zeros(1, 3))
    assert x[0].tolist() == [0, 0, 0]


def test_views_share_memory_and_copies_do_not() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert ops.contiguous(x) is x and ops.movedim(x, 1, 1) is x
    for view in (ops.narrow(x, 1, 1, 2), ops.movedim(x, 0, 1), ops.reshape(x, (3, 2))):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    copy = ops.clone(x.t())
    assert copy.is_contiguous() and copy.untyped_storage().data_ptr() != x.data_ptr()
    assert ops.cat([x.t(), x.t()], 1).is_contiguous()


@pytest.mark.parametrize(
    ("dtype", "op", "value"),
    [
        (torch.float32, "sum", 0),
        (torch.float32, "product", 1),
        (torch.bfloat16, "max", float("-inf")),
        (torch.float64, "min", float("inf")),
        (torch.float32, "avg", 0),
        (torch.float8_e4m3fn, "max", -448.0),
        (torch.int64, "max", -(2**63)),
        (torch.int8, "min", 127),
        (torch.uint8, "max", 0),
        (torch.bool, "max", False),
        (torch.bool, "min", True),
        (torch.complex64, "product", 1),
    ],
    ids=str,
)
def test_identity(dtype: torch.dtype, op: str, value: object) -> None:
    made = ops.identity((2, 1), op, torch.empty(0, dtype=dtype))
    assert made.dtype == dtype and made.tolist() == [[value], [value]]


@pytest.mark.parametrize(("dtype", "op"), [(torch.complex64, "max"), (torch.float32, "median")])
def test_identity_refused(dtype: torch.dtype, op: str) -> None:
    with pytest.raises(BackendError, match="identity: op must be sum, avg or product"):
        ops.identity((2,), op, torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("dtype", (torch.float16, torch.complex64, torch.int16, torch.int64))
def test_scale_keeps_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([4, -8]).to(dtype)
    assert ops.scale(x, 2).tolist() == [8, -16]
    assert ops.scale(x, 4, divide=True).tolist() == [1, -2]
    assert ops.scale(x, 2).dtype == ops.scale(x, 2, divide=True).dtype == dtype


@pytest.mark.parametrize(
    ("values", "factor", "divide"),
    [([3], 2, True), ([3], 0.5, False), ([True], 2, False), ([3], 0, True)],
)
def test_scale_refuses_inexact_integers(values: list[int], factor: float, divide: bool) -> None:
    with pytest.raises(BackendError, match="scale: integers must stay whole numbers"):
        ops.scale(torch.tensor(values), factor, divide=divide)
