# SPDX-License-Identifier: Apache-2.0
"""The doctor as users start it: with an extension that breaks torch, and under torchrun."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with a folder in front of its path."""
    paths = (str(folder), *filter(None, [os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    env.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )


def test_a_broken_extension_of_torch_is_told_and_does_no_harm(tmp_path):
    fits = ".".join(importlib.metadata.version("torch").split(".")[:2]) + ".0"
    package, info = tmp_path / "torch_npu", tmp_path / f"torch_npu-{fits}.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open')")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {fits}\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    assert run("-c", "import torch", folder=tmp_path).returncode != 0
    done = run("-m", "hyper_parallel", "doctor", "--json", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    backends = {one["name"]: one for one in found["backends"]}
    assert backends["cpu"]["available"]
    assert backends["npu"]["reason"].startswith("torch_npu cannot be imported (libhccl.so:")
    assert backends["npu"]["fix"].startswith("source CANN's set_env.sh before Python starts")
    assert found["packages"]["torch_npu"] == fits
    (warning,) = found["warnings"]
    assert "`import torch` fails in other programs, because its extension 'torch_npu'" in warning
    assert warning.endswith("or set TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    assert found["bandwidth"][0]["ranks"] == 1


def test_bandwidth_under_torchrun(tmp_path):
    command = ("hyper_parallel", "doctor", "--json", "--backend", "cpu")
    done = run(*LAUNCHER, "-m", *command, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)  # of rank 0 only
    assert found["environment"]["WORLD_SIZE"] == "2"
    rows = found["bandwidth"][0]["rows"]
    assert {row["collective"] for row in rows} >= {"all_reduce", "all_to_all", "broadcast"}
    assert len({row["bytes"] for row in rows}) == 3
    for row in rows:
        sent = row["gigabytes_per_second"] * 1e9 * row["seconds"]
        share = 1.0 if row["collective"] in ("all_reduce", "broadcast") else 0.5
        assert abs(sent - share * row["bytes"]) < 1
