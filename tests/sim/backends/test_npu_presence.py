# SPDX-License-Identifier: Apache-2.0
"""Why torch_npu cannot be used, and what to do: each way it can fail, with stand-ins for it."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.backends.npu import NpuBackend, presence
from hyper_parallel.errors import BackendError
from hyper_parallel.runtime import backend_for

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
MISSING = "libhccl.so: cannot open shared object file: No such file or directory"
CONFLICT = (
    "Two accelerators cannot be used at the same time in PyTorch: npu and cuda. You can ...\n"
    "[ERROR] 2026-01-01 ERR00007 PTA feature not supported"
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that torch_npu is installed, with a version and a module's source, or none."""

    def install(raises: Exception | None = None, version: str | None = None) -> None:
        real = importlib.import_module

        def load(name: str, package: str | None = None) -> Any:
            if name != "torch_npu":
                return real(name, package)
            os.environ[AUTOLOAD] = "0"  # as the real one does first
            if raises is not None:
                raise raises
            return sys

        def version_of(name: str) -> str:
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
        monkeypatch.setattr(importlib, "import_module", load)
        monkeypatch.setattr(importlib.metadata, "version", version_of)

    presence._import_failure.cache_clear()
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv(AUTOLOAD, raising=False)
    yield install
    presence._import_failure.cache_clear()


def test_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert NpuBackend().unavailable() == (
        f"torch_npu is not installed; install the release that matches torch {torch.__version__}"
    )


def test_cann_not_sourced(installed):
    installed(ImportError(MISSING))
    assert NpuBackend().unavailable() == (
        f"torch_npu cannot be imported ({MISSING}); source CANN's set_env.sh before Python starts;"
        f" to use this torch without NPUs, set {AUTOLOAD}=0 before Python starts"
    )


def test_cann_sourced_but_without_the_library(installed, monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    installed(ImportError(MISSING))
    reason = NpuBackend().unavailable()
    assert "the CANN at ASCEND_HOME_PATH=/opt/cann lacks that library or is not on" in reason
    assert "install the whole CANN toolkit" in reason


def test_a_folder_of_cann_is_missing(installed):
    installed(Exception("ASCEND_OPP_PATH /opt/cann/opp does not exist"))
    assert "(ASCEND_OPP_PATH /opt/cann/opp does not exist); source CANN's set_env.sh" in (
        NpuBackend().unavailable()
    )


def test_a_version_that_does_not_fit_is_named_before_it_is_imported(installed):
    installed(AssertionError("was imported"), version="2.1.0.post3")
    ours = ".".join(torch.__version__.split(".")[:2])
    assert NpuBackend().unavailable() == (
        f"torch_npu 2.1.0.post3 does not fit torch {torch.__version__}; install torch_npu {ours}.*,"
        " or torch 2.1.*"
    )


def test_a_version_that_fits_is_imported(installed):
    installed(ImportError("loader"), version=torch.__version__.split("+")[0] + ".post1")
    assert "torch_npu cannot be imported (loader)" in NpuBackend().unavailable()


def test_built_for_another_torch(installed):
    installed(ImportError("libtorch_npu.so: undefined symbol: _ZN3c105Error"))
    assert NpuBackend().unavailable() == (
        "torch_npu cannot be imported (libtorch_npu.so: undefined symbol: _ZN3c105Error); it was"
        f" built for another torch than {torch.__version__}; install the one that fits"
    )


def test_a_cuda_build_of_torch_beside_it(installed):
    installed(RuntimeError(CONFLICT))
    reason = NpuBackend().unavailable()
    assert reason.startswith("torch_npu cannot be imported (Two accelerators cannot be used")
    assert "install a CPU build of torch beside torch_npu; to use this torch without" in reason
    assert "[ERROR]" not in reason


@pytest.mark.parametrize("before", [None, "1", "0"])
def test_a_failed_import_leaves_autoload_as_it_was(installed, monkeypatch, before):
    if before is not None:
        monkeypatch.setenv(AUTOLOAD, before)
    installed(ImportError(MISSING))
    assert NpuBackend().unavailable()
    assert os.environ.get(AUTOLOAD) == before


def test_a_failed_import_is_tried_once(installed):
    installed(ImportError(MISSING))
    first = NpuBackend().unavailable()
    installed(RuntimeError("privateuse1 has been named already"))
    assert NpuBackend().unavailable() == first


@pytest.mark.parametrize(
    ("available", "has_hccl", "text"),
    [
        (False, True, "no NPU is visible; check npu-smi info and ASCEND_RT_VISIBLE_DEVICES"),
        (True, False, "torch_npu did not register hccl; install a build of it with distributed"),
        (True, True, None),
    ],
)
def test_imported(installed, monkeypatch, available, has_hccl, text):
    installed()
    device = type("npu", (), {"is_available": staticmethod(lambda: available)})
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: has_hccl)
    assert NpuBackend().unavailable() == text


def test_the_reason_is_in_the_error_of_a_mesh(installed, monkeypatch):
    monkeypatch.setattr("hyper_parallel.runtime.registry._loaded", {})
    installed(ImportError(MISSING))
    with pytest.raises(BackendError, match=r"npu: torch_npu cannot be imported \(libhccl.so: "):
        backend_for("npu")


def test_nothing_is_imported_until_an_npu_is_asked_for():
    for path in Path(presence.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else ()
            assert "torch_npu" not in names, path
            assert getattr(node, "module", None) != "torch_npu", path
