# SPDX-License-Identifier: Apache-2.0
"""SequenceParallel: a norm, or another module that treats rows alone, on a cut sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hyper_parallel.core import Replicate, Shard
from hyper_parallel.dtensor import DTensor, distribute_tensor
from hyper_parallel.dtensor.interop import own_parameters
from hyper_parallel.parallel.edge import MovingStyle
from hyper_parallel.runtime import DeviceMesh

__all__ = ["SequenceParallel"]


class SequenceParallel(MovingStyle):
    """Run a norm (or another module that treats rows alone) on a sharded sequence.

    Parameters and buffers are replicated, those of modules inside it too; the gradients of
    parameters are summed over the ranks.

    Args:
        sequence_dim: the dim that is cut; default 1, for [B, S, D].
        use_local_output: hand out a plain local tensor; default a DTensor.
        even_shards: promise that plain inputs have equal shards.

    Communicates:
        Forward: nothing for an input that is cut already (a plain one may need one exchange of
        an integer per forward pass). Backward: one all-reduce for each parameter.

    Raises:
        PlanError: a parameter is sharded already.

    Source: Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198,
        section 4.2.2.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from hyper_parallel import SequenceParallel, init_device_mesh, simulate
        >>> @simulate(2)
        ... def shape():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     norm = SequenceParallel().apply(nn.LayerNorm(8), mesh)
        ...     rows = 3 if mesh.get_local_rank() == 0 else 2
        ...     return tuple(norm(torch.ones(1, rows, 8)).shape)
        >>> shape()
        [(1, 5, 8), (1, 5, 8)]
    """

    def __init__(
        self,
        *,
        sequence_dim: int = 1,
        use_local_output: bool = False,
        even_shards: bool = False,
    ) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output
        self.even_shards = even_shards

    def modules_to_shard(self, module: nn.Module) -> list[nn.Module]:
        """List the module and all inside it."""
        return list(module.modules())

    def validate_module(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Refuse a module that is sharded already, or has such a one inside.

        Raises:
            PlanError: as said.
        """
        for inner in module.modules():
            self.refuse_styled(inner)

    def validate_param(
        self, module: nn.Module, name: str, param: nn.Parameter, mesh: DeviceMesh
    ) -> None:
        """Refuse a parameter that is sharded already.

        Raises:
            PlanError: as said.
        """
        self.check_sharded(f"parameter {name!r}", param, mesh, Replicate())

    def shard_param(
        self, module: nn.Module, name: str, param: nn.Parameter, mesh: DeviceMesh
    ) -> nn.Parameter | None:
        """Replicate the parameter."""
        return self.distribute(param, mesh, Replicate())

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replicate the buffers, too, and install the forward."""
        for inner in module.modules():
            for name, buffer in inner.named_buffers(recurse=False):
                if not isinstance(buffer, DTensor):
                    source = None if buffer.is_meta else self.src_data_rank
                    inner._buffers[name] = distribute_tensor(buffer, mesh, src_data_rank=source)
        super().install_forward(module, mesh)

    def context_around_forward(
        self, module: nn.Module, mesh: DeviceMesh
    ) -> AbstractContextManager[Any]:
        """Show the parameters of the module and of all inside it as our DTensors."""
        return _all_parameters(module) if module._modules else own_parameters(module)

    def transform_inputs_pre_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring the first argument to the sequence sharding, as a DTensor."""
        place = self.sequence_sharding[0]
        return self._arrange_first(args, kwargs, mesh, place, place), kwargs

    def transform_output_post_forward(
        self, module: nn.Module, mesh: DeviceMesh, output: Any
    ) -> Any:
        """Hand out the output, or each output of several, cut as the input is."""
        place = self.sequence_sharding[0]
        if isinstance(output, (tuple, list)):
            moved = [
                self._hand_out(one, mesh, place) if isinstance(one, torch.Tensor) else one
                for one in output
            ]
            return moved if isinstance(output, list) else tuple(moved)
        return self._hand_out(output, mesh, place)

    def __repr__(self) -> str:
        return (
            f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim},"
            f" use_local_output={self.use_local_output})"
        )


@contextmanager
def _all_parameters(module: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for inner in module.modules():
            stack.enter_context(own_parameters(inner))
        yield
