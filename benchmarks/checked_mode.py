# SPDX-License-Identifier: Apache-2.0
"""What checked mode costs on gloo: every collective is compared over its group before it is made.

    torchrun --nproc-per-node 2 benchmarks/checked_mode.py

Bursts with and without checks alternate in one run, on every rank in the same order. Times are CPU
seconds of rank 0's process, all its threads; the ratio of minima is the figure to read. The last
row is a training step of an MLP of two parallel Linears: two collectives and eight matmuls.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from _harness import burst
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    RowwiseParallel,
    init_device_mesh,
    parallelize_module,
)


def _reduce(mesh: DeviceMesh, numel: int) -> Callable[[], object]:
    x, comm = torch.ones(numel), mesh.communicator(0)
    return lambda: comm.all_reduce(x, "max")


def _train(mesh: DeviceMesh, hidden: int) -> Callable[[], object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(256, hidden, requires_grad=True)
    return lambda: model(x).sum().backward()


CASES: dict[str, Callable[[DeviceMesh], Callable[[], object]]] = {
    "all_reduce, 4 KiB": lambda mesh: _reduce(mesh, 1 << 10),
    "all_reduce, 4 MiB": lambda mesh: _reduce(mesh, 1 << 20),
    "MLP 512, training step": lambda mesh: _train(mesh, 512),
}


def _measure(calls: list[Callable[[], object]], repeats: int, num_calls: int) -> list[list[float]]:
    """Give the seconds per call of each variant, one figure a burst."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        order = range(len(calls)) if repeat % 2 else reversed(range(len(calls)))
        for i in order:
            dist.barrier()
            seconds = burst(calls[i], num_calls)
            if repeat:  # the first round warms up
                times[i].append(seconds)
    return times


def main() -> None:
    """Run all cases and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=30, help="bursts per variant (30)")
    parser.add_argument("--calls", type=int, default=20, help="calls per burst (20)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (world,), check=check) for check in (False, True)]
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {world} gloo processes; CPU us per call")
    for name, make in CASES.items():
        plain, checked = _measure([make(m) for m in meshes], options.repeats, options.calls)
        if dist.get_rank() == 0:
            ratio = min(checked) / min(plain)
            medians = statistics.median(checked) / statistics.median(plain)
            print(
                f"{name}: plain {min(plain) * 1e6:.0f}, checked {min(checked) * 1e6:.0f}:"
                f" ratio of minima {ratio:.2f}, of medians {medians:.2f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
