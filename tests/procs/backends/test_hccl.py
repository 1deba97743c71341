# SPDX-License-Identifier: Apache-2.0
"""What HCCL refuses is refused by the simulated one, and never reaches it from the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import distribute_tensor
from hyper_parallel.core import Partial, Replicate, Shard
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.runtime import DeviceMesh, init_device_mesh
from support.device import DEVICE, on_simulated_npu
from support.procs import run_processes

pytestmark = on_simulated_npu

REFUSED = {
    "float64 sum": "HCCL allreduce: Unsupported data type torch.float64",
    "float64 scatter": "HCCL _reduce_scatter_base: Unsupported data type torch.float64",
    "bool scatter": "HCCL _reduce_scatter_base: Unsupported data type torch.bool",
    "uint16 sum": "HCCL allreduce: Unsupported data type torch.uint16",
    "float8 sum": "Unsupported data type for HCCL process group",
    "float8 gather": "Unsupported data type for HCCL process group",
    "bfloat16 product": "HCCL function error: allreduce",
    "premultiplied": "Cannot use ReduceOp.PREMUL_SUM with HCCL",
    "bits": "Cannot use ReduceOp.BAND with HCCL",
    "stride": "Tensors must be contiguous",
    "format": "For a tensor of internal format, it's storage_offset must be 0",
    "scalar": "Scalar tensors (0-dim tensors) are not supported in alltoall",
    "own output": "sendBuf and recvBuf must be different",
    "gather to one": "ProcessGroupHCCL does not support gather",
    "any source": "ProcessGroupHCCL does not support recv",
    "size": "output tensor size must be equal to world_size times input tensor size",
    "dtype": "output tensor must have the same type as input tensor",
}


def refusals() -> dict[str, str]:
    """Make every wrong call of torch's own functions; none gets as far as the other rank."""
    import torch_npu

    init_device_mesh("npu", (2,))
    x, wide, eight = torch.ones(4, 4), torch.ones(4).double(), torch.ones(4).to(torch.float8_e4m3fn)
    tiles = torch_npu.npu_format_cast(torch.ones(4, 4), torch_npu.Format.FRACTAL_NZ)
    half, one = torch.ones(2).double(), torch.tensor(1.0)
    ops, scatter = dist.ReduceOp, dist.reduce_scatter_single
    calls = {
        "float64 sum": lambda: dist.all_reduce(wide),
        "float64 scatter": lambda: scatter(half, wide),
        "bool scatter": lambda: scatter(half.bool(), wide.bool()),
        "uint16 sum": lambda: dist.all_reduce(wide.to(torch.uint16)),
        "float8 sum": lambda: dist.all_reduce(eight),
        "float8 gather": lambda: dist.all_gather_single(torch.cat([eight, eight]), eight),
        "bfloat16 product": lambda: dist.all_reduce(x.bfloat16(), ops.PRODUCT),
        "premultiplied": lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0)),
        "bits": lambda: dist.all_reduce(x.int(), ops.BAND),
        "stride": lambda: dist.all_reduce(x[:, :2]),
        "format": lambda: dist.broadcast(tiles[1:], 0),
        "scalar": lambda: dist.all_to_all_single(one.clone(), one),
        "own output": lambda: dist.all_to_all_single(x, x),
        "gather to one": lambda: dist.gather(x, [x, x] if dist.get_rank() == 0 else None),
        "any source": lambda: dist.recv(x),
        "size": lambda: dist.all_gather_single(x, x),
        "dtype": lambda: dist.all_gather_single(torch.ones(8, 4).int(), x),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "not refused"
        except RuntimeError as error:
            said[name] = str(error)
    return said


def test_hccl_refuses_in_its_own_words(procs2: Any) -> None:
    for said in procs2.run(refusals):
        assert {name: text in said[name] for name, text in REFUSED.items()} == dict.fromkeys(
            REFUSED, True
        ), said


def unwaited() -> list[float]:
    """Read a result before and after its wait."""
    x = torch.ones(2)
    init_device_mesh("npu", (2,))
    work = dist.all_reduce(x, async_op=True)
    before = x.tolist()
    work.wait()
    return before + x.tolist()


