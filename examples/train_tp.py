# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama-style model with tensor parallelism and check it against one process.

    torchrun --nproc-per-node 2 examples/train_tp.py

Every rank trains its share of the model, then the whole model by itself on the same batches from
the same seed. The run ends with PASS only if the two agree: the loss of every step, and every
parameter at the end, gathered from the ranks. Otherwise it ends with FAIL and exit status 1.
"""

import argparse
import math
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import batches, read_text
from model import Config, Decoder, tp_plan
from report import Progress, cost_table, loss_table, write_plot
from torch import nn

from hyper_parallel import init_device_mesh, parallelize_module

BATCH = 8
LOSS_LIMIT = 1e-5
PARAMETER_LIMIT = 1e-4


@dataclass
class Run:
    """One finished training: its losses, speed and the bytes it held on this rank."""

    model: nn.Module
    losses: list[float]
    rate: float
    parameters: int
    state: int


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharded or not."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held_bytes(tensors) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


class LinearWithoutReduction(nn.Linear):
    """A column-parallel linear whose author forgot the reduction in backward.

    Forward is right: every rank multiplies the whole input by its columns. The gradient of the
    input is then a sum over the ranks, of which each rank computes one term, and here each keeps
    just its own. Overriding __call__ leaves out the hooks that would have added the terms.
    """

    def __call__(self, x):
        bias = None if self.bias is None else local(self.bias)
        return F.linear(local(x), local(self.weight), bias)


def break_gradient_reduction(model: Decoder) -> None:
    """The negative control: no attention or MLP reduces the gradient of its input any more."""
    for block in model.layers:
        attention, mlp = block.attention, block.mlp
        for linear in (attention.wq, attention.wk, attention.wv, mlp.gate, mlp.up):
            linear.__class__ = LinearWithoutReduction


def train(model, config, text, device, args, progress) -> Run:
    """Train `model` on the batches that the seed determines. It may be parallelized or not."""
    optimizer = torch.optim.AdamW(
        # A larger eps than the default: Adam divides a gradient by its own size, which would blow
        # up mere rounding where the gradient is next to nothing. The plain loop (foreach=False)
        # takes sharded and whole parameters alike.
        model.parameters(),
        lr=args.lr,
        eps=1e-6,
        foreach=False,
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    losses, started = [], time.perf_counter()
    rate = 0.0
    data = batches(text, BATCH, config.max_seq, args.steps, args.seed)
    for step, (inputs_BT, targets_BT) in enumerate(data, 1):
        logits_BTV = model(inputs_BT.to(device))
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.to(device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        losses.append(loss.item())
        if step == 1:  # not counted: it includes one-time set-up
            started = time.perf_counter()
        else:
            elapsed = time.perf_counter() - started
            rate = (step - 1) * inputs_BT.numel() / elapsed
        progress(step, losses[-1], rate)
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return Run(model, losses, rate, held_bytes(model.parameters()), held_bytes(state))


def build(config: Config, seed: int, device) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(config).to(device)


def train_both(config, text, device, mesh, args, quiet) -> tuple[Run, Run]:
    """The tensor-parallel run, then the same one on the whole model within this process.

    Every rank does the second one by itself, rather than waiting for one rank to do it: a long
    wait could run into the time limit of collectives.
    """
    model = build(config, args.seed, device)
    parallelize_module(model, mesh, tp_plan(config, args.sequence_parallel))
    model.tie()
    if args.break_gradient_reduction:
        break_gradient_reduction(model)
    with Progress("tensor parallel", args.steps, quiet) as progress:
        parallel = train(model, config, text, device, args, progress)
    model = build(config, args.seed, device)
    with Progress("one process", args.steps, quiet) as progress:
        single = train(model, config, text, device, args, progress)
    return parallel, single


def worst(differences: dict) -> tuple[float, str]:
    """The largest difference and its name. One that is not a number counts as infinite."""
    finite = {name: math.inf if math.isnan(d) else d for name, d in differences.items()}
    name = max(finite, key=finite.get)
    return finite[name], str(name)


@torch.no_grad()
def compare(parallel: Run, single: Run) -> tuple[tuple[float, str], tuple[float, str]]:
    """The largest differences in loss and in a parameter, over all ranks."""
    steps = enumerate(zip(parallel.losses, single.losses, strict=True), 1)
    losses = {f"step {step}": abs(a - b) for step, (a, b) in steps}
    parameters = {}
    reference = dict(single.model.named_parameters())
    ours = dict(parallel.model.named_parameters())
    if ours.keys() != reference.keys():
        raise RuntimeError(f"parameters differ: {sorted(ours.keys() ^ reference.keys())}")
    for name, parameter in ours.items():
        # A plain parameter is one that every rank holds whole; each rank checks its own copy.
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        parameters[name] = (whole - reference[name]).abs().max().item()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (worst(losses), worst(parameters)))
    by_loss, by_parameter = zip(*found, strict=True)
    return max(by_loss), max(by_parameter)


def report(parallel, single, loss, parameter, tp, plot) -> None:
    """Print the tables and the verdict."""
    print()
    print(loss_table(parallel.losses, single.losses))
    print()
    print(cost_table(tp, parallel, single))
    print()
    print(f"max |loss difference|      {loss[0]:.1e} (limit {LOSS_LIMIT:.0e}), at {loss[1]}")
    limit = f"(limit {PARAMETER_LIMIT:.0e})"
    print(f"max |parameter difference| {parameter[0]:.1e} {limit}, in {parameter[1]}")
    if plot:
        print(write_plot(plot, tp, parallel.losses, single.losses))
    failed = []
    if not loss[0] <= LOSS_LIMIT:
        failed.append(f"the loss differs by {loss[0]:.1e} at {loss[1]}")
    if not parameter[0] <= PARAMETER_LIMIT:
        failed.append(f"the parameter {parameter[1]} differs by {parameter[0]:.1e}")
    print("FAIL: " + " and ".join(failed) if failed else "PASS", flush=True)


def header(config: Config, text, tp: int, args) -> None:
    plan = tp_plan(config, args.sequence_parallel)
    styles = Counter(type(style).__name__ for style in plan.values())
    size = sum(p.numel() for p in Decoder(config).parameters())
    print(
        f"model     {size:,} parameters: {config.layers} layers, width {config.dim}, "
        f"{config.heads} heads on {config.kv_heads} key/value heads, MLP {config.mlp_hidden}, "
        f"{'tied' if config.tied else 'untied'} head, {'biases' if config.bias else 'no biases'}"
    )
    source = args.data or "Python's standard library"
    print(f"data      {len(text):,} bytes of {source}; {args.steps} steps of {BATCH} x", end=" ")
    print(f"{config.max_seq} bytes, seed {args.seed}")
    print(f"parallel  {tp} ranks on {args.device}", end="")
    print(", sequence parallel" if args.sequence_parallel else "")
    print("plan      " + ", ".join(f"{count} {name}" for name, count in sorted(styles.items())))
    if args.break_gradient_reduction:
        print("control   gradients are NOT reduced over the ranks: this run must end with FAIL")
    print(flush=True)


def make_parser(world: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--tp", type=int, default=world, help="ranks that share the model (default: all)")
    flag("--device", choices=("cpu", "cuda", "npu"), default="cpu", help="default: cpu")
    flag("--sequence-parallel", action="store_true", help="divide norms along the sequence too")
    flag("--steps", type=int, default=60, help="training steps (default: 60)")
    flag("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    flag("--model-dim", type=int, default=128, help="width of the model (default: 128)")
    flag("--heads", type=int, default=8, help="query heads (default: 8)")
    flag("--kv-heads", type=int, default=4, help="key/value heads (default: 4)")
    flag("--tied", action="store_true", help="let embedding and head share their weight")
    flag("--untied", dest="tied", action="store_false", help="give each its own (default)")
    flag("--bias", action="store_true", help="give attention and MLP linears a bias")
    flag("--data", metavar="FOLDER", help="train on its text files (default: Python's library)")
    flag("--seed", type=int, default=0, help="seed of weights and batches (default: 0)")
    flag(
        "--plot",
        metavar="FILE",
        default="train_tp.png",
        help="where to draw both loss curves (default: train_tp.png; '' draws none)",
    )
    flag(
        "--break-gradient-reduction",
        action="store_true",
        help="negative control: leave out the reduction of gradients; the run must FAIL",
    )
    return parser


def check_args(parser: argparse.ArgumentParser, args, world: int) -> Config:
    """Refuse what cannot work, before any process waits for another."""
    if world < 1:
        parser.error("start it as: torchrun --nproc-per-node 2 examples/train_tp.py")
    if args.tp != world:
        parser.error(f"--tp {args.tp} needs {args.tp} processes, but {world} were started")
    if args.break_gradient_reduction and world < 2:
        parser.error("--break-gradient-reduction needs at least 2 processes")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    folder = Path(args.plot).parent
    if not folder.is_dir():
        parser.error(f"--plot: there is no folder {folder}")
    try:
        config = Config(
            dim=args.model_dim,
            heads=args.heads,
            kv_heads=args.kv_heads,
            bias=args.bias,
            tied=args.tied,
        )
        config.check_divides(args.tp, args.sequence_parallel)
    except ValueError as error:
        parser.error(str(error))
    return config


def main() -> int:
    world = int(os.environ.get("WORLD_SIZE", 0))
    parser = make_parser(world)
    args = parser.parse_args()
    config = check_args(parser, args, world)
    try:
        text = read_text(args.data, at_least=BATCH * (config.max_seq + 1))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        mesh = init_device_mesh(args.device, (args.tp,), mesh_dim_names=("tp",))
        # Only now: with a backend that comes from a plug-in, the mesh makes its name known.
        on_cpu = args.device == "cpu"
        device = torch.device("cpu" if on_cpu else f"{args.device}:{os.environ['LOCAL_RANK']}")
        quiet = dist.get_rank() != 0
        if not quiet:
            header(config, text, args.tp, args)
        parallel, single = train_both(config, text, device, mesh, args, quiet)
        loss, parameter = compare(parallel, single)
        if not quiet:
            report(parallel, single, loss, parameter, args.tp, args.plot)
        # The launcher stops the other ranks when one exits with an error: not before rank 0 has
        # printed its report.
        dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0 if loss[0] <= LOSS_LIMIT and parameter[0] <= PARAMETER_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
