# SPDX-License-Identifier: Apache-2.0
"""The tests once more on the simulated NPU: those that are cheap, and the demo.

`pytest --device npu tests/sim tests/procs` runs all that can run there, for minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.demo import losses, run_demo, verdict
from support.device import DEVICE, SIMULATED_NPU

ROOT = Path(__file__).parents[2]
SELECTED = """
    sim/backends/test_npu_formats.py
    sim/dtensor/test_autograd.py
    sim/dtensor/test_parameter.py
    sim/dtensor/test_refusals.py
    sim/dtensor/test_teach.py
    sim/dtensor/test_tensor.py
    sim/parallel/test_custom_style.py
    sim/parallel/test_parallelize.py
    sim/parallel/test_parameter.py
    sim/parallel/test_prepare.py
    sim/parallel/test_styles_errors.py
    sim/runtime/test_simulated_autograd.py
    sim/runtime/test_simulated_disagreement.py
    sim/runtime/test_simulated_meshes.py
    procs/backends/test_hccl.py
""".split()
AT_LEAST = 470
SMALL = ("--steps", "4", "--model-dim", "64", "--plot", "")

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="starts the tests on another device itself")


@pytest.mark.timeout(600)
def test_selected_tests_pass_on_the_simulated_npu():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--device", "npu", "-p", "no:cacheprovider"]
        + [str(ROOT / "tests" / name) for name in SELECTED],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= AT_LEAST


@pytest.mark.parametrize("flags", [(), ("--sequence-parallel", "--tied", "--bias")], ids=" ".join)
def test_the_demo_on_the_simulated_npu_has_the_losses_of_the_cpu(tmp_path, flags):
    cpu = run_demo(tmp_path, *SMALL, *flags)
    npu = run_demo(tmp_path, *SMALL, *flags, "--device", "npu", paths=[SIMULATED_NPU])
    assert verdict(npu) == ["PASS"], npu.stdout
    assert "2 ranks on npu" in npu.stdout
    assert len(losses(cpu)) == 4
    assert losses(npu) == pytest.approx(losses(cpu), abs=1e-5)


def test_the_demo_without_torch_npu_says_what_to_install(tmp_path):
    done = run_demo(tmp_path, *SMALL, "--device", "npu")
    assert "npu: torch_npu is not installed; install the release that matches torch" in done.stdout
    assert done.returncode != 0
