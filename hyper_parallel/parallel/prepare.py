# SPDX-License-Identifier: Apache-2.0
"""PrepareModuleInput / Output / InputOutput: move what enters and leaves a module, nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.core import Placement
from hyper_parallel.dtensor.read import read_placement
from hyper_parallel.errors import PlanError, near_names
from hyper_parallel.parallel.edge import MovingStyle
from hyper_parallel.runtime import DeviceMesh

__all__ = ["PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"]

_Given = Placement | Sequence[Placement | None] | None


class _PrepareStyle(MovingStyle):
    """A style that is shown with all its options."""

    def __init__(self, use_local_output: bool, even_shards: bool) -> None:
        self.use_local_output = use_local_output
        self.even_shards = even_shards

    def _read(self, layout: Any) -> Placement | None:
        return None if layout is None else read_placement(layout, type(self).__name__)

    def _read_layouts(self, layouts: Any) -> tuple[Placement | None, ...] | None:
        """Read one placement, or a sequence of placements and Nones."""
        if layouts is None:
            return None
        entries = layouts if isinstance(layouts, Sequence) else (layouts,)
        return tuple(map(self._read, entries))

    def _read_named(self, layouts: Mapping[str, Any] | None) -> dict[str, Placement | None]:
        return {name: self._read(layout) for name, layout in (layouts or {}).items()}

    def _refuse_unlike(self, declared: str, desired: str) -> None:
        """Refuse options of which one has entries that the other lacks."""
        one, two = getattr(self, declared), getattr(self, desired)
        by_name = isinstance(one, dict)
        if one.keys() != two.keys() if by_name else len(one or ()) != len(two or ()):
            raise PlanError(
                type(self).__name__,
                f"{declared} and {desired} must match",
                "Give one entry for each",
                **{declared: one, desired: two},
            )

    def _move(self, value: Any, mesh: DeviceMesh, *layouts: Placement | None) -> Any:
        """Move one input or output; what has no layout, and an absent one (None), stays."""
        declared, desired = layouts
        if declared is None or value is None:
            return value
        if not isinstance(value, torch.Tensor):
            raise PlanError(
                self.where(),
                "what has a layout must be a tensor",
                "Put None in the place of its layout",
                layout=declared,
                value=type(value).__name__,
            )
        desired = declared if desired is None else desired
        return self._give(self._arrange(value, mesh, declared, desired), mesh)

    def _move_all(
        self, values: tuple[Any, ...], mesh: DeviceMesh, side: str, each: str
    ) -> tuple[Any, ...]:
        """Move the inputs, or the outputs, by their layouts."""
        declared = getattr(self, f"{side}_layouts")
        desired = getattr(self, f"desired_{side}_layouts") or ()
        if len(values) != len(declared):
            raise PlanError(
                self.where(),
                f"{side}_layouts must have one entry per {each}",
                f"Use None for {side}s to leave alone",
                **{f"{side}s": len(values), f"{side}_layouts": declared},
            )
        moves = zip(values, declared, desired, strict=True)
        return tuple(self._move(value, mesh, *layouts) for value, *layouts in moves)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


class PrepareModuleInput(_PrepareStyle):
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
        input_layouts: _Given = None,
        desired_input_layouts: _Given = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
        even_shards: bool = False,
    ) -> None:
        self.input_layouts = self._read_layouts(input_layouts)
        self.desired_input_layouts = self._read_layouts(desired_input_layouts)
        self.input_kwarg_layouts = self._read_named(input_kwarg_layouts)
        self.desired_input_kwarg_layouts = self._read_named(desired_input_kwarg_layouts)
        super().__init__(use_local_output, even_shards)
        self._refuse_unlike("input_layouts", "desired_input_layouts")
        self._refuse_unlike("input_kwarg_layouts", "desired_input_kwarg_layouts")

    def validate_module(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Refuse names in input_kwarg_layouts that the module's forward does not have.

        Raises:
            PlanError: as said.
        """
        params = inspect.signature(type(module).forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in params.values())
        unknown = [name for name in self.input_kwarg_layouts if name not in params]
        if unknown and not takes_any:
            near = near_names(unknown[0], list(params))
            raise PlanError(
                self.where(),
                "input_kwarg_layouts must name arguments of the module's forward",
                f"Did you mean {near[0]!r}" if near else f"Its arguments are {list(params)[1:]}",
                input_kwarg_layouts=unknown,
            )

    def transform_inputs_pre_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the inputs."""
        if self.input_kwarg_layouts and self.input_layouts is None and args:
            given = list(inspect.signature(type(module).forward).parameters)[1 : len(args) + 1]
            positional = [name for name in given if name in self.input_kwarg_layouts]
            if positional:
                raise PlanError(
                    self.where(),
                    "inputs in input_kwarg_layouts must be passed by keyword",
                    "Pass them by keyword, or declare them in input_layouts",
                    positional=positional,
                )
        if self.input_layouts is not None:
            args = self._move_all(args, mesh, "input", "positional input")
        for name, declared in self.input_kwarg_layouts.items():
            if name in kwargs:
                layouts = declared, self.desired_input_kwarg_layouts[name]
                kwargs = {**kwargs, name: self._move(kwargs[name], mesh, *layouts)}
        return args, kwargs


class PrepareModuleOutput(_PrepareStyle):
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
        self.output_layouts = self._read_layouts(output_layouts) or ()
        self.desired_output_layouts = self._read_layouts(desired_output_layouts) or ()
        super().__init__(use_local_output, even_shards)
        self._refuse_unlike("output_layouts", "desired_output_layouts")

    def transform_output_post_forward(
        self, module: nn.Module, mesh: DeviceMesh, output: Any
    ) -> Any:
        """Move the outputs."""
        outputs = output if isinstance(output, tuple) else (output,)
        moved = self._move_all(outputs, mesh, "output", "output")
        return moved[0] if len(moved) == 1 else moved  # as torch: also for a tuple of one


class PrepareModuleInputOutput(_PrepareStyle):
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

    def __init__(  # noqa: PLR0913  # torch's arguments
        self,
        *,
        input_layouts: _Given = None,
        desired_input_layouts: _Given = None,
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

    def validate_module(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Refuse what PrepareModuleInput refuses."""
        self.prepare_module_input.validate_module(module, mesh)

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
