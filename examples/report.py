# SPDX-License-Identifier: Apache-2.0
"""What the demo shows: a live line while it trains, a table, and a plot of both runs."""

import contextlib
import os
import sys
from pathlib import Path

try:
    from rich import progress as rich_progress
except ImportError:  # plain lines serve as well
    rich_progress = None


class Progress:
    """Progress of one run: a live line on a terminal, a line now and then elsewhere.

    Call it with every step's loss and rate. A silent one is for the ranks that print nothing.
    """

    def __init__(self, label: str, steps: int, silent: bool):
        self._label, self._steps, self._silent = label, steps, silent
        self._bar = self._task = None

    def __enter__(self):
        if not self._silent and rich_progress is not None and sys.stdout.isatty():
            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("{task.description:<15}"),
                rich_progress.BarColumn(),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TextColumn("loss {task.fields[loss]:.4f}"),
                rich_progress.TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            )
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._steps, loss=0.0, rate=0.0)
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, loss: float, rate: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, loss=loss, rate=rate)
        elif not self._silent and done in shown_steps(self._steps, 6):
            line = f"{self._label:<15} step {done:>4}/{self._steps}  loss {loss:.4f}"
            # The first step has no rate: it is not timed.
            print(line + (f"  {rate:>8,.0f} tokens/s" if rate else ""), flush=True)


def shown_steps(steps: int, rows: int) -> list[int]:
    """About `rows` of the steps 1..steps, the first and the last always among them."""
    stride = max(1, round(steps / rows))
    return sorted({1, *range(stride, steps, stride), steps})


def loss_table(parallel: list[float], single: list[float]) -> str:
    """Both loss curves side by side, every few steps."""
    lines = [f"{'step':>6} {'tensor-parallel':>16} {'one process':>12} {'|difference|':>13}"]
    for step in shown_steps(len(parallel), 10):
        ours, reference = parallel[step - 1], single[step - 1]
        lines.append(f"{step:>6} {ours:>16.6f} {reference:>12.6f} {abs(ours - reference):>13.1e}")
    return "\n".join(lines)


def cost_table(tp: int, parallel, single) -> str:
    """Speed and memory of both runs; each argument has `rate`, `parameters` and `state`."""
    lines = [f"{'':<26} {f'tp {tp}':>14} {'one process':>12} {'ratio':>7}"]
    for what, name in (
        ("parameter bytes per rank", "parameters"),
        ("optimizer bytes per rank", "state"),
        ("tokens/s", "rate"),
    ):
        ours, reference = getattr(parallel, name), getattr(single, name)
        ratio = ours / reference if reference else float("nan")
        lines.append(f"{what:<26} {ours:>14,.0f} {reference:>12,.0f} {ratio:>7.3f}")
    return "\n".join(lines)


def write_plot(file: str, tp: int, parallel: list[float], single: list[float]) -> str:
    """Draw both curves and their difference; return a line that says what became of it.

    Never raises for a plot that cannot be written: it must not hide the verdict of the run.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "plot: none, as matplotlib is not installed"
    steps = range(1, len(parallel) + 1)
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    above.plot(steps, single, linewidth=4, alpha=0.4, label="one process")
    above.plot(steps, parallel, linewidth=1.2, label=f"tensor parallel, {tp} ranks")
    above.set_ylabel("loss (nats per byte)")
    above.legend()
    # A difference of exactly zero has no place on a log axis.
    difference = [max(abs(a - b), 1e-8) for a, b in zip(parallel, single, strict=True)]
    below.semilogy(steps, difference, marker=".", linewidth=0.8)
    below.axhline(1e-5, linestyle="--", linewidth=0.8, color="gray")
    below.set_ylabel("|difference|")
    below.set_xlabel("step (equal losses are drawn at 1e-8, the limit is the dashed line)")
    path = Path(file)
    # Under another name first, so that FILE is never half a picture.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(unfinished, format=path.suffix[1:] or "png", dpi=120)
        os.replace(unfinished, path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        return f"plot: not written to {path}: {error}"
    return f"plot: {path}"
