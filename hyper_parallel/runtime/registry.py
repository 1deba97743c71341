# SPDX-License-Identifier: Apache-2.0
"""Find a backend by device type. Backends are named as text and loaded at first use."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, cast

from hyper_parallel.errors import BackendError, near_names
from hyper_parallel.runtime.interface import Backend

__all__ = ["available_backends", "backend_for", "load_backend", "override_backend"]

ENTRY_POINT_GROUP = "hyper_parallel.backends"

_BUILT_IN = {
    "cpu": "hyper_parallel.backends.cpu:CpuBackend",
    "cuda": "hyper_parallel.backends.cuda:CudaBackend",
    "npu": "hyper_parallel.backends.npu:NpuBackend",
    "numpy": "hyper_parallel.backends.numpy:NumpyBackend",
}

_loaded: dict[str, Backend] = {}
_override = threading.local()


def available_backends() -> dict[str, str]:
    """List every known device type with the "module:Class" that serves it."""
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**found, **_BUILT_IN}


def load_backend(target: str, *args: Any) -> Any:
    """Import "module:Class" and make the backend."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(*args)


def backend_for(device_type: str) -> Backend:
    """Give the backend that serves a device type, in this thread.

    Args:
        device_type: such as "cpu", "cuda" or "npu".

    Returns:
        The one instance this process has, or the simulated one inside `simulate`.

    Raises:
        BackendError: unknown device type, or a backend that cannot be used here; the text lists
            those known and says why each is unavailable.
    """
    simulated = cast("Backend | None", getattr(_override, "backend", None))
    # Reading the entry points takes milliseconds.
    known = _BUILT_IN if device_type in _BUILT_IN else available_backends()
    if device_type not in known:
        _refuse(device_type, known)
    if simulated is not None:
        return simulated
    backend = _loaded.get(device_type)
    if backend is None:
        try:
            backend = load_backend(known[device_type])
        except Exception as error:  # whatever its package raises
            raise BackendError(
                "init_device_mesh",
                "the backend of device_type must be importable",
                f"Install what it needs ({error})",
                device_type=device_type,
            ) from error
        reason = backend.unavailable()
        if reason is not None:
            _refuse(device_type, available_backends())
        _loaded[device_type] = backend
    return backend


def _refuse(device_type: str, known: dict[str, str]) -> None:
    near = near_names(device_type, sorted(known))
    hint = f"Did you mean {near[0]!r}? " if near and near[0] != device_type else ""
    listed = "; ".join(f"{name}: {_state(target)}" for name, target in sorted(known.items()))
    raise BackendError(
        "init_device_mesh",
        f"device_type must name a backend that can be used here ({listed})",
        f"{hint}Use one that is available",
        device_type=device_type,
    )


def _state(target: str) -> str:
    try:
        return load_backend(target).unavailable() or "available"
    except Exception as error:  # whatever its package raises
        return f"unavailable, {error}"


@contextmanager
def override_backend(backend: Backend) -> Generator[None, None, None]:
    """Serve every device type by `backend` in this thread, until the block ends."""
    before = getattr(_override, "backend", None)
    _override.backend = backend
    try:
        yield
    finally:
        _override.backend = before
