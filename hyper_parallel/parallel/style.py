# SPDX-License-Identifier: Apache-2.0
"""ParallelStyle: how one module's parameters, inputs and outputs lie on a mesh axis.

[Note: hooks] `apply` is the public entry. It runs, for each parameter, `validate_param` and
`shard_param`, then `install_forward`. The installed forward runs `transform_inputs_pre_forward`,
the module's own forward inside `context_around_forward`, and `transform_output_post_forward`. Each
may be overridden on its own. Where `should_use_local_tensors` says so (and the module's forward is
that of nn.Linear), a fused local form replaces these three.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from hyper_parallel.core import Layout, Placement
from hyper_parallel.dtensor import DTensor, distribute_tensor
from hyper_parallel.dtensor.interop import is_torch_dtensor, own_parameters
from hyper_parallel.dtensor.read import one_axis_mesh
from hyper_parallel.errors import HyperParallelError, PlanError
from hyper_parallel.parallel.checks import is_watched, keep_out_of_compile, relocate
from hyper_parallel.parallel.sizes import ScopedForward
from hyper_parallel.runtime import DeviceMesh

__all__ = [
    "Applying",
    "ParallelStyle",
    "StyledForward",
    "applying",
]


@dataclass(slots=True)
class Applying:
    """What one parallelize_module call shares between its styles."""

    path: str = ""
    # Parameters that were sharded in this call, by the identity of the plain one: ties stay.
    sharded: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)


class _State(threading.local):
    """The parallelize_module call that this thread is in."""

    call: Applying | None = None


_state = _State()


@contextmanager
def applying(call: Applying) -> Iterator[Applying]:
    """Run styles as part of one call."""
    before, _state.call = _state.call, call
    try:
        yield call
    finally:
        _state.call = before


class ParallelStyle:
    """Base of all styles; subclass it and override hooks to make your own, see [Note: hooks]."""

    # The rank of the mesh whose parameters count; parallelize_module sets it, as torch does.
    src_data_rank: int | None = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_apply" in cls.__dict__ and cls.apply is ParallelStyle.apply:
            raise PlanError(
                "ParallelStyle",
                "a style must define apply(module, device_mesh), which is public here",
                "Rename _apply to apply",
                style=cls.__name__,
            )

    def apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        """Shard a module's parameters and install its parallel forward, in place.

        Args:
            module: the module.
            device_mesh: a mesh of one axis, ours or torch's.

        Returns:
            The module.

        Communicates:
            As distribute_tensor, for each sharded parameter.

        Raises:
            PlanError: the style cannot shard this module, or a parameter is sharded already.
            LayoutError: a mesh of several axes, this rank is outside it, or a placement that
                does not fit a parameter.
        """
        mesh = one_axis_mesh(device_mesh, type(self).__name__)
        mesh.get_local_rank()
        with applying(_state.call or Applying()):
            try:
                self._shard(module, mesh)
                self.install_forward(module, mesh)
            except HyperParallelError as error:
                relocate(error, self.where())
        return module

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Validate everything, then replace parameters."""
        self.validate_module(module, mesh)
        own = [
            (holder, name, param)
            for holder in self.modules_to_shard(module)
            for name, param in holder.named_parameters(recurse=False)
        ]
        for holder, name, param in own:
            self.validate_param(holder, name, param, mesh)
        for holder, name, param in own:
            new = self.shard_param(holder, name, param, mesh)
            if new is not None:
                holder.register_parameter(name, new)

    def where(self) -> str:
        """Name this style and the module it is being applied to, for errors."""
        call, name = _state.call, type(self).__name__
        return f"{name} on {call.path!r}" if call is not None and call.path else name

    def modules_to_shard(self, module: nn.Module) -> list[nn.Module]:
        """List the modules whose own parameters are validated and sharded: the module itself."""
        return [module]

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
        """Put the parallel forward in the place of the module's own.

        Styles that were applied before see inputs and outputs first, as torch's hooks do.
        """
        forward = module.__dict__.get("forward")
        inner = forward.original if isinstance(forward, ScopedForward) else forward
        if not isinstance(inner, StyledForward):
            inner = module.forward = StyledForward(module)
        inner.styles.append((self, mesh, self.where()))

    def distribute(
        self, param: nn.Parameter, mesh: DeviceMesh, placement: Placement
    ) -> nn.Parameter:
        """Shard one parameter; a tied one that was sharded in this call is given again.

        Raises:
            PlanError: it is sharded already, or was sharded otherwise in this call.
        """
        call = _state.call or Applying()
        before = call.sharded.get(id(param))
        tied = param if before is None else before[1]
        if isinstance(tied, DTensor):
            self.check_sharded("parameter", tied, mesh, placement)
            return cast(nn.Parameter, tied)
        source = None if param.is_meta else self.src_data_rank  # no data to send
        new = distribute_tensor(param, mesh, [placement], src_data_rank=source)
        result = cast(nn.Parameter, new)
        call.sharded[id(param)] = (param, result)
        return result

    def check_sharded(
        self, name: str, param: torch.Tensor, mesh: DeviceMesh, placement: Placement
    ) -> None:
        """Refuse a parameter that is sharded, but for one that lies as this style would put it.

        Raises:
            PlanError: as said.
        """
        if is_torch_dtensor(param):
            raise PlanError(
                self.where(),
                f"{name} must not be torch's DTensor yet",
                "Parallelize the module before fully_shard",
                placements=param.placements,  # type: ignore[attr-defined]
            )
        if not isinstance(param, DTensor):
            return
        wanted = Layout(mesh, (placement,), param.layout.shape)
        if param.layout != wanted:
            raise PlanError(
                self.where(),
                f"{name} must be plain, or sharded already (tied) as this style would do it",
                "Apply one style to each parameter; cut tied ones alike, or untie them",
                have=param.layout,
                wanted=wanted,
            )

    def refuse_styled(self, module: nn.Module) -> None:
        """Refuse a module whose forward some style has made parallel already.

        Raises:
            PlanError: as said.
        """
        if getattr(module.__dict__.get("forward"), "shards", False):
            raise PlanError(
                self.where(),
                "the module must not be sharded by a style already",
                "Apply one such style to each module, once",
                module=type(module).__name__,
            )


class StyledForward:
    """A module's forward with styles around it. Deep-copies with its module."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.original = module.forward
        self.styles: list[tuple[ParallelStyle, DeviceMesh, str]] = []

    @property
    def shards(self) -> bool:
        """Tell whether one of the styles replaced parameters."""
        inner = getattr(self.original, "shards", False)
        return inner or any(
            type(style).shard_param is not ParallelStyle.shard_param for style, _, _ in self.styles
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward with the styles around it."""
        if is_watched():
            return keep_out_of_compile(self.__call__, self.styles[0][2], args, kwargs)
        module = self.module
        with ExitStack() as contexts:
            for style, mesh, where in self.styles:
                try:
                    args, kwargs = style.transform_inputs_pre_forward(module, mesh, args, kwargs)
                except HyperParallelError as error:
                    relocate(error, where)
                contexts.enter_context(style.context_around_forward(module, mesh))
            output = self.original(*args, **kwargs)
        for style, mesh, where in self.styles:
            try:
                output = style.transform_output_post_forward(module, mesh, output)
            except HyperParallelError as error:
                relocate(error, where)
        return output
