# SPDX-License-Identifier: Apache-2.0
"""Peak memory and bytes sent for the loss of a language model's last layer, one rank of several.

    python benchmarks/loss.py [--rows 2048 --vocab 32768 --hidden 256 --ranks 8 --device cpu]

Each variant runs forward and backward in a process of its own, on torch's fake process group (which
sends nothing), and reports how far the peak of the memory (on the CPU the process's, elsewhere what
torch allocated) rose above what inputs, parameters and their gradients take. Bytes are those of the
tensors that collectives fill on the rank.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _harness import Collectives, fake_rank
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.parallel import loss_parallel as torch_loss_parallel

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    init_device_mesh,
    linear_cross_entropy,
    loss_parallel,
)

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mesh():
    return init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))


def ours(x: torch.Tensor, w: torch.Tensor, placement: object) -> torch.Tensor:
    logits = DTensor.from_local(F.linear(x, w), mesh(), [Shard(1)])
    return logits if placement is None else logits.redistribute(mesh(), [placement])


def gathered(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(ours(x, w, Replicate()).to_local(), target)


def without_gathering(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with loss_parallel():
        return F.cross_entropy(ours(x, w, None), target).to_local()


def chunked(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    head = DTensor.from_local(w, mesh(), [Shard(0)])
    return linear_cross_entropy(x, head, target, chunk_size=256)


def of_torch(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    torch_mesh = dist.device_mesh.init_device_mesh(x.device.type, (dist.get_world_size(),))
    logits = TorchDTensor.from_local(F.linear(x, w), torch_mesh, [TorchShard(1)])
    given = torch_distribute(target, torch_mesh, [TorchReplicate()], src_data_rank=None)
    with torch_loss_parallel():
        loss = F.cross_entropy(logits, given).to_local()
        loss.backward()
    return loss.detach()


VARIANTS: dict[str, Loss] = {
    "gathered logits": gathered,
    "loss_parallel of torch": of_torch,
    "loss_parallel": without_gathering,
    "linear_cross_entropy, 256 rows at a time": chunked,
}


def run_one(name: str, args: argparse.Namespace) -> dict[str, int]:
    """Run one variant twice: the first time loads code, the second is measured."""
    torch.set_default_device(args.device)
    torch.manual_seed(0)
    x = torch.randn(args.rows, args.hidden).requires_grad_()
    w = torch.randn(args.vocab // args.ranks, args.hidden).requires_grad_()
    small = slice(0, 8)
    target = torch.randint(args.vocab // args.ranks, (args.rows,))
    step(VARIANTS[name], x[small].detach().requires_grad_(), w, target[small])
    x.grad = torch.zeros_like(x)
    before = taken(args.device)
    with Collectives() as seen:
        step(VARIANTS[name], x, w, target)
    peak = taken(args.device, at_most=True)
    return {"peak": peak - before, "filled": sum(seen.filled.values())}


def step(loss: Loss, x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> None:
    result = loss(x, w, target)
    if result.requires_grad:
        result.backward()


def taken(device: str, *, at_most: bool = False) -> int:
    """Return the bytes in use now, or the most there were."""
    if device != "cpu":
        memory = torch.get_device_module(device)
        return memory.max_memory_allocated() if at_most else memory.memory_allocated()
    if at_most:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        with fake_rank(args.ranks):
            print(json.dumps(run_one(args.one, args)))
        return
    whole, own = (args.rows * args.vocab * 4 / n / 2**20 for n in (1, args.ranks))
    table = Table(title=f"logits: whole {whole:.0f} MiB, of one rank {own:.0f} MiB")
    for column in ("variant", "peak above inputs, MiB", "filled by collectives, MiB"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        filled = found["filled"] / 2**20
        table.add_row(name, f"{found['peak'] / 2**20:.0f}", f"{filled:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
