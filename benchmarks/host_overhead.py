# SPDX-License-Identifier: Apache-2.0
"""Host cost of tensor parallelism per call, against hand-written Megatron-style functions.

One process stands for rank 0 of 8 on torch's "fake" process group, whose collectives return at
once, and the models are tiny, so what is measured is the work of the host: Python, autograd and
dispatch. Every variant computes the same local shapes, and this is checked, with the values and
the gradients, before anything is timed.

    python benchmarks/host_overhead.py
    python benchmarks/host_overhead.py --only layer --mode training --json result.json

The variants run in short bursts in rotating order within each repeat, in CPU time with the garbage
collector off. The ratio of the minima is the figure to read; the columns beside it are the median
of the ratios within each repeat, and the spread: how far the ratio of minima differs between three
interleaved thirds of the repeats.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType

import _harness
import torch
import torch.distributed as dist
from _harness import Candidate, Row
from megatron_reference import COLUMN, MODELS, ROW, Sizes, add_collectives, local_state
from rich.table import Table
from torch import Tensor, nn

NUM_RANKS = 8
RANK = 0
SIZES = Sizes()
BASELINE = "hand (f per linear)"


def _local(full: nn.Module) -> nn.Module:
    """Return a plain model of the local shards."""
    model = type(full)(SIZES.shard(NUM_RANKS))
    model.load_state_dict(local_state(full, rank=RANK, num_ranks=NUM_RANKS))
    return model


def _hand(full: nn.Module, *, per_block: bool) -> nn.Module:
    """Return the hand-written tensor-parallel model."""
    model = _local(full)
    add_collectives(model, dist.group.WORLD, per_block=per_block)
    return model


def _parallelized(full: nn.Module, api: ModuleType, init_device_mesh: Callable) -> nn.Module:
    """Return `full` after `api.parallelize_module` with the plan of torch's tutorial."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    styles = dict.fromkeys(COLUMN, api.ColwiseParallel) | dict.fromkeys(ROW, api.RowwiseParallel)
    names = [name for name, _ in full.named_modules()]
    plan = {name: styles[last]() for name in names if (last := name.rpartition(".")[2]) in styles}
    # Each rank keeps its own part: the fake group moves no data, so a scatter would leave noise.
    return api.parallelize_module(full, mesh, plan, src_data_rank=None)


