# SPDX-License-Identifier: Apache-2.0
"""Our calls of torch's symmetric-memory matmuls, on gloo with torch's own two-step stand-ins.

The kernels are for GPUs; torch has the steps written out for traced tensors, which run here on CPU
ones. So arguments, order of results, rows and group names are tried; the kernels are not.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    RowwiseParallel,
    Shard,
    init_device_mesh,
)
from hyper_parallel.backends.cpu import CpuBackend
from hyper_parallel.backends.cuda import CudaBackend, symmetric
from hyper_parallel.errors import BackendError
from hyper_parallel.parallel import fused_collectives
from hyper_parallel.runtime import DeviceMesh, override_backend
from support.device import DEVICE
from support.procs import ProcessPool

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="compares on CPU tensors")
_kept: list[Any] = []


@pytest.fixture(scope="module")
def patched() -> Iterator[ProcessPool]:
    """Two processes of these tests' own, which `prepare` changes for good."""
    pool = ProcessPool(2)
    yield pool
    pool.close()


class Symmetric(CpuBackend):
    """The CPU backend with the kernels of the cuda one."""

    capabilities = replace(CpuBackend.capabilities, fused=CudaBackend.capabilities.fused)


def prepare() -> None:
    """Let CPU tensors of this process reach the kernels."""
    if _kept:
        return
    torchs: Any = importlib.import_module("torch.distributed._symmetric_memory")
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(torchs, f"_{name}_fallback"), "CPU")
    _kept.append(library)
    symmetric.why_no_peers = lambda ranks: None
    symmetric.SymmetricMatmul.device_type = "cpu"


def block(mesh: DeviceMesh | None) -> nn.Sequential:
    """Make an MLP, on a mesh with a cut sequence outside."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
    if mesh is not None:
        ColwiseParallel(input_layouts=Shard(1)).apply(net[0], mesh)
        RowwiseParallel(output_layouts=Shard(1)).apply(net[2], mesh)
    return net


def train(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Give output and gradients: input, parameters in order."""
    x = x.clone().requires_grad_()
    y = net(x)
    y.square().sum().backward()
    grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in net.parameters()]
    return [y.detach(), x.grad, *grads]


def exact() -> tuple[float, dict[str, int], dict[str, int]]:
    """Train a block in one process and fused; give the largest difference and the counts."""
    prepare()
    with override_backend(Symmetric()):
        mesh = init_device_mesh("cpu", (2,))
        x = torch.randn(3, 4, 6, dtype=torch.float64)
        want = train(block(None), x)
        net = block(mesh)
        with CommDebugMode() as mode, fused_collectives() as calls:
            got = train(net, x.chunk(2, 1)[mesh.get_local_rank()].contiguous())
    want[:2] = [t.chunk(2, 1)[mesh.get_local_rank()] for t in want[:2]]
    error = max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))
    moved = {op: n for op, n in mode.get_comm_counts().items() if "matmul" in op}
    return error, calls.get_counts(), moved


def test_a_block_with_a_cut_sequence_equals_one_process(patched: ProcessPool) -> None:
    for error, counts, moved in patched.run(exact):
        assert error < 1e-12
        assert counts == moved == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}


def refusals() -> list[str | None]:
    """Give what the cuda backend says of groups and kinds that it cannot serve."""
    prepare()
    with override_backend(Symmetric()):
        mesh = DeviceMesh("cpu", [1, 0])
        comm = mesh.communicator(0)
        x, w = torch.ones(2, 4), torch.ones(4, 2)
        fused: Any = mesh.backend.capabilities.fused
        assert fused("matmul_all_reduce", comm) is None
        kernel = fused("all_gather_matmul", comm)
        order = kernel.refusal(x, w)
        kernel.ranks = (0, 1)
        return [
            order,
            kernel.refusal(x, w.double()),
            kernel.refusal(x.long(), w.long()),
            kernel.refusal(x, w),
            kernel.refusal(x.to("meta"), w),
        ]


def test_what_has_no_kernel_is_refused_alike(patched: ProcessPool) -> None:
    dtypes = "the dtypes must be one of float16, bfloat16, float32, float64, but are "
    for said in patched.run(refusals):
        assert said == [
            "the mesh must list the group's ranks in ascending order",
            f"{dtypes}float32, float64",
            f"{dtypes}int64, int64",
            None,
            "the matrices must be on cpu",
        ]


def unlike() -> str:
    """Fuse on one rank only, in checked mode."""
    prepare()
    with override_backend(Symmetric()):
        mesh = DeviceMesh("cpu", [0, 1], check=True)
        net = block(mesh)[0]
        x = torch.ones(1, 2, 6).double()
        with fused_collectives():
            net(x)
        try:
            if mesh.get_local_rank():
                net(x)
            else:
                with fused_collectives():
                    net(x)
        except BackendError as error:
            return str(error)
    return "not noticed"


def test_a_rank_that_does_not_fuse_is_named_in_checked_mode(patched: ProcessPool) -> None:
    for text in patched.run(unlike):
        assert "every rank of the group (0, 1) must make the same call" in text
        assert "all_gather_matmul(x=(2, 6), w=(6, 4), dtype=float64)" in text
