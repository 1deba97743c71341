# SPDX-License-Identifier: Apache-2.0
"""Doctor: what is installed, which backends can be used here, and what to do about the others.

It answers where things are broken: without torch, and with extensions of torch that cannot be
imported. It imports torch only to ask backends, and never loads torch's extensions by itself.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hyper_parallel.runtime.registry import available_backends, load_backend

__all__ = ["environment", "examine", "usual_backend", "version", "without_autoload"]

PACKAGES = ("hyper-parallel", "torch", "torch_npu", "numpy", "pytest", "rich")
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
    *("HYPER_PARALLEL_CHECK", "TORCH_DISTRIBUTED_DEBUG", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_HOME_PATH"),
    *("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HCCL_CONNECT_TIMEOUT"),
)
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@contextmanager
def environment(**variables: str) -> Generator[None, None, None]:
    """Set environment variables until the block ends."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def without_autoload() -> AbstractContextManager[None]:
    """Keep `import torch` from loading extensions, one of which may break it, until the end."""
    return environment(**({} if "torch" in sys.modules else {_AUTOLOAD: "0"}))


def examine() -> dict[str, Any]:
    """Look at this machine; raises nothing.

    Returns:
        Plain data: "python", "platform", "packages" (versions, None where absent), "environment"
        (variables that matter and are set), "backends" (each with "name", "target", "available",
        "reason", "fix", "devices", "libraries"), "warnings".
    """
    set_before = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    with without_autoload():
        backends = [_backend(name, at) for name, at in sorted(available_backends().items())]
        warnings = _broken_extensions()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in PACKAGES},
        "environment": set_before,
        "backends": backends,
        "warnings": warnings,
    }


def usual_backend(backends: list[dict[str, Any]]) -> str:
    """Name the accelerator's backend if one can be used, else that of the CPU."""
    names = [one["name"] for one in backends if one["available"]]
    return next((name for name in ("cuda", "npu") if name in names), "cpu")


def version(name: str) -> str | None:
    """Give the version of an installed distribution; None where it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend(name: str, target: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "target": target, "available": False}
    found |= {"reason": None, "fix": None, "devices": [], "libraries": {}}
    try:
        backend: Any = load_backend(target)
        reason = backend.unavailable()
        if reason is None:
            found["available"] = True
            found |= backend.about() if hasattr(backend, "about") else {}
    except ImportError as error:
        reason = f"{error}; {_install(error.name or target.partition(':')[0])}"
    except Exception as error:  # whatever the package of another raises
        reason = f"{type(error).__name__}: {error}; reinstall the package that has {target}"
    if reason is not None:
        found["reason"], _, fix = (part.strip() for part in reason.partition(";"))
        found["fix"] = fix or "see the documents of this backend"
    return found


def _install(module: str) -> str:
    top = module.partition(".")[0]
    return f"install {top} (pip install {top})" if top != "hyper_parallel" else "reinstall it"


def _broken_extensions() -> list[str]:
    """List the extensions of torch that make `import torch` fail wherever it loads them."""
    if "torch" not in sys.modules or os.environ.get(_AUTOLOAD) != "0":
        return []
    broken: list[str] = []
    for point in importlib.metadata.entry_points(group="torch.backends"):
        try:
            point.load()
        except Exception as error:
            broken.append(
                f"`import torch` fails in other programs, because its extension {point.name!r}"
                f" cannot be loaded ({type(error).__name__}: {error}). Repair or uninstall it, or"
                f" set {_AUTOLOAD}=0"
            )
    return broken
