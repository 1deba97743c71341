# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: one plan for CUDA, Ascend NPU, CPU and one process.

Names are loaded at first use, so importing the package imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core import Layout, Partial, Placement, Replicate, Shard, plan
    from hyper_parallel.dtensor import (
        DTensor,
        clip_grad_norm_,
        distribute_module,
        distribute_tensor,
        get_total_norm,
        implicit_replication,
        local_map,
        manual_seed,
        register_op_rule,
        step_locally,
        strict_rules,
    )
    from hyper_parallel.errors import (
        BackendError,
        HyperParallelError,
        LayoutError,
        PlanError,
        RuleError,
    )
    from hyper_parallel.fsdp import fully_shard
    from hyper_parallel.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        linear_cross_entropy,
        loss_parallel,
        parallelize_module,
        vocab_parallel_cross_entropy,
    )
    from hyper_parallel.runtime import DeviceMesh, init_device_mesh, simulate
    from hyper_parallel.tools.comm_mode import CommDebugMode
    from hyper_parallel.tools.explain import explain_redistribute
    from hyper_parallel.tools.sharding import visualize_sharding

_ROOMS = {
    "core": ("Layout", "Partial", "Placement", "Replicate", "Shard", "plan"),
    "dtensor": (
        "DTensor",
        "clip_grad_norm_",
        "distribute_module",
        "distribute_tensor",
        "get_total_norm",
        "implicit_replication",
        "local_map",
        "manual_seed",
        "register_op_rule",
        "step_locally",
        "strict_rules",
    ),
    "errors": (
        "BackendError",
        "HyperParallelError",
        "LayoutError",
        "PlanError",
        "RuleError",
    ),
    "fsdp": ("fully_shard",),
    "parallel": (
        "ColwiseParallel",
        "ParallelStyle",
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "RowwiseParallel",
        "SequenceParallel",
        "linear_cross_entropy",
        "loss_parallel",
        "parallelize_module",
        "vocab_parallel_cross_entropy",
    ),
    "runtime": ("DeviceMesh", "init_device_mesh", "simulate"),
    # By file: two of them need no framework.
    "tools.comm_mode": ("CommDebugMode",),
    "tools.explain": ("explain_redistribute",),
    "tools.sharding": ("visualize_sharding",),
}
_WHERE = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "BackendError",
    "ColwiseParallel",
    "CommDebugMode",
    "DTensor",
    "DeviceMesh",
    "HyperParallelError",
    "Layout",
    "LayoutError",
    "ParallelStyle",
    "Partial",
    "Placement",
    "PlanError",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicate",
    "RowwiseParallel",
    "RuleError",
    "SequenceParallel",
    "Shard",
    "clip_grad_norm_",
    "distribute_module",
    "distribute_tensor",
    "explain_redistribute",
    "fully_shard",
    "get_total_norm",
    "implicit_replication",
    "init_device_mesh",
    "linear_cross_entropy",
    "local_map",
    "loss_parallel",
    "manual_seed",
    "parallelize_module",
    "plan",
    "register_op_rule",
    "simulate",
    "step_locally",
    "strict_rules",
    "visualize_sharding",
    "vocab_parallel_cross_entropy",
]


def __getattr__(name: str) -> Any:
    room = _WHERE.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
