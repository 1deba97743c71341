# SPDX-License-Identifier: Apache-2.0
"""Fused matmuls of the npu backend on the simulated NPU, which refuses what MC2 refuses."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    Replicate,
    RowwiseParallel,
    Shard,
    init_device_mesh,
)
from hyper_parallel.conformance import run_conformance
from hyper_parallel.parallel import fused_collectives
from hyper_parallel.runtime import DeviceMesh
from support.device import SIMULATED_NPU
from support.procs import ProcessPool

_found = importlib.util.find_spec("torch_npu")
pytestmark = pytest.mark.skipif(
    _found is not None and not str(_found.origin).startswith(SIMULATED_NPU),
    reason="looks into the simulated NPU, and torch_npu is installed",
)
WIDE, HIDDEN = 256, 512
SEQUENCE = Shard(1)


@pytest.fixture(scope="module")
def npus() -> Iterator[ProcessPool]:
    """Two processes on the simulated NPU, whatever device other tests run on."""
    pool = ProcessPool(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPER_PARALLEL_TEST_DEVICE", "npu")
        yield pool
    pool.close()


def whole_numbers(*shape: int, share: float = 0.03) -> torch.Tensor:
    """Draw -1, 0 and 1, mostly 0: their products and sums are exact in float16."""
    signs = torch.randint(0, 2, shape, device="cpu") * 2 - 1
    return (signs * (torch.rand(shape, device="cpu") < share)).half().to("npu")


def block(in_features: int = WIDE, hidden: int = HIDDEN) -> nn.Sequential:
    """Make an MLP of whole numbers."""
    net = nn.Sequential(nn.Linear(in_features, hidden), nn.ReLU(), nn.Linear(hidden, in_features))
    for param in net.half().parameters():
        param.data.copy_(whole_numbers(*param.shape))
    return net


def parallel(net: nn.Module, mesh: DeviceMesh, place: Any = SEQUENCE) -> nn.Module:
    """Cut it, with a sequence that is cut on both sides, or Replicate."""
    ColwiseParallel(input_layouts=place).apply(net[0], mesh)
    RowwiseParallel(output_layouts=place).apply(net[2], mesh)
    return net


def train(net: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Give output and gradients: input, parameters in order."""
    x = x.clone().requires_grad_()
    y = net(x)
    y.backward(grad)
    grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in net.parameters()]
    return [y.detach().cpu(), x.grad.cpu(), *(g.cpu() for g in grads)]


def exact() -> tuple[list[bool], dict[str, int], dict[str, int], str]:
    """Train a block fused, apart and in one process; compare every bit."""
    mesh = init_device_mesh("npu", (2,))
    torch.manual_seed(0)
    dense = block()
    x, grad = whole_numbers(2, 6, WIDE, share=0.1), whole_numbers(2, 6, WIDE, share=0.1)
    want = train(copy.deepcopy(dense), x, grad)
    mine = [t.chunk(2, 1)[mesh.get_local_rank()].contiguous() for t in (x, grad)]
    apart = train(parallel(copy.deepcopy(dense), mesh), *mine)
    net = parallel(dense, mesh)
    with CommDebugMode() as mode, fused_collectives() as calls:
        fused = train(net, *mine)
    same = [torch.equal(a, b) for a, b in zip(fused, apart, strict=True)]
    cut = [t.chunk(2, 1)[mesh.get_local_rank()] for t in want[:2]]
    same += [torch.equal(a, b) for a, b in zip(fused, [*cut, *want[2:]], strict=True)]
    same.append(all(t.any() for t in want))
    moved = {op: n for op, n in mode.get_comm_counts().items() if "matmul" in op}
    return same, calls.get_counts(), moved, str(calls)


def test_a_block_with_a_cut_sequence_is_exact_in_values_and_gradients(npus: ProcessPool) -> None:
    for same, counts, moved, table in npus.run(exact):
        assert same == [True] * 13
        assert counts == moved == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}, table
        assert "no: " not in table


def inference() -> tuple[bool, dict[str, int]]:
    """Run a block with Replicate outside and no gradients on a chip that has the kernel."""
    mesh = init_device_mesh("npu", (2,))
    torch.manual_seed(0)
    dense = block()
    x = whole_numbers(3, WIDE, share=0.1)
    net = parallel(copy.deepcopy(dense), mesh, Replicate())
    module = torch.get_device_module("npu")
    before, module.get_device_name = module.get_device_name, lambda: "Ascend910B2"
    try:
        with torch.no_grad(), fused_collectives() as calls:
            return torch.equal(net(x).cpu(), dense(x).cpu()), calls.get_counts()
    finally:
        module.get_device_name = before


def test_an_all_reduce_is_fused_without_gradients(npus: ProcessPool) -> None:
    assert npus.run(inference) == [(True, {"matmul_all_reduce": 1})] * 2


