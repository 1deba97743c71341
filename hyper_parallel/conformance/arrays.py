# SPDX-License-Identifier: Apache-2.0
"""Arrays of a backend's framework, made from NumPy arrays and read back as such."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np

__all__ = ["Arrays", "NumpyArrays", "TorchArrays", "arrays_of"]

Numbers = np.ndarray[Any, Any]


class Arrays(Protocol):
    """What the checks need of a framework; a backend of another one passes its own."""

    framework: str

    def has(self, dtype: str) -> bool:
        """Say whether the framework has a dtype of this name."""
        ...

    def make(self, numbers: Numbers, dtype: str) -> Any:
        """Make a contiguous array of a dtype on the backend's device."""
        ...

    def transposed(self, x: Any) -> Any:
        """View a 2-d array with its dims exchanged, which is not contiguous."""
        ...

    def read(self, x: Any) -> tuple[Numbers, str]:
        """Give an array's numbers (float64, int64, bool or complex128) and the dtype's name."""
        ...


class NumpyArrays:
    """Arrays of NumPy."""

    framework = "numpy"

    def has(self, dtype: str) -> bool:
        """Say whether NumPy has the dtype."""
        return dtype in np.sctypeDict

    def make(self, numbers: Numbers, dtype: str) -> Any:
        """Make an array."""
        return np.ascontiguousarray(numbers.astype(dtype))

    def transposed(self, x: Any) -> Any:
        """View an array with its dims exchanged."""
        return x.T

    def read(self, x: Any) -> tuple[Numbers, str]:
        """Give the numbers and the dtype's name."""
        return _widest(x), x.dtype.name


class TorchArrays:
    """Tensors of torch.

    Args:
        device: where they live.
    """

    framework = "torch"

    def __init__(self, device: Any) -> None:
        self._torch = importlib.import_module("torch")
        self._device = device

    def has(self, dtype: str) -> bool:
        """Say whether torch has the dtype."""
        return hasattr(self._torch, dtype)

    def make(self, numbers: Numbers, dtype: str) -> Any:
        """Make a tensor; the dtype is converted on the host, as a device may lack a kernel."""
        on_host = self._torch.from_numpy(numbers.copy())
        return on_host.to(getattr(self._torch, dtype)).contiguous().to(self._device)

    def transposed(self, x: Any) -> Any:
        """View a tensor with its dims exchanged."""
        return x.t()

    def read(self, x: Any) -> tuple[Numbers, str]:
        """Give the numbers and the dtype's name."""
        x = x.detach().cpu()
        name = str(x.dtype).removeprefix("torch.")
        if x.is_floating_point():
            x = x.double()
        elif x.dtype == self._torch.bool:  # a bool that holds a 2 is no True
            x = x.view(self._torch.uint8)
        return _widest(x.numpy()), name


def _widest(x: Numbers) -> Numbers:
    kinds = {"f": np.float64, "c": np.complex128}
    return x.astype(kinds.get(x.dtype.kind, np.int64))


def arrays_of(backend: Any, mesh: Any) -> Arrays:
    """Give the arrays of the framework that a backend's integer array is of."""
    index: Any = backend.index_array(mesh)
    if isinstance(index, np.ndarray):
        return NumpyArrays()
    return TorchArrays(backend.device())
