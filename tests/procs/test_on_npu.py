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

from support.demo import SMALL, losses, run_demo, run_demo_once, verdict
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
    procs/backends/test_hccl.py::test_hccl_refuses_in_its_own_words
    procs/backends/test_hccl.py::test_a_result_is_there_only_after_the_wait
    procs/backends/test_hccl.py::test_hccl_is_never_given_what_it_refuses
    procs/conformance/test_conformance.py::test_the_device_conforms_as_documented
""".split()
AT_LEAST = 470
FLAGS = (*SMALL, "--sequence-parallel", "--tied", "--bias")

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


def test_the_demo_on_the_simulated_npu_has_the_losses_of_the_cpu(tmp_path):
    cpu = run_demo_once(*FLAGS)
    npu = run_demo(tmp_path, *FLAGS, "--device", "npu", paths=[SIMULATED_NPU])
    assert verdict(npu) == ["PASS"], npu.stdout
    assert "2 ranks on npu" in npu.stdout
    assert len(losses(cpu)) == 6
    pairs = zip(losses(cpu), losses(npu), strict=True)
    worst = max(abs(one - other) for one, other in pairs)
    print(f"losses on the cpu {losses(cpu)}, max |difference| on the simulated npu {worst:.1e}")
    assert worst <= 1e-5


def test_the_demo_without_torch_npu_says_what_to_install(tmp_path):
    alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    done = run_demo(tmp_path, "--device", "npu", "--plot", "", launcher=(), **alone)
    assert "npu: torch_npu is not installed; install the release that matches torch" in done.stdout
    assert done.returncode != 0
