# SPDX-License-Identifier: Apache-2.0
"""The device that tests run on, and what it can compute exactly.

`pytest --device npu` runs them on NPUs, or on the simulated one where torch_npu is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from hyper_parallel.runtime.registry import available_backends, load_backend

__all__ = [
    "DEVICE",
    "DTYPE",
    "SIMULATED_NPU",
    "TOLERANCE",
    "has_generators",
    "on_simulated_npu",
    "raises_in_backward",
    "steps_lists_locally",
    "use_device",
]

DEVICE = os.environ.get("HYPER_PARALLEL_TEST_DEVICE", "cpu")

# The most exact dtype that can be reduced here, and how close to one process it must come.
_reduces = load_backend(available_backends()[DEVICE]).capabilities.reduces
DTYPE = torch.float64 if _reduces is None or ("sum", "float64") in _reduces else torch.float32
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}

SIMULATED_NPU = str(Path(__file__).parent / "npu")


def _simulates() -> bool:
    """Say whether the device is the simulated NPU, here or in the process that started this one."""
    found = importlib.util.find_spec("torch_npu")
    return DEVICE == "npu" and (found is None or str(found.origin).startswith(SIMULATED_NPU))


on_simulated_npu = pytest.mark.skipif(
    not _simulates(), reason="looks into the simulated NPU: pytest --device npu, without torch_npu"
)
steps_lists_locally = pytest.mark.skipif(
    _simulates(),
    reason="of a list on a device made in Python, torch dispatches even where that is switched off",
)
has_generators = pytest.mark.skipif(
    _simulates(), reason="torch makes no generator of a device made in Python"
)
raises_in_backward = pytest.mark.skipif(
    _simulates(), reason="torch cannot unwind a backward on a device made in Python: it aborts"
)


def use_device() -> None:
    """Make the device known to torch and the default of factories, in this process."""
    if DEVICE == "cpu":
        return
    if _simulates():
        sys.path.append(SIMULATED_NPU)
    if DEVICE == "npu":
        importlib.import_module("torch_npu")
    torch.set_default_device(DEVICE)
