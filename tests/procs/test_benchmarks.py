# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run: that their checks pass and figures come out, never what the figures are."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_host_overhead_runs_all_variants(tmp_path):
    out = tmp_path / "figures.json"
    script = ROOT / "benchmarks" / "host_overhead.py"
    run = subprocess.run(
        [sys.executable, str(script), "--quick", "--only", "mlp", "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads(out.read_text())
    text = json.dumps(figures)
    for variant in ("local", "hand (f per linear)", "torch TP", "hyper_parallel"):
        assert variant in text
