# SPDX-License-Identifier: Apache-2.0
"""ColwiseParallel, RowwiseParallel and SequenceParallel: the styles that shard parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyper_parallel.core import Placement, Replicate, Shard
from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.read import read_placement
from hyper_parallel.errors import PlanError, describe
from hyper_parallel.parallel.embedding import EmbeddingForward, refuse_options
from hyper_parallel.parallel.linear import LinearForward
from hyper_parallel.parallel.prepare import arrange, hand_out
from hyper_parallel.parallel.style import ParallelStyle
from hyper_parallel.runtime import DeviceMesh

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel"]


class _CutStyle(ParallelStyle):
    """What ColwiseParallel and RowwiseParallel share: a Linear or Embedding, cut in one dim."""

    kind: str
    # Placement of each parameter, by module type and parameter name.
    placements: dict[type[nn.Module], dict[str, Placement]]

    def __init__(
        self,
        input_layouts: Placement | None,
        output_layouts: Placement | None,
        use_local_output: bool,
        even_shards: bool,
    ) -> None:
        name = type(self).__name__
        self.input_layouts = (self._read(input_layouts, name, "input_layouts"),)
        self.output_layouts = (self._read(output_layouts, name, "output_layouts"),)
        self.use_local_output = use_local_output
        self.even_shards = even_shards

    def _read(self, placement: Any, name: str, argument: str) -> Placement:
        if isinstance(placement, (list, tuple)) and len(placement) == 1:
            placement = placement[0]
        return read_placement(placement, f"{name}({argument}=...)")

    def desired_input(self, module: nn.Module) -> Placement:
        """Give the placement the module's own computation needs its input in."""
        raise NotImplementedError

    def validate_module(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Refuse anything but a Linear or an Embedding.

        Raises:
            PlanError: another kind of module, or an Embedding option that needs the whole table.
        """
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise PlanError(
                describe(
                    self.where(),
                    "the module must be an nn.Linear or an nn.Embedding",
                    "Name such a module in the plan, or write a ParallelStyle of your own",
                    module=type(module).__name__,
                )
            )
        if isinstance(module, nn.Embedding):
            refuse_options(module, self.kind, self.where())

    def validate_param(
        self, module: nn.Module, name: str, param: nn.Parameter, mesh: DeviceMesh
    ) -> None:
        """Refuse a parameter that is sharded already, or one this style does not know.

        Raises:
            PlanError: as said.
        """
        self.refuse_sharded(name, param)
        if name not in self._table(module):
            raise PlanError(
                describe(
                    self.where(),
                    f"parameters must be among {sorted(self._table(module))}",
                    "Override shard_param to say how to cut this one",
                    parameter=name,
                )
            )

    def shard_param(
        self, module: nn.Module, name: str, param: nn.Parameter, mesh: DeviceMesh
    ) -> nn.Parameter | None:
        """Cut the weight; cut or replicate the bias."""
        if isinstance(param, DTensor):  # tied, and cut earlier in this call
            self._check_tie(param, self._table(module)[name])
            return None
        return self.distribute(param, mesh, self._table(module)[name])

    def _table(self, module: nn.Module) -> dict[str, Placement]:
        kind = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
        return self.placements[kind]

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Use the fused local form where the module's forward is Linear's or Embedding's own."""
        own = type(module).forward in (nn.Linear.forward, nn.Embedding.forward)
        cls, base = type(self), ParallelStyle
        hooks = (
            cls.transform_inputs_pre_forward is _CutStyle.transform_inputs_pre_forward
            and cls.transform_output_post_forward is _CutStyle.transform_output_post_forward
            and cls.context_around_forward is base.context_around_forward
        )
        return own and hooks and "forward" not in module.__dict__

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Install the fused local form, or the module's own forward on DTensors."""
        if not self.should_use_local_tensors(module):
            super().install_forward(module, mesh)
            return
        form = LinearForward if isinstance(module, nn.Linear) else EmbeddingForward
        module.forward = form(
            module,  # type: ignore[arg-type]
            mesh,
            self.where(),
            kind=self.kind,
            input_layout=self.input_layouts[0],
            output_layout=self.output_layouts[0],
            use_local_output=self.use_local_output,
            even_shards=self.even_shards,
        )

    def transform_inputs_pre_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring the first argument to where the module needs it, as a DTensor."""
        first = arrange(
            args[0],
            mesh,
            self.input_layouts[0],
            self.desired_input(module),
            where=self.where(),
            even_shards=self.even_shards,
        )
        return (first, *args[1:]), kwargs

    def transform_output_post_forward(
        self, module: nn.Module, mesh: DeviceMesh, output: Any
    ) -> Any:
        """Bring the output to where the plan says."""
        return hand_out(output, mesh, self.output_layouts[0], self.use_local_output)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts[0]!r},"
            f" output_layouts={self.output_layouts[0]!r},"
            f" use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_CutStyle):
    """Cut a Linear's output features, or an Embedding's columns, between the ranks.

    weight [out, in]: S(0); bias [out]: S(0). Embedding weight [vocab, H]: S(1).

    Args:
        input_layouts: where a plain input is; default Replicate.
        output_layouts: where the output shall be; default Shard(-1).
        use_local_output: hand out a plain local tensor instead of a DTensor.
        even_shards: promise that plain inputs cut on a dim other than the last have equal shards.

    Communicates:
        Forward: the move of the input to Replicate (none by default) and of the output from
        Shard(-1) to `output_layouts` (none by default).
        Backward: the output's move back, and the pending sum of grad_input to the input's layout:
        by default one all-reduce of the input's size, while grad_weight is computed.

    Raises:
        PlanError: applied to anything but a Linear or Embedding, or to a sharded parameter.

    Source: Megatron-LM, arXiv:1909.08053, section 3 (f in front of a column-parallel layer).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from hyper_parallel import ColwiseParallel, init_device_mesh, simulate
        >>> @simulate(2)
        ... def shapes():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     layer = ColwiseParallel().apply(nn.Linear(4, 6), mesh)
        ...     return tuple(layer(torch.ones(3, 4)).shape), layer.weight.placements
        >>> shapes()[0]
        ((3, 3), (S(0),))
    """

    kind = "colwise"
    placements = {  # noqa: RUF012
        nn.Linear: {"weight": Shard(0), "bias": Shard(0)},
        nn.Embedding: {"weight": Shard(1)},
    }

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        even_shards: bool = False,
    ) -> None:
        super().__init__(
            input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output, even_shards
        )

    def desired_input(self, module: nn.Module) -> Placement:
        """Give Replicate."""
        return Replicate()


class RowwiseParallel(_CutStyle):
    """Cut a Linear's input features, or an Embedding's vocabulary, between the ranks.

    weight [out, in]: S(1); bias [out]: Replicate, added once. Embedding weight [vocab, H]: S(0).

    Args:
        input_layouts: where a plain input is; default Shard(-1). (An Embedding's ids usually are
            Replicate.)
        output_layouts: where the output shall be; default Replicate.
        use_local_output: hand out a plain local tensor instead of a DTensor.
        even_shards: promise that plain inputs cut on a dim other than the last have equal shards.

    Communicates:
        Forward: the move of the input to Shard(-1) (none by default) and of the pending sum to
        `output_layouts`: by default one all-reduce of the output's size; for Shard(d) one
        reduce-scatter. Backward: the moves back; none by default.

    Raises:
        PlanError: applied to anything but a Linear or Embedding, or to a sharded parameter.

    Source: Megatron-LM, arXiv:1909.08053, section 3 (g behind a row-parallel layer).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from hyper_parallel import RowwiseParallel, init_device_mesh, simulate
        >>> @simulate(2)
        ... def result():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     layer = nn.Linear(4, 1)
        ...     nn.init.ones_(layer.weight), nn.init.ones_(layer.bias)
        ...     RowwiseParallel().apply(layer, mesh)
        ...     return layer(torch.ones(1, 2)).item()
        >>> result()
        [5.0, 5.0]
    """

    kind = "rowwise"
    placements = {  # noqa: RUF012
        nn.Linear: {"weight": Shard(1), "bias": Replicate()},
        nn.Embedding: {"weight": Shard(0)},
    }

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        even_shards: bool = False,
    ) -> None:
        super().__init__(
            input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output, even_shards
        )

    def desired_input(self, module: nn.Module) -> Placement:
        """Give Shard(-1) for a Linear, Replicate for an Embedding's ids."""
        return Shard(-1) if isinstance(module, nn.Linear) else Replicate()


class SequenceParallel(ParallelStyle):
    """Run a norm (or another module that treats rows alone) on a sharded sequence.

    Parameters are replicated; their gradients are summed over the ranks.

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

    def validate_param(
        self, module: nn.Module, name: str, param: nn.Parameter, mesh: DeviceMesh
    ) -> None:
        """Refuse a parameter that is sharded already.

        Raises:
            PlanError: as said.
        """
        self.refuse_sharded(name, param)

    def shard_param(
        self, module: nn.Module, name: str, param: nn.Parameter, mesh: DeviceMesh
    ) -> nn.Parameter | None:
        """Replicate the parameter."""
        if isinstance(param, DTensor):  # tied, and replicated earlier in this call
            self._check_tie(param, Replicate())
            return None
        return self.distribute(param, mesh, Replicate())

    def transform_inputs_pre_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring the first argument to the sequence sharding, as a DTensor."""
        place = self.sequence_sharding[0]
        if not args or not isinstance(args[0], torch.Tensor):
            raise PlanError(
                describe(
                    self.where(),
                    "the module's first positional argument must be the tensor to shard",
                    "Pass it positionally",
                    args=len(args),
                )
            )
        first = arrange(
            args[0], mesh, place, place, where=self.where(), even_shards=self.even_shards
        )
        return (first, *args[1:]), kwargs

    def transform_output_post_forward(
        self, module: nn.Module, mesh: DeviceMesh, output: Any
    ) -> Any:
        """Hand out the output, cut as the input is."""
        return hand_out(output, mesh, self.sequence_sharding[0], self.use_local_output)

    def __repr__(self) -> str:
        return (
            f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim},"
            f" use_local_output={self.use_local_output})"
        )
