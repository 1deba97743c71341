# SPDX-License-Identifier: Apache-2.0
"""step_locally: let an optimizer work on the local parts, below Python dispatch.

[Note: local steps] A DTensor is the local tensor, so an optimizer that works element by element may
run on that: for the time of a step parameters are shown as the plain tensors that they are, with
Python dispatch below autograd switched off. So the optimizer's state is plain local tensors, too.
Closures and hooks run outside of that. `state_dict` shows the state as DTensors, and
`load_state_dict` takes these, or whole plain tensors.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn, optim
from torch.optim import Optimizer

from hyper_parallel.dtensor.entries import accumulated
from hyper_parallel.dtensor.interop import is_torch_dtensor
from hyper_parallel.dtensor.local_op import without_dispatch
from hyper_parallel.dtensor.moves import move
from hyper_parallel.dtensor.tensor import DTensor
from hyper_parallel.errors import LayoutError

__all__ = ["step_locally"]

_ELEMENTWISE = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
_Optimizer = TypeVar("_Optimizer", bound=Optimizer)


def step_locally(optimizer: _Optimizer) -> _Optimizer:
    """Let an optimizer step the local parts of its parameters, at the cost of plain tensors.

    `state_dict()` still holds DTensors, so checkpoints do not change; `optimizer.state` holds plain
    local tensors. A copy of the optimizer must be given to this function, too.

    Args:
        optimizer: one of torch's that work element by element: SGD, the Adam family, RMSprop,
            Rprop, Adagrad, Adadelta, ASGD, or a subclass. Parameters are DTensors or plain.

    Returns:
        The optimizer, changed in place.

    Communicates:
        Nothing; nor do its steps.

    Raises:
        LayoutError: another kind of optimizer, or parameters of FSDP2.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, distribute_tensor, init_device_mesh
        >>> from hyper_parallel import simulate, step_locally
        >>> @simulate(2)
        ... def step():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     p = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        ...     optimizer = step_locally(torch.optim.SGD([p], lr=0.5, momentum=0.9))
        ...     (p * p).sum().backward()
        ...     optimizer.step()
        ...     return p.tolist(), optimizer.state_dict()["state"][0]["momentum_buffer"].placements
        >>> step()[0]
        ([0.0, 0.0, 0.0, 0.0], (S(0),))
    """
    _refuse(optimizer)
    hooked: Any = type(optimizer).step
    inner: Callable[..., Any] = hooked.__wrapped__

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if type(p) is DTensor]
        for param, raw in zip(params, accumulated(params), strict=True):
            if isinstance(raw, DTensor):
                param.grad = raw  # makes it plain
        try:
            for param in params:
                param.__class__ = nn.Parameter  # pyright: ignore[reportAttributeAccessIssue]
            with without_dispatch():
                inner(self)
        finally:
            for param in params:
                param.__class__ = DTensor
        return loss

    # What runs an optimizer's own hooks around its step, and tells profilers.
    with_hooks = Optimizer.profile_hook_step(step)
    optimizer.step = types.MethodType(with_hooks, optimizer)
    optimizer.register_state_dict_post_hook(_shown)
    optimizer.register_load_state_dict_post_hook(_kept_local)
    _kept_local(optimizer)
    return optimizer


def _refuse(optimizer: Any) -> None:
    where = "step_locally"
    if not isinstance(optimizer, _ELEMENTWISE):
        raise LayoutError(
            where,
            "the optimizer must be one of torch's that work element by element",
            "Step it as it is: it then works on DTensors",
            optimizer=type(optimizer).__name__,
        )
    for group in optimizer.param_groups:
        if any(map(is_torch_dtensor, group["params"])):
            raise LayoutError(
                where,
                "the parameters must be DTensors of hyper_parallel, or plain",
                "Step an optimizer of FSDP2's parameters as it is",
                parameter="torch.distributed.tensor.DTensor",
            )


def _kept_local(optimizer: Optimizer) -> None:
    """Make an optimizer's state plain and local."""
    for param, state in optimizer.state.items():
        if isinstance(param, DTensor):
            for name, value in state.items():
                state[name] = _as_local(param, value)


def _as_local(param: DTensor, value: Any) -> Any:
    """Give this rank's part of a DTensor, or of a plain tensor of the parameter's global shape."""
    layout = param._layout
    if isinstance(value, DTensor):
        return value.local_in(layout.with_shape(value.shape))
    if isinstance(value, torch.Tensor) and value.ndim and value.shape != param._local.shape:
        return move(value, layout.replicated, layout) if value.shape == param.shape else value
    return value


def _shown(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Show local state as DTensors laid out as the parameter is."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = dict(state_dict["state"])
    for index, values in state.items():
        param = params[index] if isinstance(index, int) else None
        if isinstance(param, DTensor):
            state[index] = {
                name: DTensor(value, param._layout)
                if name != "step"
                and isinstance(value, torch.Tensor)
                and value.shape == param._local.shape
                else value
                for name, value in values.items()
            }
    return {**state_dict, "state": state}
