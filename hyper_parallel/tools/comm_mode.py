# SPDX-License-Identifier: Apache-2.0
"""CommDebugMode: list the collectives of this library that a block issues, and for which module.

[Note: module of a backward] A module's forward leaves autograd nodes. At its edges the node behind
each tensor that enters or leaves it is told which module it was made in; when the engine comes to
such a node, backward is in that module until it comes to the next. What a module's own code makes
between two of them follows its neighbour's name, as the engine goes backward in order of creation.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves

from hyper_parallel.core.estimate import align, bytes_text
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.runtime import IssuedCollective, current_rank, watch

__all__ = ["CommDebugMode", "ListedCollective"]

_OUTSIDE = "Global"  # torch's word for what no module issued


@dataclass(frozen=True, slots=True)
class ListedCollective(IssuedCollective):
    """One collective, and what issued it.

    Args:
        module: the class of the outermost module that was called, and the path from there, such as
            "Transformer.layers.0.mlp"; "Global" outside of modules.
        is_backward: whether the autograd engine was running.
    """

    module: str
    is_backward: bool


class CommDebugMode:
    """List the collectives of this library that a block issues, by module, forward and backward.

    What torch itself communicates, FSDP2 for example, is seen by torch's mode of this name. Inside
    `simulate`, enter it on each rank: it lists that rank's own. What runs backward in the block has
    a module if its forward ran there, too.

    Raises:
        HyperParallelError: it is entered while it is active already.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from hyper_parallel import ColwiseParallel, CommDebugMode, RowwiseParallel
        >>> from hyper_parallel import init_device_mesh, parallelize_module, simulate
        >>> @simulate(2)
        ... def train():
        ...     net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        ...     with CommDebugMode() as mode:
        ...         net(torch.ones(3, 4, requires_grad=True)).sum().backward()
        ...     return mode
        >>> mode = train()[0]
        >>> mode.get_comm_counts(), mode.get_total_counts()
        ({'all_reduce': 2}, 2)
        >>> print(mode)
        module        pass      calls  op          group     bytes in  bytes out
        Sequential.2  forward       1  all_reduce  tp: 0, 1      48 B       48 B
        Sequential.0  backward      1  all_reduce  tp: 0, 1      48 B       48 B
    """

    def __init__(self) -> None:
        self._found: list[ListedCollective] = []
        self._modules = _Modules()
        self._active: ExitStack | None = None

    @property
    def collectives(self) -> tuple[ListedCollective, ...]:
        """All that were issued since the mode was entered, in order."""
        return tuple(self._found)

    def get_comm_counts(self) -> dict[str, int]:
        """Count the collectives by op; torch's mode has its own ops as keys."""
        return dict(Counter(one.op for one in self._found))

    def get_total_counts(self) -> int:
        """Count all collectives."""
        return len(self._found)

    def __enter__(self) -> CommDebugMode:
        if self._active is not None:
            text = "a mode must not be entered while it is active"
            raise HyperParallelError("CommDebugMode", text, "Make another one")
        self._found.clear()
        with ExitStack() as stack:
            stack.enter_context(self._modules)
            stack.enter_context(watch(self._note))
            self._active = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        active, self._active = self._active, None
        if active is not None:
            active.close()

    def _note(self, call: IssuedCollective) -> None:
        module, is_backward = self._modules.here()
        facts = (call.op, call.axes, call.ranks, call.bytes_in, call.bytes_out)
        self._found.append(ListedCollective(*facts, module, is_backward))

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    def __str__(self) -> str:
        rows = [("module", "pass", "calls", "op", "group", "bytes in", "bytes out")]
        for one, calls in Counter(self._found).items():
            way = "backward" if one.is_backward else "forward"
            moved = (bytes_text(one.bytes_in), bytes_text(one.bytes_out))
            rows.append((one.module, way, str(calls), one.op, _group(one), *moved))
        return align(rows, "<<><<>>")


def _group(one: IssuedCollective) -> str:
    """Write a group: its axes, and its ranks, the many of a large one in short."""
    first, last, many = one.ranks[0], one.ranks[-1], len(one.ranks)
    ranks = ", ".join(map(str, one.ranks)) if many <= 8 else f"{first}, ..., {last} ({many} ranks)"
    return f"{'+'.join(one.axes)}: {ranks}" if one.axes else ranks


class _Entered(NamedTuple):
    """A module whose forward runs, and the run of the autograd engine that it runs in."""

    module: nn.Module
    name: str
    task: int


class _Modules:
    """Which module issues what happens now; see [Note: module of a backward]."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._entered: list[_Entered] = []
        self._backward: dict[int, str] = {}  # by run of the engine
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._hooks = ExitStack()

    def __enter__(self) -> _Modules:
        self._rank = current_rank()
        self._entered.clear()
        self._backward.clear()
        for hook in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            self._hooks.callback(hook.remove)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.close()

    def here(self) -> tuple[str, bool]:
        """Give the module, and whether the engine runs."""
        task = torch._C._current_graph_task_id()
        entered = self._entered[-1] if self._entered else None
        if entered is not None and entered.task == task:  # also what checkpoint runs once more
            return entered.name, task != -1
        return self._backward.get(task, _OUTSIDE), task != -1

    def _enter(self, module: nn.Module, args: Any) -> None:
        if current_rank() != self._rank:  # the hooks are those of all simulated ranks
            return
        self._mark(args, self._entered[-1].name if self._entered else _OUTSIDE)
        entered = _Entered(module, self._name(module), torch._C._current_graph_task_id())
        self._entered.append(entered)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if current_rank() != self._rank:
            return
        while self._entered:
            entered = self._entered.pop()
            if entered.module is module:
                self._mark(output, entered.name)
                return

    def _name(self, module: nn.Module) -> str:
        if module not in self._names:
            name = type(module).__name__
            if self._entered:  # made on the way, so no path leads to it
                self._names[module] = f"{self._entered[-1].name}.{name}"
            else:
                for path, inner in module.named_modules():
                    self._names[inner] = f"{name}.{path}".rstrip(".")
        return self._names[module]

    def _mark(self, values: Any, name: str) -> None:
        for value in tree_leaves(values):
            node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
            if node is not None and self not in node.metadata:
                node.metadata[self] = name
                node.register_prehook(lambda grads: self._come_to(name))

    def _come_to(self, name: str) -> None:
        self._backward[torch._C._current_graph_task_id()] = name
