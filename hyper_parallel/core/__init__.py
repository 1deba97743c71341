# SPDX-License-Identifier: Apache-2.0
"""Meshes, placements, layouts and plans: pure Python values; no framework is ever imported."""

from hyper_parallel.core.collective import Plan, Step
from hyper_parallel.core.layout import Layout, chunk_bounds, chunk_sizes
from hyper_parallel.core.mesh import AbstractMesh, nested_ranks
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard, cotangent
from hyper_parallel.core.plan import plan

__all__ = [
    "AbstractMesh",
    "Layout",
    "Partial",
    "Placement",
    "Plan",
    "Replicate",
    "Shard",
    "Step",
    "chunk_bounds",
    "chunk_sizes",
    "cotangent",
    "nested_ranks",
    "plan",
]