def _torch_tp(full: nn.Module) -> nn.Module:
    """Return the model that torch's own tensor parallelism makes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    return _parallelized(full, parallel, init_device_mesh)


def _hyper_parallel(full: nn.Module) -> nn.Module:
    """Return the model that hyper_parallel makes."""
    import hyper_parallel

    return _parallelized(full, hyper_parallel, hyper_parallel.init_device_mesh)


VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "local": _local,
    BASELINE: lambda full: _hand(full, per_block=False),
    "hand (f per block)": lambda full: _hand(full, per_block=True),
    "torch TP": _torch_tp,
    "hyper_parallel": _hyper_parallel,
}


def _make_call(model: nn.Module, x: Tensor, *, training: bool) -> Callable[[], Tensor]:
    """Return a function that runs one inference call or one forward and backward on `x`."""
    seed = torch.linspace(-1, 1, x.numel()).view(x.shape)
    leaves = [x, *model.parameters()]

    # An asynchronous result is not done before it has been waited for.
    def finished(out: Tensor) -> Tensor:
        return out if type(out) is Tensor else out.wait()

    def infer() -> Tensor:
        with torch.no_grad():
            return finished(model(x))

    def train() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        out = model(x)
        out.backward(seed)
        return finished(out)

    return train if training else infer


def _results(candidate: Candidate, *, training: bool) -> dict[str, Tensor]:
    """Return by name the output, the local parameters and, in training, the local gradients."""
    results = {"output": _harness.local_of(candidate.call())}
    for name, parameter in candidate.model.named_parameters():
        results[name] = _harness.local_of(parameter)
        if training and parameter.grad is not None:
            results[f"{name}.grad"] = _harness.local_of(parameter.grad)
    if training:
        results["input.grad"] = _harness.local_of(candidate.x.grad)
    return results


def _check_same_work(candidates: list[Candidate], *, training: bool) -> None:
    """Refuse to time variants that differ in local parameters, output or gradients.

    The fake group's all-reduce leaves its tensor as it is, so all values must agree.
    """
    first = candidates[0].name
    expected = _results(candidates[0], training=training)
    for candidate in candidates[1:]:
        actual = _results(candidate, training=training)
        if actual.keys() != expected.keys():
            names = sorted(actual.keys() ^ expected.keys())
            raise SystemExit(f"{candidate.name}: all or no variant must have {names}.")
        for name, want in expected.items():
            shape = tuple(actual[name].shape)
            if shape != want.shape:
                must = f"local {name} must have shape {tuple(want.shape)}"
                raise SystemExit(f"{candidate.name}: {must}, but got {shape=}.")
        for name, want in expected.items():
            if not torch.allclose(actual[name], want, rtol=1e-4, atol=1e-5):
                error = (actual[name] - want).abs().max().item()
                raise SystemExit(
                    f"{candidate.name}: {name} must equal {first}'s, but got {error=}."
                )


def run_case(model: str, mode: str, *, names: list[str], **effort: float) -> list[Row]:
    """Measure the named variants of one model of `MODELS` in "inference" or "training"."""
    training = mode == "training"
    candidates = []
    for name in names:
        torch.manual_seed(0)  # The same weights for every variant.
        built = VARIANTS[name](MODELS[model](SIZES)).train(training)
        torch.manual_seed(1)
        x = torch.randn(SIZES.batch, SIZES.sequence, SIZES.hidden, requires_grad=training)
        call = _make_call(built, x, training=training)
        call()
        candidates.append(Candidate(name, call, _harness.count_collectives(call), built, x))
    _check_same_work(candidates, training=training)
    return _harness.measure(candidates, baseline=BASELINE, **effort)


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    for heading in ("min us", "median us", "min ratio", "median ratio", "spread"):
        table.add_column(heading, justify="right")
    table.add_column("collectives")
    for row in rows:
        counts = ", ".join(f"{count} {kind}" for kind, count in row.collectives.items())
        table.add_row(
            row.name,
            f"{row.min_us:.1f}",
            f"{row.median_us:.1f}",
            f"{row.ratio_of_mins:.2f}",
            f"{row.median_ratio:.2f}",
            f"{row.spread:.1%}",
            counts or "none",
        )
    return table


def _arguments() -> argparse.Namespace:
    parser = _harness.make_parser(__doc__, repeats=200)
    parser.add_argument("--only", choices=tuple(MODELS), help="one model instead of both")
    parser.add_argument("--mode", choices=("inference", "training"), help="one mode only")
    parser.add_argument(
        "--skip", action="append", default=[], choices=tuple(VARIANTS), help="leave a variant out"
    )
    return parser.parse_args()


def main() -> None:
    """Run the cases that were asked for and print a table of each."""
    options = _arguments()
    names = [name for name in VARIANTS if name == BASELINE or name not in options.skip]
    cases, tables = [], []
    with _harness.fake_rank(NUM_RANKS):
        for model in [options.only] if options.only else MODELS:
            for mode in [options.mode] if options.mode else ("inference", "training"):
                rows = run_case(model, mode, names=names, **_harness.effort(options))
                tables.append(_table(f"{model}, {mode}", rows))
                cases.append({"model": model, "mode": mode, "rows": [asdict(row) for row in rows]})
    about = f"rank {RANK} of {NUM_RANKS}, {SIZES}"
    facts = {"num_ranks": NUM_RANKS, "sizes": asdict(SIZES), "baseline": BASELINE}
    _harness.report(options, about, tables, cases, **facts)


if __name__ == "__main__":
    main()
