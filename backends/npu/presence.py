# SPDX-License-Identifier: Apache-2.0
"""Find and import torch_npu, or say why that is not possible and what to do.

Importing torch_npu changes the whole process, so it is imported only when an NPU is asked for. It
links CANN's libraries: what goes wrong is mostly an error of the loader that names one of those.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os

import torch

__all__ = ["why_no_torch_npu"]

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_WITHOUT = f"; to use this torch without NPUs, set {_AUTOLOAD}=0 before Python starts"


def why_no_torch_npu() -> str | None:
    """Import torch_npu; give the reason if that fails."""
    if importlib.util.find_spec("torch_npu") is None:
        return (
            "torch_npu is not installed; install the release that matches torch"
            f" {torch.__version__}"
        )
    return _misfit() or _import_failure()


def _misfit() -> str | None:
    """Say that torch_npu was built for another torch, which its metadata tell without importing."""
    try:
        version = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return None
    if _release(version) == _release(torch.__version__):
        return None
    return (
        f"torch_npu {version} does not fit torch {torch.__version__}; install torch_npu"
        f" {_release(torch.__version__)}.*, or torch {_release(version)}.*"
    )


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


@functools.cache
def _import_failure() -> str | None:
    """Import torch_npu, once: a second attempt would fail for what the first left behind."""
    autoload = os.environ.get(_AUTOLOAD)
    try:
        importlib.import_module("torch_npu")  # registers the device and hccl
    except Exception as error:  # missing folders of CANN are reported as plain exceptions
        return f"torch_npu cannot be imported ({_first_line(error)}); {_advice(str(error))}"
    finally:
        # A failed import leaves it switched off, for the processes that this one starts, too.
        if autoload is None:
            os.environ.pop(_AUTOLOAD, None)
        else:
            os.environ[_AUTOLOAD] = autoload
    return None


def _advice(text: str) -> str:
    """Say what to do about an error of the import."""
    cann = os.environ.get("ASCEND_HOME_PATH")
    if "Two accelerators" in text:
        return "install a CPU build of torch beside torch_npu" + _WITHOUT
    if "undefined symbol" in text or "GLIBC" in text:
        return f"it was built for another torch than {torch.__version__}; install the one that fits"
    if "cannot open shared object file" in text and cann:
        return (
            f"the CANN at ASCEND_HOME_PATH={cann} lacks that library or is not on"
            " LD_LIBRARY_PATH; source its set_env.sh, or install the whole CANN toolkit" + _WITHOUT
        )
    return "source CANN's set_env.sh before Python starts" + _WITHOUT


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
