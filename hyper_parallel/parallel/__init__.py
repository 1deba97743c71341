# SPDX-License-Identifier: Apache-2.0
"""Parallel styles and parallelize_module: plans over a module tree."""

from hyper_parallel.parallel.fused import fused_collectives
from hyper_parallel.parallel.loss import loss_parallel
from hyper_parallel.parallel.losses import linear_cross_entropy, vocab_parallel_cross_entropy
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
    "fused_collectives",
    "linear_cross_entropy",
    "loss_parallel",
    "parallelize_module",
    "vocab_parallel_cross_entropy",
]
