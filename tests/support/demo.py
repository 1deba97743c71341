# SPDX-License-Identifier: Apache-2.0
"""Run the demo in examples/ as its users run it, and read what it prints."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["LAUNCHER", "SMALL", "losses", "run_demo", "run_demo_once", "verdict"]

DEMO = Path(__file__).parents[2] / "examples" / "train_tp.py"
SMALL = ("--steps", "6", "--model-dim", "64", "--plot", "")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run_demo(
    folder: Path,
    *flags: str,
    launcher: Sequence[str] = LAUNCHER,
    paths: Sequence[str] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run the demo in `folder`; return the finished process, its output in one text.

    `paths` are searched for modules after the package.
    """
    # The package that these tests import, installed or not.
    spec = importlib.util.find_spec("hyper_parallel")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parents[1]
    searched = [str(package), *paths, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, searched)),
        **variables,
    }
    return subprocess.run(
        [sys.executable, *launcher, str(DEMO), *flags],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


@functools.cache
def run_demo_once(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the demo, which must write nothing; tests that give the same flags share the run."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_demo(Path(folder), *flags)
        assert not os.listdir(folder)
    return done


def verdict(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Give the lines of the demo's output that start with PASS or FAIL."""
    return [line for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    """Give the tensor-parallel losses of the demo's table, for the steps that it shows."""
    row = re.compile(r"^ +\d+ +(\d+\.\d{6}) +\d+\.\d{6} +\S+$", re.MULTILINE)
    return [float(loss) for loss in row.findall(done.stdout)]