def test_a_result_is_there_only_after_the_wait(procs2: Any) -> None:
    assert procs2.run(unwaited) == [[1.0, 1.0, 2.0, 2.0]] * 2


# What the library itself says, before HCCL is asked.
OURS = ("the npu backend must be able to reduce", "need numbers that have an order")


def moves_of_every_dtype() -> list[str]:
    """Move every dtype between layouts; give those that HCCL, not the library, refused."""
    mesh = init_device_mesh("npu", (2,))
    dtypes = (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
        *(torch.bool, torch.complex64, torch.complex128),
    )
    layouts = (Replicate(), Shard(0), Shard(1), *map(Partial, ("sum", "max", "product")))
    bad = []
    for dtype in dtypes:
        whole = torch.ones(3, 2).to(dtype)
        for src in layouts:
            for dst in layouts:
                try:
                    distribute_tensor(whole, mesh, [src]).redistribute(mesh, [dst])
                except HyperParallelError as error:
                    if not any(text in str(error) for text in OURS):
                        bad.append(f"{dtype} {src} {dst}: {error}")
                except NotImplementedError:
                    pass  # torch has no kernel that fills this dtype
    return bad


def test_hccl_is_never_given_what_it_refuses(procs2: Any) -> None:
    assert procs2.run(moves_of_every_dtype) == [[], []]


def communicators() -> tuple[list[tuple[int, ...]], list[bool]]:
    """Use many meshes with equal rank sets, one of them torch's; list the communicators made."""
    import torch_npu
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh

    def use(mesh: DeviceMesh) -> list[Any]:
        for axis in range(mesh.ndim):
            if mesh.shape[axis] > 1:
                mesh.communicator(axis).all_reduce(torch.ones(2))
        return mesh.get_all_groups()

    wrapped = init_device_mesh("npu", (1,)).backend.wrap_mesh(
        torch_mesh("npu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    )
    joint = wrapped["dp", "cp"].flatten("data")
    joint.communicator(0).all_reduce(torch.ones(2))
    first, second = use(init_device_mesh("npu", (2, 2), mesh_dim_names=("dp", "tp")))
    again = use(DeviceMesh("npu", [[[2], [3]], [[0], [1]]], mesh_dim_names=("a", "b", "c")))
    whole = use(init_device_mesh("npu", (4,)))
    flat = use(init_device_mesh("npu", (2, 2), mesh_dim_names=("dp", "tp")).flatten())
    equal = [
        joint.get_group() is first,
        again[:2] == [first, second],
        whole == flat == [dist.group.WORLD],
    ]
    return torch_npu._hccl.made, equal


def test_one_communicator_for_one_set_of_ranks_first_used_in_one_order() -> None:
    results = run_processes(communicators, 4)
    for rank, (made, equal) in enumerate(results):
        assert equal == [True] * 3
        assert len(set(made)) == len(made), made
        assert {ranks for ranks in made if len(ranks) < 4} == {
            tuple(r for r in range(4) if r % 2 == rank % 2),
            tuple(r for r in range(4) if r // 2 == rank // 2),
        }
    for i, (made, _) in enumerate(results):
        for j, (others, _) in enumerate(results):
            shared = [[ranks for ranks in one if {i, j} <= set(ranks)] for one in (made, others)]
            assert shared[0] == shared[1]


def crossed() -> str:
    """Use two groups for the first time in another order on each rank, without waiting."""
    mesh = init_device_mesh(DEVICE, (2,))
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    if mesh.get_rank() == 1:
        groups.reverse()
    x = torch.ones(1)
    try:
        works = [dist.all_reduce(x, group=group, async_op=True) for group in groups]
        [work.wait() for work in works]
    except RuntimeError as error:
        return str(error)
    return "not noticed"


@pytest.mark.nightly
def test_groups_first_used_in_different_orders_wait_for_each_other(procs2: Any) -> None:
    for text in procs2.run(crossed):
        assert "imed out" in text
