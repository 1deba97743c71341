# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on real processes: the device's backend, a third party's, and pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel import BackendError
from hyper_parallel.conformance import EMULATED, Report, all_checks, run_conformance
from hyper_parallel.conformance.worlds import run_on_ranks
from support.conformance_table import COLUMNS, documented, install
from support.device import DEVICE
from support.procs import dies

ROOT = Path(__file__).parents[3]
SUITE = (sys.executable, "-m", "hyper_parallel.conformance", "-q", "-p", "no:cacheprovider")


def conforms() -> Report:
    return run_conformance(DEVICE, world="here")


def test_the_device_conforms_as_documented(procs2: Any) -> None:
    first, second = procs2.run(conforms)
    assert first == second
    assert first.failures == ()
    if DEVICE in COLUMNS:
        assert first.counts() == documented(DEVICE)
    found = {f"{one.group}[{one.case}]": one.status for one in first.results}
    # What the table says is what the capabilities say.
    assert found["all_reduce[sum float32]"] == "pass"
    assert found["all_reduce[max complex64]"] == "refused by design"
    assert found["uneven all_gather[uneven float32]"] == EMULATED


@pytest.mark.nightly
@pytest.mark.skipif(DEVICE != "cpu", reason="runs on every device itself")
def test_the_tables_in_the_documents_are_what_a_run_prints() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "conformance_table.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    documents = (ROOT / "docs" / "verified.md").read_text().splitlines()
    assert [line for line in done.stdout.splitlines() if line not in documents] == []


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = (str(ROOT / "examples"), str(folder), *filter(None, [os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        command,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_a_third_partys_backend_is_found_and_conforms(tmp_path: Path) -> None:
    install(tmp_path, "hub", "hub_backend:HubBackend")
    done = run(tmp_path, *SUITE, "--backend", "hub", "--ranks", "2", "-rN")
    assert done.returncode == 0, done.stdout + done.stderr
    without_kernels = len(all_checks()) - 3
    assert f"{without_kernels} passed, 3 skipped" in done.stdout


def test_pytest_runs_what_it_selects(tmp_path: Path) -> None:
    options = ("--world", "simulated", "--ranks", "3", "-k", "exchange or training", "-rA")
    done = run(tmp_path, *SUITE, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"4 passed, {len(all_checks()) - 4} deselected" in done.stdout


def test_pytest_is_not_needed_to_import_the_suite(tmp_path: Path) -> None:
    (tmp_path / "pytest.py").write_text("raise ImportError('no pytest')")
    done = run(tmp_path, sys.executable, "-c", "import hyper_parallel.conformance")
    assert done.returncode == 0, done.stderr
    done = run(tmp_path, *SUITE)
    assert (done.returncode, done.stdout.partition(":")[0]) == (2, "pytest is not installed")


def test_a_process_that_dies_is_named_with_its_check() -> None:
    with pytest.raises(BackendError) as caught:
        run_on_ranks(dies, 1, "a check", world="processes", ranks=2, device_type="cpu")
    assert str(caught.value) == (
        "run_conformance: every rank must come to the end, but got rank=1, check='a check'. Look at"
        " this check first: the process died with exit code 5."
    )


def test_a_process_that_takes_too_long_is_ended() -> None:
    with pytest.raises(BackendError, match="Look at this check first: it took too long"):
        run_on_ranks(dies, 9, "x", world="processes", ranks=1, device_type="cpu", timeout=1)
