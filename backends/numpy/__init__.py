# SPDX-License-Identifier: Apache-2.0
"""NumPy: every rank of a mesh in this process, moved in lock step. Needs no other framework."""

from hyper_parallel.backends.numpy.backend import NumpyBackend
from hyper_parallel.backends.numpy.lockstep import distribute, execute, gather, redistribute
from hyper_parallel.backends.numpy.ops import NumpyOps

__all__ = ["NumpyBackend", "NumpyOps", "distribute", "execute", "gather", "redistribute"]
