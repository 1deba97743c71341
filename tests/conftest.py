# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the hypothesis profiles, and devices that a test may ask for by mark."""

import importlib.util
import os

import pytest
from hypothesis import settings

# Meshes compare every call before it is made, here and in the processes that tests start.
os.environ.setdefault("HYPER_PARALLEL_CHECK", "1")

settings.register_profile("default", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=20_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the caller choose the device; tests that name another one still use that."""
    parser.addoption(
        "--device",
        choices=("cpu", "cuda", "npu"),
        default="cpu",
        help="where tests run; npu is simulated where torch_npu is not installed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device before any test module is imported, here and in processes to come."""
    device = config.getoption("--device")
    if device != "cpu":
        os.environ["HYPER_PARALLEL_TEST_DEVICE"] = device
        from support.device import use_device

        use_device()


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _has_npu() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    import torch
    import torch_npu  # noqa: F401  # registers torch.npu

    return torch.npu.is_available()


_DEVICES = {"cuda": _has_cuda, "npu": _has_npu}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose mark names a device that this machine lacks."""
    for mark, is_available in _DEVICES.items():
        if item.get_closest_marker(mark) is not None and not is_available():
            pytest.skip(f"needs a device that this machine lacks: {mark}")
