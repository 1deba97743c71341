# SPDX-License-Identifier: Apache-2.0
"""NumpyBackend: meshes all of whose ranks are this process, so there is nobody to talk to."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from hyper_parallel.backends.numpy.lockstep import redistribute
from hyper_parallel.backends.numpy.ops import Array, NumpyOps
from hyper_parallel.core.mesh import AbstractMesh
from hyper_parallel.errors import BackendError
from hyper_parallel.runtime.interface import ArrayOps, Capabilities

__all__ = ["NumpyBackend"]


class NumpyBackend:
    """Any number of ranks in this process, moved in lock step by the functions beside this class.

    A mesh knows every rank's place; it has no rank of its own and no process group.

    Example:
        >>> from hyper_parallel import init_device_mesh
        >>> mesh = init_device_mesh("numpy", (32, 32), mesh_dim_names=("dp", "tp"))
        >>> mesh.coordinate(1023)
        (31, 31)
    """

    name = "numpy"
    device_type = "numpy"
    capabilities = Capabilities(uneven_gather=True, native_avg=True, all_ranks=True)
    ops: ArrayOps = NumpyOps()
    redistribute = staticmethod(redistribute)

    def unavailable(self) -> str | None:
        """Say None: no hardware is needed."""
        return None

    def start(self, mesh: AbstractMesh) -> None:
        """Do nothing: there is no process to wait for."""

    def rank(self) -> NoReturn:
        """Refuse: no rank is this process's own.

        Raises:
            BackendError: always.
        """
        raise BackendError(
            "numpy",
            "this process must be one rank of the mesh for this call",
            "Move all ranks' arrays with distribute, redistribute and gather of"
            " hyper_parallel.backends.numpy, ask mesh.coordinate(rank), or use"
            " simulate(world_size) with a 'cpu' mesh",
            ranks="all",
        )

    def make_groups(self, mesh: AbstractMesh) -> tuple[()]:
        """Make none."""
        return ()

    def framework_mesh(self, mesh: Any) -> None:
        """Give none: NumPy has no meshes."""

    def index_array(self, mesh: AbstractMesh) -> Array:
        """Give the mesh's ranks as an int array of its shape."""
        return np.array(mesh.ranks, np.intc).reshape(mesh.shape)

    def device(self) -> str:
        """Give NumPy's name of where arrays live."""
        return "cpu"

    def _no_group(self, *_: Any) -> NoReturn:
        self.rank()

    make_group = group_ranks = communicator = wrap_mesh = _no_group
