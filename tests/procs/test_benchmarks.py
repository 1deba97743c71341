# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run: that their checks pass and figures come out, never what the figures are."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(name, *flags, launcher=()):
    """Run a benchmark; return what it printed."""
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "benchmarks" / name), *flags],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_checked_mode_runs_all_cases():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    out = run("checked_mode.py", "--repeats", "1", "--calls", "1", launcher=launcher)
    assert out.count("ratio of minima") == 3


def test_host_overhead_runs_all_variants(tmp_path):
    out = tmp_path / "figures.json"
    run("host_overhead.py", "--quick", "--only", "mlp", "--json", str(out))
    figures = json.loads(out.read_text())
    text = json.dumps(figures)
    for variant in ("local", "hand (f per linear)", "torch TP", "hyper_parallel"):
        assert variant in text
