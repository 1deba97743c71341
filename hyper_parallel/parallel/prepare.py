# SPDX-License-Identifier: Apache-2.0
"""PrepareModuleInput / Output / InputOutput: move what enters and leaves a module, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.core import Placement
from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.read import read_placement
from hyper_parallel.errors import LayoutError, PlanError, describe
from hyper_parallel.parallel.sizes import global_shape
from hyper_parallel.parallel.style import ParallelStyle
from hyper_parallel.runtime import DeviceMesh

__all__ = [
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "arrange",
    "hand_out",
]


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
    moved = output.redistribute(mesh, [desired])
    return moved.to_local() if use_local_output else moved


_Layouts = tuple[Placement | None, ...]


def _read_layouts(value: Any, where: str) -> _Layouts | None:
    """Read one placement, or a sequence of placements and Nones."""
    if value is None:
        return None
    entries = value if isinstance(value, Sequence) else (value,)
    return tuple(None if entry is None else read_placement(entry, where) for entry in entries)


def _read_named(value: Mapping[str, Any] | None, where: str) -> dict[str, Placement | None]:
    return {
        name: None if entry is None else read_placement(entry, where)
        for name, entry in (value or {}).items()
    }


def _same_length(where: str, **layouts: Any) -> None:
    (one, first), (two, second) = layouts.items()
    if len(first) != len(second) or (isinstance(first, dict) and first.keys() != second.keys()):
        raise PlanError(
            describe(where, f"{one} and {two} must match", "Give one entry for each", **layouts)
        )


class PrepareModuleInput(ParallelStyle):
    """Move a module's inputs from their declared to their desired placements.

    Args:
        input_layouts: one placement, or one per positional input; None leaves an input alone.
        desired_input_layouts: the same for what the module shall see.
        input_kwarg_layouts: placements of keyword inputs by name.
        desired_input_kwarg_layouts: the same for what the module shall see.
        use_local_output: the module sees plain local tensors; default DTensors.
        even_shards: promise that plain shards are equal.

    Communicates:
        Forward: each input's move. Backward: the way back.

    Raises:
        PlanError: layouts and desired layouts do not match, or the inputs do not match them.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from hyper_parallel import PrepareModuleInput, Replicate, Shard, init_device_mesh
        >>> from hyper_parallel import simulate
        >>> @simulate(2)
        ... def shape():
        ...     style = PrepareModuleInput(
        ...         input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ...     )
        ...     block = style.apply(nn.Identity(), init_device_mesh("cpu", (2,)))
        ...     return tuple(block(torch.ones(1, 3, 4)).shape)
        >>> shape()
        [(1, 6, 4), (1, 6, 4)]
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | Sequence[Placement | None] | None = None,
        desired_input_layouts: Placement | Sequence[Placement | None] | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
        even_shards: bool = False,
    ) -> None:
        where = "PrepareModuleInput"
        self.input_layouts = _read_layouts(input_layouts, where)
        self.desired_input_layouts = _read_layouts(desired_input_layouts, where)
        self.input_kwarg_layouts = _read_named(input_kwarg_layouts, where)
        self.desired_input_kwarg_layouts = _read_named(desired_input_kwarg_layouts, where)
        self.use_local_output = use_local_output
        self.even_shards = even_shards
        _same_length(
            where,
            input_layouts=self.input_layouts or (),
            desired_input_layouts=self.desired_input_layouts or (),
        )
        _same_length(
            where,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
        )

    def transform_inputs_pre_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the inputs."""
        if self.input_layouts is not None:
            if len(args) != len(self.input_layouts):
                raise PlanError(
                    describe(
                        self.where(),
                        "input_layouts must have one entry per positional input",
                        "Use None for inputs to leave alone",
                        inputs=len(args),
                        input_layouts=self.input_layouts,
                    )
                )
            wanted = self.desired_input_layouts or ()
            args = tuple(
                self._one(value, mesh, declared, desired)
                for value, declared, desired in zip(args, self.input_layouts, wanted, strict=True)
            )
        for name, declared in self.input_kwarg_layouts.items():
            if name in kwargs:
                desired = self.desired_input_kwarg_layouts[name]
                kwargs = {**kwargs, name: self._one(kwargs[name], mesh, declared, desired)}
        return args, kwargs

    def _one(
        self, value: Any, mesh: DeviceMesh, declared: Placement | None, desired: Placement | None
    ) -> Any:
        if declared is None or not isinstance(value, torch.Tensor):
            return value
        moved = arrange(
            value,
            mesh,
            declared,
            declared if desired is None else desired,
            where=self.where(),
            even_shards=self.even_shards,
        )
        return moved.to_local() if self.use_local_output else moved


class PrepareModuleOutput(ParallelStyle):
    """Move a module's outputs from their declared to their desired placements.

    Args:
        output_layouts: one placement, or one per output; None leaves an output alone.
        desired_output_layouts: the same for what the caller shall see.
        use_local_output: hand out plain local tensors; default True.
        even_shards: promise that plain shards are equal.

    Communicates:
        Forward: each output's move. Backward: the way back.

    Raises:
        PlanError: layouts and desired layouts do not match, or the outputs do not match them.
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | Sequence[Placement | None],
        desired_output_layouts: Placement | Sequence[Placement | None],
        use_local_output: bool = True,
        even_shards: bool = False,
    ) -> None:
        where = "PrepareModuleOutput"
        self.output_layouts = _read_layouts(output_layouts, where) or ()
        self.desired_output_layouts = _read_layouts(desired_output_layouts, where) or ()
        self.use_local_output = use_local_output
        self.even_shards = even_shards
        _same_length(
            where,
            output_layouts=self.output_layouts,
            desired_output_layouts=self.desired_output_layouts,
        )

    def transform_output_post_forward(
        self, module: nn.Module, mesh: DeviceMesh, output: Any
    ) -> Any:
        """Move the outputs."""
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        if len(outputs) != len(self.output_layouts):
            raise PlanError(
                describe(
                    self.where(),
                    "output_layouts must have one entry per output",
                    "Use None for outputs to leave alone",
                    outputs=len(outputs),
                    output_layouts=self.output_layouts,
                )
            )
        moved: list[Any] = []
        for value, declared, desired in zip(
            outputs, self.output_layouts, self.desired_output_layouts, strict=True
        ):
            if declared is None or not isinstance(value, torch.Tensor):
                moved.append(value)
                continue
            laid = arrange(
                value,
                mesh,
                declared,
                declared if desired is None else desired,
                where=self.where(),
                even_shards=self.even_shards,
            )
            moved.append(laid.to_local() if self.use_local_output else laid)
        return moved[0] if outputs is not output else type(output)(moved)


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one.

    Args:
        input_layouts: as in PrepareModuleInput.
        desired_input_layouts: as in PrepareModuleInput.
        input_kwarg_layouts: as in PrepareModuleInput.
        desired_input_kwarg_layouts: as in PrepareModuleInput.
        use_local_input: the module sees plain local tensors; default DTensors.
        output_layouts: as in PrepareModuleOutput.
        desired_output_layouts: as in PrepareModuleOutput.
        use_local_output: hand out plain local tensors; default True.
        even_shards: promise that plain shards are equal.

    Communicates:
        Each input's and output's move; backward the way back.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | Sequence[Placement | None] | None = None,
        desired_input_layouts: Placement | Sequence[Placement | None] | None = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | Sequence[Placement | None],
        desired_output_layouts: Placement | Sequence[Placement | None],
        use_local_output: bool = True,
        even_shards: bool = False,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
            even_shards=even_shards,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
            even_shards=even_shards,
        )

    def transform_inputs_pre_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the inputs."""
        style = self.prepare_module_input
        return style.transform_inputs_pre_forward(module, mesh, args, kwargs)

    def transform_output_post_forward(
        self, module: nn.Module, mesh: DeviceMesh, output: Any
    ) -> Any:
        """Move the outputs."""
        return self.prepare_module_output.transform_output_post_forward(module, mesh, output)
