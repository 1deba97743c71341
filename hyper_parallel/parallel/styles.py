# SPDX-License-Identifier: Apache-2.0
"""ColwiseParallel and RowwiseParallel: the styles that cut a Linear or an Embedding."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel.core import Partial, Placement, Replicate, Shard
from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.read import read_placement
from hyper_parallel.errors import PlanError
from hyper_parallel.parallel.checks import local_shard, lost_parameter, refuse_other_mesh
from hyper_parallel.parallel.edge import MovingStyle
from hyper_parallel.parallel.linear import LinearForward
from hyper_parallel.runtime import DeviceMesh

__all__ = ["ColwiseParallel", "RowwiseParallel"]

# Hooks that the fused local form replaces: overriding one turns it off.
_REPLACED = (
    "transform_inputs_pre_forward",
    "context_around_forward",
    "transform_output_post_forward",
)


class _CutStyle(MovingStyle):
    """What ColwiseParallel and RowwiseParallel share: a Linear or Embedding, cut in one dim."""

    is_column: bool
    _defaults: tuple[Placement, Placement]  # of input and output

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        even_shards: bool = False,
    ) -> None:
        given, wanted = self._defaults
        self.input_layouts = (self._read(input_layouts or given, "input_layouts"),)
        self.output_layouts = (self._read(output_layouts or wanted, "output_layouts"),)
        self.use_local_output = use_local_output
        self.even_shards = even_shards

    def _read(self, placement: Any, argument: str) -> Placement:
        if isinstance(placement, (list, tuple)) and len(placement) == 1:
            placement = placement[0]
        return read_placement(placement, f"{type(self).__name__}({argument}=...)")

    @property
    def block(self) -> int:
        """The block in which the features are cut, which the weight follows."""
        (cut,) = self.output_layouts if self.is_column else self.input_layouts
        return cut.block if isinstance(cut, Shard) and cut.dim == -1 else 1

    def _table(self, module: nn.Module) -> dict[str, Placement]:
        """Give the placement of each parameter by name."""
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(1, self.block) if self.is_column else Shard(0)}
        cut = Shard(0 if self.is_column else 1, self.block)
        return {"weight": cut, "bias": cut if self.is_column else Replicate()}

    def validate_module(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Refuse anything but a Linear or an Embedding that has its own weight.

        Raises:
            PlanError: another kind of module, one that is sharded already, a weight that is
                computed, or an Embedding option that needs the whole table.
        """
        self.refuse_styled(module)
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise PlanError(
                self.where(),
                "the module must be an nn.Linear or an nn.Embedding",
                "Name such a module in the plan, or write a ParallelStyle of your own",
                module=type(module).__name__,
            )
        if module._parameters.get("weight") is None:
            raise PlanError(
                self.where(),
                "the weight must be a parameter of the module itself",
                "Remove the parametrization, or leave this module out of the plan",
                parameters=sorted(name for name, _ in module.named_parameters()),
            )
        if isinstance(module, nn.Embedding):
            self._refuse_options(module)

    def _refuse_options(self, module: nn.Embedding) -> None:
        """Refuse the options of an Embedding whose meaning needs the whole table."""
        options = {
            "max_norm": module.max_norm is not None,
            "sparse": module.sparse,
            "scale_grad_by_freq": not self.is_column and module.scale_grad_by_freq,
        }
        for name, is_set in options.items():
            if is_set:
                raise PlanError(
                    self.where(),
                    f"an Embedding must not use {name}",
                    "Leave the option out, or leave this module out of the plan",
                    **{name: getattr(module, name)},
                )

    def validate_param(
        self, module: nn.Module, name: str, param: nn.Parameter, mesh: DeviceMesh
    ) -> None:
        """Refuse a parameter that is sharded otherwise, or one this style does not know.

        Raises:
            PlanError: as said.
        """
        table = self._table(module)
        if name not in table:
            raise PlanError(
                self.where(),
                f"parameters must be among {sorted(table)}",
                "Override validate_param and shard_param to say how to cut this one",
                parameter=name,
            )
        self.check_sharded(f"parameter {name!r}", param, mesh, table[name])

    def shard_param(
        self, module: nn.Module, name: str, param: nn.Parameter, mesh: DeviceMesh
    ) -> nn.Parameter | None:
        """Cut the weight; cut or replicate the bias."""
        return self.distribute(param, mesh, self._table(module)[name])

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Use the fused local form, unless a hook that it replaces was overridden."""
        return all(getattr(type(self), hook) is getattr(_CutStyle, hook) for hook in _REPLACED)

    def _fits_fused(self, module: nn.Module) -> bool:
        """Tell whether the fused form computes what the module's own forward would."""
        places = (self.input_layouts[0], self.output_layouts[0])
        table = self._table(module)
        return (
            type(module).forward is nn.Linear.forward
            and "forward" not in module.__dict__
            and not any(isinstance(p, Partial) and p.reduce_op != "sum" for p in places)
            and all(
                isinstance(param, DTensor)
                and not param.dtype.is_complex
                and param.placements == (table.get(name),)
                for name, param in module.named_parameters(recurse=False)
            )
        )

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Install the fused local form, or the module's own forward on DTensors."""
        if self._fits_fused(module) and self.should_use_local_tensors(module):
            module.forward = LinearForward(module, mesh, self)  # type: ignore[arg-type]
        else:
            super().install_forward(module, mesh)

    def transform_inputs_pre_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring the first argument to where the module needs it, as a DTensor."""
        try:
            local_shard(module.weight, self.where())  # type: ignore[arg-type]
        except AttributeError as error:
            raise lost_parameter(self.where(), error) from None
        if not args and "input" in kwargs:
            kwargs = dict(kwargs)
            args = (kwargs.pop("input"),)
        if args and isinstance(args[0], DTensor):
            refuse_other_mesh(args[0], mesh, self.where())
        is_cut = isinstance(module, nn.Linear) and not self.is_column
        desired = Shard(-1, self.block) if is_cut else Replicate()
        return self._arrange_first(args, kwargs, mesh, self.input_layouts[0], desired), kwargs

    def transform_output_post_forward(
        self, module: nn.Module, mesh: DeviceMesh, output: Any
    ) -> Any:
        """Bring the output to where the plan says."""
        return self._hand_out(output, mesh, self.output_layouts[0])

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts[0]!r},"
            f" output_layouts={self.output_layouts[0]!r},"
            f" use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_CutStyle):
    """Cut a Linear's output features, or an Embedding's columns, between the ranks.

    weight [out, in]: S(0); bias [out]: S(0). Embedding weight [vocab, H]: S(1). With
    `output_layouts=Shard(-1, block=b)` they are cut only between blocks of b features, so that no
    attention head is cut through where the heads do not divide.

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

    is_column = True
    _defaults = (Replicate(), Shard(-1))


class RowwiseParallel(_CutStyle):
    """Cut a Linear's input features, or an Embedding's vocabulary, between the ranks.

    weight [out, in]: S(1); bias [out]: Replicate, added once. Embedding weight [vocab, H]: S(0).
    With `input_layouts=Shard(-1, block=b)` the weight is cut between blocks of b features.

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

    is_column = False
    _defaults = (Shard(-1), Replicate())
