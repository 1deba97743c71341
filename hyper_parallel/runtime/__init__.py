# SPDX-License-Identifier: Apache-2.0
"""The backend interface, its registry, meshes attached to backends, the executor, simulation."""

from hyper_parallel.runtime.executor import execute
from hyper_parallel.runtime.interface import ArrayOps, Backend, Capabilities, Communicator, Work
from hyper_parallel.runtime.mesh import DeviceMesh, current_mesh, init_device_mesh
from hyper_parallel.runtime.registry import available_backends, backend_for, override_backend
from hyper_parallel.runtime.simulation import Simulation, current_rank, simulate
from hyper_parallel.runtime.watch import IssuedCollective, watch

__all__ = [
    "ArrayOps",
    "Backend",
    "Capabilities",
    "Communicator",
    "DeviceMesh",
    "IssuedCollective",
    "Simulation",
    "Work",
    "available_backends",
    "backend_for",
    "current_mesh",
    "current_rank",
    "execute",
    "init_device_mesh",
    "override_backend",
    "simulate",
    "watch",
]
