# SPDX-License-Identifier: Apache-2.0
"""Here: one rank's backend, meshes and arrays, as the checks use them; and what a check is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.conformance.arrays import Arrays, arrays_of
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.interface import Communicator
from hyper_parallel.runtime.program import chain
from hyper_parallel.runtime.rows import reducer

__all__ = ["EMULATED", "FAIL", "PASS", "REFUSED", "Check", "Here", "always", "with_others"]

PASS, EMULATED, REFUSED, FAIL = "pass", "emulated", "refused by design", "fail"

Numbers = np.ndarray[Any, Any]

_METHODS = {"avg": "mean", "product": "prod"}  # NumPy's names, where they are others


class Here:
    """What one rank works with.

    Args:
        device_type: the backend's name as a mesh has it.
        world_size: number of ranks.
        arrays: arrays of the backend's framework; default: found by its integer array.
    """

    def __init__(self, device_type: str, world_size: int, arrays: Arrays | None = None) -> None:
        self.device_type = device_type
        self.world_size = world_size
        order = [(i + 1) % world_size for i in range(world_size)]  # not sorted: see group order
        self.mesh = DeviceMesh(device_type, order, mesh_dim_names=("x",))
        self.backend = self.mesh.backend
        self.capabilities = self.backend.capabilities
        self.arrays = arrays or arrays_of(self.backend, self.mesh)
        if not self.capabilities.all_ranks:
            self.comm: Communicator = self.mesh.communicator(0)
        # Two axes, so that groups are parts of the world where it is big enough.
        columns = 2 if world_size % 2 == 0 else 1
        ranks = np.arange(world_size)[::-1].reshape(-1, columns)
        self.grid = DeviceMesh(device_type, ranks.tolist(), mesh_dim_names=("row", "column"))

    @property
    def best_dtype(self) -> str:
        """The most exact floating-point dtype that can be summed."""
        return "float64" if self.reduction("sum", "float64") in (PASS, EMULATED) else "float32"

    def reduction(self, op: str, dtype: str) -> str:
        """Say how a dtype is reduced with an op here, or that the framework lacks the dtype."""
        if not self.arrays.has(dtype):
            return f"the framework has no {dtype}"
        known = self.capabilities
        if op == "avg" and not known.native_avg:
            divides = dtype.startswith(("float", "bfloat", "complex"))
            return EMULATED if divides and self.reduction("sum", dtype) != REFUSED else REFUSED
        if known.reduces is None or (op, dtype) in known.reduces:
            return PASS
        return EMULATED if (op, dtype) in known.widens else REFUSED

    def moving(self, dtype: str) -> str:
        """Say how a dtype is moved here, or that the framework lacks it."""
        if not self.arrays.has(dtype):
            return f"the framework has no {dtype}"
        moves = self.capabilities.moves
        return PASS if moves is None or dtype in moves else EMULATED

    def reduce(self, name: str, x: Any, op: str, dtype: str) -> Any:
        """Call a reduction by name; as the executor does where the backend has no average."""
        if op == "avg" and self.reduction(op, dtype) == EMULATED:
            return chain(*reducer(self.mesh, 0, name, op))(x)
        return getattr(self.comm, name)(x, op)

    def data(self, rank: int, shape: tuple[int, ...], dtype: str) -> Numbers:
        """Give one rank's small whole numbers, the same wherever they are asked for."""
        # So small that sums and products of all ranks are exact in every dtype.
        numbers = np.random.default_rng(rank).integers(0, 3 if self.world_size <= 6 else 2, shape)
        if dtype == "bool":
            return (numbers % 2).astype(bool)
        if dtype.startswith("complex"):
            return numbers + 1j * (2 - numbers)
        return numbers.astype(np.float64 if "float" in dtype else np.int64)

    def reduced(self, pieces: list[Numbers], op: str) -> Numbers:
        """Reduce with NumPy; a sum of bools is "any", a product "all"."""
        stack = np.stack(pieces)
        if stack.dtype == bool:
            return np.asarray(stack.any(0) if op in ("sum", "max") else stack.all(0))
        return getattr(stack, _METHODS.get(op, op))(0)

    def same(self, got: Any, want: Numbers, dtype: str, what: str, *, rtol: float = 0) -> None:
        """Compare an array with the expected numbers and dtype."""
        numbers, name = self.arrays.read(got)
        assert name == dtype, f"{what}: dtype {name} must be {dtype}"
        shape = tuple(got.shape)
        assert shape == want.shape, f"{what}: shape {shape} must be {want.shape}"
        close = np.allclose(numbers, want, rtol=rtol, atol=rtol)
        assert close, f"{what}: {numbers.tolist()} must be {want.tolist()}"


def always(here: Here) -> str:
    """Expect PASS."""
    del here
    return PASS


def with_others(here: Here) -> str:
    """Expect PASS of what takes more than one rank."""
    return PASS if here.world_size > 1 else "it takes more than one rank"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that every backend must do, or must say that it cannot.

    Args:
        group: the row of the result table that it belongs to.
        case: what is special about it.
        run: does it, on every rank; raises AssertionError where the result is wrong.
        expects: reads off the capabilities what must come out: PASS, EMULATED or REFUSED, or a
            text that says why the check does not apply.
        needs_rank: whether it needs a rank of its own, which a backend may not have.
    """

    group: str
    case: str
    run: Callable[[Here], None]
    expects: Callable[[Here], str] = always
    needs_rank: bool = True

    @property
    def id(self) -> str:
        """The check's name, unique."""
        return f"{self.group}[{self.case}]"
