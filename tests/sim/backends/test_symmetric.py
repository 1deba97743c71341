# SPDX-License-Identifier: Apache-2.0
"""What the cuda backend takes from torch's symmetric memory, and which groups it serves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hyper_parallel.backends.cuda import CudaBackend, symmetric

SCHEMAS = {
    "fused_all_gather_matmul": (
        "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True)"
        " -> (Tensor?, Tensor[])"
    ),
    "fused_matmul_reduce_scatter": (
        "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor"
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_ops_have_the_schemas_that_we_call(name):
    op = symmetric._op(name)
    assert str(op.default._schema) == f"symm_mem::{name}{SCHEMAS[name]}"
    assert name in symmetric.SymmetricMatmul.ops.values()


def test_an_op_that_torch_lacks_is_no_kernel(monkeypatch):
    lacks = {"all_gather_matmul": "fused_matmul_all_reduce"}
    monkeypatch.setattr(symmetric.SymmetricMatmul, "ops", lacks)
    group = SimpleNamespace(ranks=(0, 1), group=None)
    assert CudaBackend.capabilities.fused("all_gather_matmul", group) is None


CASES = {
    "no torchrun": (None, 8, True, "LOCAL_WORLD_SIZE must say how many ranks a host has"),
    "two hosts": ("1", 8, True, "the group must be on one host"),
    "hidden": ("2", 1, True, "every rank must see the GPUs of all ranks of its host"),
    "no link": ("2", 2, False, "must be able to read each other's memory"),
    "linked": ("2", 2, True, None),
}


@pytest.mark.parametrize("case", CASES)
def test_gpus_must_read_each_others_memory(monkeypatch, case):
    each, devices, linked, text = CASES[case]
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if each is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", each)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: linked and a != b)
    said = symmetric.why_no_peers.__wrapped__((2, 3))
    assert said is None if text is None else text in said


class Group:
    """What stands for a process group."""


@pytest.mark.parametrize("case", ["all can", "another cannot", "this cannot"])
def test_ranks_of_a_group_agree_once(monkeypatch, case):
    told = []

    def all_gather_ints(values):
        told.append(values)
        return [tuple(values), (int(case != "another cannot"),)]

    mine = "no link" if case == "this cannot" else None
    monkeypatch.setattr(symmetric, "why_no_peers", lambda ranks: mine)
    monkeypatch.setattr(symmetric.SymmetricMatmul, "device_type", "cpu")
    comm = SimpleNamespace(ranks=(0, 1), group=Group(), all_gather_ints=all_gather_ints)
    kernel = symmetric.SymmetricMatmul.find("all_gather_matmul", comm)
    want = {"all can": None, "another cannot": "another rank of the group cannot run it"}
    for _ in range(2):
        assert kernel.refusal(torch.ones(2, 3), torch.ones(3, 2)) == want.get(case, mine)
    assert told == [[int(mine is None)]]