def refusals() -> dict[str, set[str | None]]:
    """Go over each limit, where results must stay; give the reasons that were counted."""
    mesh = init_device_mesh("npu", (2,))
    backwards = DeviceMesh("npu", [1, 0])
    reasons: dict[str, set[str | None]] = {}

    def run(case: str, net: nn.Sequential, x: torch.Tensor, place: Any = SEQUENCE) -> None:
        on = backwards if case == "order" else mesh
        want = parallel(copy.deepcopy(net), on, place)(x)
        with fused_collectives() as calls:
            got = parallel(net, on, place)(x)
        assert torch.equal(got, want), case
        assert not calls.get_counts(), case
        reasons[case] = {call.refusal for call in calls.counts}

    run("dtype", block().float(), torch.ones(1, 2, WIDE))
    run("inner", block(200, 300), torch.ones(1, 2, 200).half())
    run("uneven", block(WIDE, HIDDEN + 1), torch.ones(1, 2, WIDE).half())
    run("no rows", block(), torch.ones(0, 2, WIDE).half())
    run("order", block(), torch.ones(1, 2, WIDE).half())
    run("gradients", block(), torch.ones(1, 2, WIDE).half(), Replicate())
    with torch.no_grad():
        run("chip", block(), torch.ones(1, 2, WIDE).half(), Replicate())
    return reasons


REFUSED = {
    "dtype": "the dtypes must be one of float16, bfloat16, but are float32, float32",
    "inner": "MC2 multiplies over 256 to 65534 entries, not ",
    "uneven": "the ranks' parts must be of one size",
    "no rows": "the matrices must have elements",
    "order": "the mesh must list the group's ranks in ascending order",
    "gradients": "kernels of this kind are for inference, and gradients are recorded",
    "chip": "MC2 has this kind on Ascend910B only, not on simulated NPU",
}


def test_every_limit_falls_back_and_is_counted(npus: ProcessPool) -> None:
    for reasons in npus.run(refusals):
        assert reasons.keys() == REFUSED.keys()
        for case, found in reasons.items():
            assert found
            assert all(str(text).startswith(REFUSED[case]) for text in found), (case, found)


def groups() -> list[set[str | None] | str | None]:
    """Use two groups of one process, then ask for a group of three and for a private format."""
    import torch.distributed as dist
    import torch_npu

    mesh = init_device_mesh("npu", (2,))
    other = DeviceMesh.from_group(dist.new_group([0, 1]), "npu")
    reasons: list[Any] = []
    for on in (mesh, other):
        with fused_collectives() as calls:
            parallel(block(), on)(torch.ones(1, 2, WIDE).half())
        reasons.append({call.refusal for call in calls.counts})
    two, three = (
        SimpleNamespace(ranks=ranks, group=mesh.get_group()) for ranks in ((0, 1), (0, 1, 2))
    )
    x, w = torch.ones(2, WIDE).half(), torch.ones(WIDE, 2).half()
    reasons.append(mesh.backend.capabilities.fused("all_gather_matmul", three).refusal(x, w))
    tiles = torch_npu.npu_format_cast(w, torch_npu.Format.FRACTAL_NZ)
    kernel = mesh.backend.capabilities.fused("all_gather_matmul", two)
    return [*reasons, kernel.refusal(x, tiles), kernel.refusal(x, w)]


def test_one_group_some_sizes_and_plain_formats_are_served(npus: ProcessPool) -> None:
    for reasons in npus.run(groups):
        assert reasons == [
            {None},
            {"MC2 is used with one group in a process, here that of ranks (0, 1)"},
            "MC2 is used with (2, 4, 8) ranks, not 3",
            "MC2 is used with tensors in the plain memory format",
            None,
        ]


def conformance() -> dict[str, tuple[str, str]]:
    """Run the suite's checks of fused matmuls on this rank."""
    report = run_conformance("npu", world="here", only=["fused matmul"])
    return {one.case: (one.status, one.detail) for one in report.results}


def test_the_conformance_suite_checks_the_kernels(npus: ProcessPool) -> None:
    for found in npus.run(conformance):
        assert found == {
            "all_gather_matmul": ("pass", ""),
            "matmul_reduce_scatter": ("pass", ""),
            "matmul_all_reduce": ("", REFUSED["chip"]),
        }


def own_refusals() -> list[str]:
    """Call the simulated kernels outside of their limits."""
    import torch_npu

    mesh = init_device_mesh("npu", (2,))
    backend = mesh.get_group()._get_backend(torch.device("npu"))
    name = backend.get_hccl_comm_name(mesh.get_rank())
    x, w = torch.ones(4, WIDE).half(), torch.ones(WIDE, 3).half()
    tiles = torch_npu.npu_format_cast(w, torch_npu.Format.FRACTAL_NZ)
    calls = {
        "float16 or bfloat16": (x.float(), w.float()),
        "must be 2-D": (x[None], w),
        "x1 must not be transposed": (torch.ones(WIDE, 4).half().t(), w),
        "x2 may be transposed": (x, torch.ones(WIDE, 6).half()[:, ::2]),
        "k must be in": (x[:, :8].contiguous(), w[:8]),
        "must have elements": (x[:0], w),
        "format must be ND": (x, tiles),
        "m must be a multiple": (x[:3], w),
    }
    missed = []
    for text, (a, b) in calls.items():
        try:
            torch_npu.npu_mm_reduce_scatter_base(a, b, name, 2)
            missed.append(text)
        except RuntimeError as error:
            missed += [] if text in str(error) else [str(error)]
    return missed


def test_mc2_refuses_what_it_documents(npus: ProcessPool) -> None:
    assert npus.run(own_refusals) == [[], []]
