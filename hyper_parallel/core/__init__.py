# SPDX-License-Identifier: Apache-2.0
"""Meshes, placements, layouts and plans: pure Python values; no framework is ever imported."""

from hyper_parallel.core.collective import Step
from hyper_parallel.core.cost import Link, LinkModel
from hyper_parallel.core.estimate import Estimate, StepEstimate
from hyper_parallel.core.interval import chunk_bounds, chunk_sizes
from hyper_parallel.core.layout import Layout, same_cut
from hyper_parallel.core.mesh import AbstractMesh, nested_ranks
from hyper_parallel.core.placement import (
    Packed,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    cotangent,
)
from hyper_parallel.core.plan import Plan, plan

__all__ = [
    "AbstractMesh",
    "Estimate",
    "Layout",
    "Link",
    "LinkModel",
    "Packed",
    "Partial",
    "Placement",
    "Plan",
    "Replicate",
    "Shard",
    "Step",
    "StepEstimate",
    "StridedShard",
    "chunk_bounds",
    "chunk_sizes",
    "cotangent",
    "nested_ranks",
    "plan",
    "same_cut",
]
