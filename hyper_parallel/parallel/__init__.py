# SPDX-License-Identifier: Apache-2.0
"""Parallel styles and parallelize_module: plans over a module tree."""

from hyper_parallel.parallel.parallelize import parallelize_module
from hyper_parallel.parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from hyper_parallel.parallel.sequence import SequenceParallel
from hyper_parallel.parallel.style import ParallelStyle
from hyper_parallel.parallel.styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "parallelize_module",
]
