# SPDX-License-Identifier: Apache-2.0
"""Timing of several variants of one computation side by side, and counting of their collectives."""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
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


class _CollectiveCounter(TorchDispatchMode):
    """Count the collectives that reach torch's dispatcher, under DTensor's own operations too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Let a tensor subclass unfold first, so that what it issues comes back here.
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        # c10d has allreduce_, the functional collectives have all_reduce: one name for both.
        name = func.__name__.partition(".")[0].replace("_", "")
        if "c10d" in func.namespace and name.startswith(_COLLECTIVES):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(call: Callable[[], Tensor]) -> dict[str, int]:
    """Return how often each kind of collective is issued by one call.

    Only what goes through torch's dispatcher is seen, as `torch.distributed`, the functional
    collectives and the methods of a ProcessGroup all do; a call on a group's backend is not.
    """
    with _CollectiveCounter() as counter:
        call()
    return dict(counter.counts)


def _burst(candidate: Candidate, num_calls: int) -> float:
    """Return the CPU seconds that one call takes in a burst of `num_calls`."""
    call = candidate.call
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


def measure(candidates: list[Candidate], *, num_repeats: int, burst_seconds: float) -> None:
    """Fill `times` with one burst per repeat, in an order that changes with the repeat."""
    for candidate in candidates:
        _burst(candidate, 20)
        per_call = max(_burst(candidate, 20), 1e-6)
        candidate.calls_per_burst = max(2, round(burst_seconds / per_call))
    with _quiet_collector():
        for repeat in range(num_repeats):
            shift = repeat % len(candidates)
            order = candidates[shift:] + candidates[:shift]
            # Every second repeat runs backward, so that no variant always follows the same one.
            for candidate in order if repeat % 2 == 0 else reversed(order):
                candidate.call()
                candidate.times.append(_burst(candidate, candidate.calls_per_burst))
            gc.collect()


def row_of(candidate: Candidate, baseline: Candidate) -> Row:
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
