# SPDX-License-Identifier: Apache-2.0
"""The cases of _op_cases.py on torch's own DTensor, all ranks in this process (LocalTensorMode)."""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from _op_cases import Case, contribution, differs
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["judge"]


def judge(case: Case) -> tuple[str, str]:
    """Run a case: "exact", "refused" with torch's error, or "wrong" with the difference."""
    ranks = range(case.num_ranks)
    mode, mesh = _ranks(case.num_ranks)
    with mode:
        sample = case.sample
        try:
            tensors = [_place(t, at, mesh) for t, at in zip(sample.tensors, case.way, strict=True)]
            seeds = [distribute_tensor(seed, mesh, [Replicate()]) for seed in sample.seeds]
            results, grads = sample.with_gradients(tensors, seeds)
            whole = [_whole(r, ranks) for r in (*results, *grads)]
        except Exception as error:  # whatever torch says
            return "refused", f"{type(error).__name__}: {error}"
    for rank in ranks:
        of_rank = [w[rank] if isinstance(w, list) else w for w in whole]
        note = differs(sample, of_rank[: len(results)], of_rank[len(results) :])
        if note:
            return "wrong", f"rank {rank}: {note}"
    return "exact", ""


@lru_cache
def _ranks(count: int) -> tuple[Any, Any]:
    """Simulate ranks with a mesh of one axis, once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    mode = LocalTensorMode(frozenset(range(count)))
    with mode:
        return mode, init_device_mesh("cpu", (count,))


def _place(tensor: torch.Tensor, at: int | str | None, mesh: Any) -> DTensor:
    if at == "sum":
        parts = {rank: contribution(tensor, rank) for rank in range(mesh.size())}
        placed = DTensor.from_local(LocalTensor(parts), mesh, [Partial()], run_check=False)
    else:
        placement = Replicate() if at is None else Shard(int(at))
        placed = distribute_tensor(tensor.detach().clone(), mesh, [placement])
    return placed.detach().requires_grad_(tensor.requires_grad)


def _whole(value: Any, ranks: range) -> Any:
    """Give what every rank sees of a result: a list by rank, or the value if it is no tensor."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, LocalTensor):
        return [value._local_tensors[rank].detach() for rank in ranks]
    return value
