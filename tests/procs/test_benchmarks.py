# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run: that their checks pass and figures come out, never what the figures are."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_benchmark(name, *options, launcher=()):
    """Run a benchmark; return what it printed."""
    run = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "benchmarks" / name), *options],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HYPER_PARALLEL_CHECK": "0"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_checked_mode_runs_all_cases():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    out = run_benchmark("checked_mode.py", "--repeats", "1", "--calls", "1", launcher=launcher)
    assert out.count("ratio of minima") == 3


def test_host_overhead_runs_all_variants(tmp_path):
    out = tmp_path / "figures.json"
    run_benchmark("host_overhead.py", "--quick", "--only", "mlp", "--json", str(out))
    figures = json.loads(out.read_text())
    text = json.dumps(figures)
    for variant in ("local", "hand (f per linear)", "torch TP", "hyper_parallel"):
        assert variant in text


def test_redistribute_measures_raw_ours_and_torch(tmp_path):
    out = tmp_path / "figures.json"
    run_benchmark("redistribute.py", "--quick", "--only", "S(0) -> S(1)", "--json", str(out))
    cases = json.loads(out.read_text())["cases"]
    assert [case["mode"] for case in cases] == ["inference", "training"]
    for case in cases:
        assert [row["name"] for row in case["rows"]] == ["raw", "hyper_parallel", "torch"]
        assert all(row["min_us"] > 0 for row in case["rows"])


def test_planner_time_measures_cold_and_cached_plans():
    lines = run_benchmark("planner_time.py", "--mesh", "8", "--repeats", "3").splitlines()
    assert [line.split()[4] for line in lines[1:]] == ["cold", "cached"] * 5
