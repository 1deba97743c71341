# SPDX-License-Identifier: Apache-2.0
"""MovingStyle: a style that takes tensors in where they are declared, and hands them out moved."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core import Placement
from hyper_parallel.dtensor import DTensor
from hyper_parallel.errors import LayoutError
from hyper_parallel.parallel.checks import first_tensor
from hyper_parallel.parallel.sizes import global_shape, learn
from hyper_parallel.parallel.style import ParallelStyle
from hyper_parallel.runtime import DeviceMesh

__all__ = ["MovingStyle"]


class MovingStyle(ParallelStyle):
    """What the styles of this package do at a module's edge."""

    use_local_output: bool
    even_shards: bool

    def _arrange(
        self, tensor: torch.Tensor, mesh: DeviceMesh, declared: Placement, desired: Placement
    ) -> DTensor:
        """Bring one tensor to the desired placement, as a DTensor.

        A plain tensor is where it was declared; a DTensor is moved from where it says it is.
        """
        if not isinstance(tensor, DTensor):
            shape = global_shape(
                tensor, mesh, declared, where=self.where(), even_shards=self.even_shards
            )
            tensor = DTensor.from_local(tensor, mesh, [declared], shape=shape)
        return tensor.redistribute(mesh, [desired])

    def _arrange_first(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mesh: DeviceMesh,
        declared: Placement,
        desired: Placement,
    ) -> tuple[Any, ...]:
        """Give the positional arguments, of which the first is arranged."""
        first = first_tensor(self.where(), args, kwargs)
        return (self._arrange(first, mesh, declared, desired), *args[1:])

    def _hand_out(self, output: Any, mesh: DeviceMesh, desired: Placement) -> torch.Tensor:
        """Bring a DTensor output to the desired placement, and hand it out plain if asked."""
        if not isinstance(output, DTensor):
            raise LayoutError(
                self.where(),
                "the module's forward must return a DTensor",
                "Keep DTensors inside the module, or use PrepareModuleOutput",
                output=type(output).__name__,
            )
        return self._give(output.redistribute(mesh, [desired]), mesh)

    def _give(self, tensor: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        """Give a DTensor, or its part, whose global size this forward pass knows from here on."""
        if not self.use_local_output:
            return tensor
        learn(mesh, tensor.layout)
        return tensor.to_local()
