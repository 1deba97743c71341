# SPDX-License-Identifier: Apache-2.0
"""Timing of several variants of one computation side by side, and counting of their collectives."""

import argparse
import gc
import json
import logging
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

_COLLECTIVES = ("all", "broadcast", "gather", "recv", "reduce", "scatter", "send")


@dataclass
class Candidate:
    """One variant of one case, and what was measured of it."""

    name: str
    call: Callable[[], object]
    collectives: dict[str, int] = field(default_factory=dict)
    model: nn.Module | None = None
    x: Tensor | None = None
    calls_per_burst: int = 0
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one variant: microseconds of CPU time per call, ratios to the baseline."""

    name: str
    collectives: dict[str, int]
    min_us: float
    median_us: float
    ratio_of_mins: float
    median_ratio: float
    spread: float


class Collectives(TorchDispatchMode):
    """Count the collectives that reach torch's dispatcher, and the bytes that they fill, by kind.

    `torch.distributed`, the functional collectives and the methods of a ProcessGroup all go there,
    under DTensor's own operations too; a call on a group's backend does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.filled: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Let DTensors of either kind unfold first, so that what they issue comes back here.
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        # c10d has allreduce_, the functional collectives have all_reduce: one name for both.
        name = func.__name__.partition(".")[0].replace("_", "")
        if "c10d" in func.namespace and name.startswith(_COLLECTIVES):
            filled = args[0] if func.namespace == "c10d" else result
            while isinstance(filled, (list, tuple)):
                filled = filled[0]
            self.counts[name] += 1
            self.filled[name] += filled.nbytes
        return result


def count_collectives(call: Callable[[], Tensor]) -> dict[str, int]:
    """Return how often each kind of collective is issued by one call."""
    with Collectives() as seen:
        call()
    return dict(seen.counts)


def local_of(tensor: Tensor) -> Tensor:
    """Return the local part of a result, once it is there."""
    with torch.no_grad():
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
        return tensor.wait() if hasattr(tensor, "wait") else tensor


def burst(call: Callable[[], object], num_calls: int) -> float:
    """Return the CPU seconds that one call takes in a burst of `num_calls`."""
    start = time.process_time()
    for _ in range(num_calls):
        call()
    return (time.process_time() - start) / num_calls


@contextmanager
def _quiet_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def measure(
    candidates: list[Candidate], *, num_repeats: int, burst_seconds: float, baseline: str = ""
) -> list[Row]:
    """Time one burst per repeat, in an order that changes with the repeat.

    Ratios are to the candidate called `baseline`, by default the first.
    """
    for candidate in candidates:
        burst(candidate.call, 20)
        per_call = max(burst(candidate.call, 20), 1e-6)
        candidate.calls_per_burst = max(2, round(burst_seconds / per_call))
    with _quiet_collector():
        for repeat in range(num_repeats):
            shift = repeat % len(candidates)
            order = candidates[shift:] + candidates[:shift]
            # Every second repeat runs backward, so that no variant always follows the same one.
            for candidate in order if repeat % 2 == 0 else reversed(order):
                candidate.call()
                candidate.times.append(burst(candidate.call, candidate.calls_per_burst))
            gc.collect()
    base = next((c for c in candidates if c.name == baseline), candidates[0])
    return [_row_of(candidate, base) for candidate in candidates]


def _row_of(candidate: Candidate, baseline: Candidate) -> Row:
    """Return the figures of `candidate` relative to those of `baseline`."""
    ours, base = candidate.times, baseline.times
    thirds = [min(ours[i::3]) / min(base[i::3]) for i in range(3)]
    ratio = min(ours) / min(base)
    return Row(
        name=candidate.name,
        collectives=candidate.collectives,
        min_us=min(ours) * 1e6,
        median_us=statistics.median(ours) * 1e6,
        ratio_of_mins=ratio,
        median_ratio=statistics.median(a / b for a, b in zip(ours, base, strict=True)),
        spread=(max(thirds) - min(thirds)) / ratio,
    )


def make_parser(doc: str, *, repeats: int) -> argparse.ArgumentParser:
    """Return a parser of what the benchmarks of host cost share."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument(
        "--repeats", type=int, default=repeats, help=f"bursts a variant ({repeats})"
    )
    parser.add_argument("--quick", action="store_true", help="6 short bursts: is it running?")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    return parser


def effort(options: argparse.Namespace) -> dict[str, float]:
    """Return what `measure` shall do: the number of bursts and their length."""
    if options.quick:
        return {"num_repeats": 6, "burst_seconds": 0.001}
    return {"num_repeats": max(3, options.repeats), "burst_seconds": 0.004}


@contextmanager
def fake_rank(num_ranks: int) -> Iterator[None]:
    """Be rank 0 of a "fake" process group, whose collectives return at once."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # torch says where it would like another mesh or collective
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def report(
    options: argparse.Namespace, about: str, tables: list[Table], cases: object, **facts: object
) -> None:
    """Print tables under what they were measured with; write a file of it all if asked for."""
    python = platform.python_version()
    console = Console(width=None if Console().is_terminal else 120)
    console.print(f"torch {torch.__version__}, Python {python}, {about}")
    for table in tables:
        console.print(table)
    if options.json:
        facts |= {"torch": torch.__version__, "python": python, **effort(options), "cases": cases}
        with open(options.json, "w", encoding="ascii") as file:
            json.dump(facts, file, indent=2)
