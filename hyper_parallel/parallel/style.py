# SPDX-License-Identifier: Apache-2.0
"""ParallelStyle: how one module's parameters, inputs and outputs lie on a mesh axis.

[Note: hooks] `apply` is the public entry. It runs, for each own parameter, `validate_param` and
`shard_param`, then `install_forward`. The installed forward runs `transform_inputs_pre_forward`,
the module's own forward inside `context_around_forward`, and `transform_output_post_forward`. Each
may be overridden on its own. Where `should_use_local_tensors` says so (and the module's forward is
the plain one), a fused local form replaces these three.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from hyper_parallel.core import Placement
from hyper_parallel.dtensor import DTensor, distribute_tensor
from hyper_parallel.dtensor.interop import own_parameters
from hyper_parallel.dtensor.read import one_axis_mesh
from hyper_parallel.errors import LayoutError, PlanError, describe
from hyper_parallel.runtime import DeviceMesh

__all__ = ["Applying", "ParallelStyle", "StyledForward", "applying"]

_state = threading.local()


@dataclass(slots=True)
class Applying:
    """What one parallelize_module call shares between its styles."""

    src_data_rank: int | None = 0
    path: str = ""
    # Parameters that were sharded in this call, by the identity of the plain one: ties stay.
    sharded: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)


def current() -> Applying:
    """Give the running parallelize_module call, or a fresh one for a lone `apply`."""
    return getattr(_state, "applying", None) or Applying()


@contextmanager
def applying(call: Applying) -> Iterator[Applying]:
    """Run styles as part of one call."""
    before = getattr(_state, "applying", None)
    _state.applying = call
    try:
        yield call
    finally:
        _state.applying = before


class ParallelStyle:
    """Base of all styles; subclass it and override hooks to make your own, see [Note: hooks]."""

    src_data_rank: int | None = 0

    def apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        """Shard a module's own parameters and install its parallel forward, in place.

        Args:
            module: the module.
            device_mesh: a mesh of one axis, ours or torch's.

        Returns:
            The module.

        Communicates:
            As distribute_tensor, for each sharded parameter.

        Raises:
            PlanError: the style cannot shard this module, or a parameter is sharded already.
            LayoutError: a mesh of several axes, or this rank is outside it.
        """
        mesh = one_axis_mesh(device_mesh, type(self).__name__)
        mesh.get_local_rank()
        self.validate_module(module, mesh)
        own = list(module.named_parameters(recurse=False))
        for name, param in own:
            self.validate_param(module, name, param, mesh)
        for name, param in own:
            new = self.shard_param(module, name, param, mesh)
            if new is not None:
                module.register_parameter(name, new)
        self.install_forward(module, mesh)
        return module

    def where(self) -> str:
        """Name this style and the module it is being applied to, for errors."""
        path = current().path
        return f"{type(self).__name__} on {path!r}" if path else type(self).__name__

    def validate_module(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Refuse a module this style cannot serve, before anything changes."""

    def validate_param(
        self, module: nn.Module, name: str, param: nn.Parameter, mesh: DeviceMesh
    ) -> None:
        """Refuse a parameter this style cannot shard, before anything changes."""

    def shard_param(
        self, module: nn.Module, name: str, param: nn.Parameter, mesh: DeviceMesh
    ) -> nn.Parameter | None:
        """Give the parameter that replaces `param`, or None to leave it."""
        return None

    def transform_inputs_pre_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the arguments the module's own forward shall see."""
        return args, kwargs

    def context_around_forward(
        self, module: nn.Module, mesh: DeviceMesh
    ) -> AbstractContextManager[Any]:
        """Give a context to run the module's own forward in."""
        return own_parameters(module)

    def transform_output_post_forward(
        self, module: nn.Module, mesh: DeviceMesh, output: Any
    ) -> Any:
        """Give what the module's caller shall see."""
        return output

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Tell whether the fused local form of the module may replace its own forward."""
        return False

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Put the parallel forward in the place of the module's own."""
        module.forward = StyledForward(self, module, mesh, self.where())

    def distribute(
        self, param: nn.Parameter, mesh: DeviceMesh, placement: Placement
    ) -> nn.Parameter:
        """Shard one parameter; a tied one that was sharded in this call is given again.

        Raises:
            PlanError: it is sharded already, or was sharded otherwise in this call.
        """
        call = current()
        before = call.sharded.get(id(param))
        if before is not None:
            self._check_tie(before[1], placement)
            return before[1]
        new = distribute_tensor(param, mesh, [placement], src_data_rank=call.src_data_rank)
        result = cast(nn.Parameter, new)
        call.sharded[id(param)] = (param, result)
        return result

    def refuse_sharded(self, name: str, param: torch.Tensor) -> None:
        """Refuse a parameter that some style has sharded already, but for ties in this call."""
        ties = [new for _, new in current().sharded.values()]
        if isinstance(param, DTensor) and not any(param is new for new in ties):
            raise PlanError(
                describe(
                    self.where(),
                    f"parameter {name!r} must not be sharded already",
                    "Apply one style to each parameter, once",
                    layout=param.layout,
                )
            )

    def _check_tie(self, tied: Any, placement: Placement) -> None:
        wanted = tied.layout.with_placements([placement])
        if tied.layout != wanted:
            raise PlanError(
                describe(
                    self.where(),
                    "a tied parameter must be sharded alike in every module that has it",
                    "Use styles that cut the same dim, or untie the parameter",
                    have=tied.layout,
                    wanted=wanted,
                )
            )


class StyledForward:
    """A module's forward with a style around it. Deep-copies and pickles with its module."""

    def __init__(self, style: ParallelStyle, module: nn.Module, mesh: DeviceMesh, where: str):
        self.style, self.module, self.mesh, self.where = style, module, mesh, where
        self.original = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        style, module, mesh = self.style, self.module, self.mesh
        try:
            args, kwargs = style.transform_inputs_pre_forward(module, mesh, args, kwargs)
        except LayoutError as error:
            raise _located(error, self.where) from error
        with style.context_around_forward(module, mesh):
            output = self.original(*args, **kwargs)
        return style.transform_output_post_forward(module, mesh, output)


def _located(error: LayoutError, where: str) -> LayoutError:
    """Name the module once, at the edge: `Style: ...` becomes `Style on 'path': ...`."""
    text = str(error)
    if text.startswith(where):
        return error
    return LayoutError(f"{where}: {text.removeprefix(where.split(' on ')[0] + ': ')}")
