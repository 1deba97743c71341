# SPDX-License-Identifier: Apache-2.0
"""DTensor: global tensors on a mesh, as a torch front end to layouts, plans and backends."""

from hyper_parallel.dtensor.api import distribute_module, distribute_tensor
from hyper_parallel.dtensor.clip import clip_grad_norm_, get_total_norm
from hyper_parallel.dtensor.decisions import strict_rules
from hyper_parallel.dtensor.factories import empty, full, ones, rand, randn, zeros
from hyper_parallel.dtensor.implicit import implicit_replication
from hyper_parallel.dtensor.local_map import local_map
from hyper_parallel.dtensor.optim import step_locally
from hyper_parallel.dtensor.random import manual_seed
from hyper_parallel.dtensor.teach import register_op_rule
from hyper_parallel.dtensor.tensor import DTensor

__all__ = [
    "DTensor",
    "clip_grad_norm_",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "get_total_norm",
    "implicit_replication",
    "local_map",
    "manual_seed",
    "ones",
    "rand",
    "randn",
    "register_op_rule",
    "step_locally",
    "strict_rules",
    "zeros",
]
