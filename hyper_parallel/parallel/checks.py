# SPDX-License-Identifier: Apache-2.0
"""What a parallel forward checks of its inputs and parameters, and how its errors say where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.compiler import is_compiling

from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.interop import is_torch_dtensor, local_of
from hyper_parallel.errors import HyperParallelError, LayoutError, PlanError
from hyper_parallel.runtime import DeviceMesh

_compile_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined]

__all__ = [
    "first_tensor",
    "is_watched",
    "keep_out_of_compile",
    "local_shard",
    "lost_parameter",
    "refuse_other_mesh",
    "relocate",
]


def relocate(error: HyperParallelError, where: str) -> NoReturn:
    """Raise it again with the module named: `Style: ...` becomes `Style on 'path': ...`."""
    text = str(error)
    if text.startswith(where):
        raise error
    for inner in (where.partition(" on ")[0], "ParallelStyle", "Layout"):
        text = text.removeprefix(f"{inner}: ")
    error.args = (f"{where}: {text}", *error.args[1:])
    raise error


def lost_parameter(where: str, error: KeyError | AttributeError) -> PlanError:
    """Give the error of a module that lost a parameter, to a parametrization for example."""
    return PlanError(
        where,
        "the module must keep the parameters that the style made",
        "Parametrize the module by hand, or leave it out of the plan",
        missing=str(error),
    )


def local_shard(param: torch.Tensor, where: str) -> torch.Tensor:
    """Give this rank's part of a sharded parameter, detached; ours or torch's (under FSDP2).

    Raises:
        PlanError: it is a plain tensor, which does not say what it is a part of.
    """
    if isinstance(param, DTensor) or is_torch_dtensor(param):
        return local_of(param)
    raise PlanError(
        where,
        "the parameters must stay the DTensors that the style made",
        "Distribute a new one with distribute_tensor before assigning it",
        parameter=type(param).__name__,
        shape=tuple(param.shape),
    )


def keep_out_of_compile(
    forward: Callable[..., Any], where: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a forward outside of torch.compile, which cannot follow our parameters' gradients.

    Called while it is traced, this raises, so that the graph breaks; called in the eager run that
    follows, it switches the compiler off for the forward and all inside it.

    Raises:
        PlanError: it is being traced.
    """
    if is_compiling():
        raise PlanError(
            where,
            "a parallel module must not be traced by torch.compile",
            "Compile the parts between parallel modules, or leave torch.compile out",
        )
    return torch.compiler.disable(forward)(*args, **kwargs)


def is_watched() -> bool:
    """Tell whether torch.compile traces this call, or watches the frames that it makes."""
    return is_compiling() or callable(_compile_callback())


def refuse_other_mesh(tensor: DTensor, mesh: DeviceMesh, where: str) -> None:
    """Refuse a DTensor that is not on the mesh of the style.

    Raises:
        LayoutError: as said.
    """
    if tensor.device_mesh != mesh:
        raise LayoutError(
            where,
            f"a DTensor input must be on the mesh of the style, {mesh!r}",
            "Take its part on that mesh with to_local()",
            device_mesh=tensor.device_mesh,
        )


def first_tensor(where: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Give the input that a style moves: the first positional one.

    Raises:
        PlanError: there is none, or it is not a tensor.
    """
    if args and isinstance(args[0], torch.Tensor):
        return args[0]
    raise PlanError(
        where,
        "the module's first positional argument must be the tensor to shard",
        "Pass it positionally",
        args=tuple(type(arg).__name__ for arg in args),
        kwargs=sorted(kwargs),
    )
