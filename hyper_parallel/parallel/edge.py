# SPDX-License-Identifier: Apache-2.0
"""A tensor at a style's edge: taken in where it was declared, handed out where it is wanted."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core import Placement
from hyper_parallel.dtensor import DTensor
from hyper_parallel.errors import LayoutError, describe
from hyper_parallel.parallel.sizes import global_shape, learn
from hyper_parallel.runtime import DeviceMesh

__all__ = ["arrange", "give", "hand_out"]


def arrange(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    declared: Placement,
    desired: Placement,
    *,
    where: str,
    even_shards: bool = False,
) -> DTensor:
    """Bring one tensor to the desired placement, as a DTensor.

    A plain tensor is where it was declared; a DTensor is moved from where it says it is.

    Communicates:
        The move, and for a plain shard perhaps one exchange of an integer (see sizes.py).
    """
    if not isinstance(tensor, DTensor):
        shape = global_shape(tensor, mesh, declared, where=where, even_shards=even_shards)
        tensor = DTensor.from_local(tensor, mesh, [declared], shape=shape)
    return tensor.redistribute(mesh, [desired])


def hand_out(output: Any, mesh: DeviceMesh, desired: Placement, use_local_output: bool) -> Any:
    """Bring a DTensor output to the desired placement, and hand it out plain if asked.

    Raises:
        LayoutError: the output is a plain tensor, whose placement nobody knows.
    """
    if not isinstance(output, DTensor):
        raise LayoutError(
            describe(
                "ParallelStyle",
                "the module's forward must return a DTensor",
                "Keep DTensors inside the module, or use PrepareModuleOutput",
                output=type(output).__name__,
            )
        )
    return give(output.redistribute(mesh, [desired]), mesh, use_local_output)


def give(tensor: DTensor, mesh: DeviceMesh, local: bool) -> torch.Tensor:
    """Give a DTensor, or its local part, whose global size this forward pass knows from here on."""
    if local:
        learn(mesh, tensor.layout)
        return tensor.to_local()
    return tensor
