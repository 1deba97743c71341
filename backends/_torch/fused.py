# SPDX-License-Identifier: Apache-2.0
"""FusedKernel: what the fused matmuls of torch's backends check alike.

[Note: verdicts] What one rank sees of a group another may not: how many devices there are, which
groups it has been in. So the ranks of a group agree once, at its first call that is within the
limits of all calls, and keep to that as long as the group exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hyper_parallel.backends._torch.dtypes import name_of as _name
from hyper_parallel.errors import HyperParallelError

__all__ = ["FusedKernel", "verdicts"]

# Why a group has no kernels, "" where it has; see [Note: verdicts].
verdicts: MutableMapping[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


class FusedKernel:
    """A matmul and a collective in one, over the process group of a communicator.

    Args:
        kind: see [Note: fused kinds].
        op: the library's function.
        communicator: a TorchCommunicator, or a checked one around it.
    """

    ops: ClassVar[Mapping[str, str]]  # names by kind
    device_type: str
    dtypes: tuple[torch.dtype, ...]

    def __init__(self, kind: str, op: Any, communicator: Any) -> None:
        # In checked mode this is the one that compares calls; it holds the torch one.
        self.kind, self.op, self._communicator = kind, op, communicator
        self._torchs: Any = getattr(communicator, "inner", communicator)
        self.ranks: tuple[int, ...] = self._torchs.ranks
        self.group: dist.ProcessGroup = self._torchs.group

    @classmethod
    def find(cls, kind: str, communicator: Any) -> FusedKernel | None:
        """Give the kernel of a kind, None where what is installed has none."""
        op = cls.op_named(cls.ops[kind]) if kind in cls.ops else None
        return None if op is None else cls(kind, op, communicator)

    @staticmethod
    def op_named(name: str) -> Any:
        """Give an op of the library, or None."""
        raise NotImplementedError

    def refusal(self, x: torch.Tensor, w: torch.Tensor) -> str | None:
        """Say which limit keeps it from serving this call, or None; alike on all ranks.

        Communicates:
            An exchange of one number, at the group's first call.
        """
        if list(self.ranks) != sorted(self.ranks):
            return "the mesh must list the group's ranks in ascending order"
        if {x.device.type, w.device.type} != {self.device_type}:
            return f"the matrices must be on {self.device_type}"
        if x.dtype != w.dtype or x.dtype not in self.dtypes:
            known = ", ".join(map(_name, self.dtypes))
            return f"the dtypes must be one of {known}, but are {_name(x.dtype)}, {_name(w.dtype)}"
        if not (x.numel() and w.numel()):
            return "the matrices must have elements"
        return self.limit(x, w) or self._verdict()

    def limit(self, x: torch.Tensor, w: torch.Tensor) -> str | None:
        """Say what else keeps this library's kernels from serving a call, or None."""
        del x, w
        return None

    def group_limit(self) -> str | None:
        """Say what this rank knows to keep kernels from the group, or None."""
        raise NotImplementedError

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        """Run the kernel; its failures are explained as those of a collective are."""
        try:
            return self.run(x, w)
        except HyperParallelError:
            raise
        except RuntimeError as error:
            raise self._torchs.explain(self.kind, {"x": x}, error) from error

    def run(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        """Run the kernel."""
        raise NotImplementedError

    def _verdict(self) -> str | None:
        found = verdicts.get(self.group)
        if found is None:
            mine = self.group_limit()
            able = self._communicator.all_gather_ints([int(mine is None)])
            others = "" if all(n for (n,) in able) else "another rank of the group cannot run it"
            found = verdicts[self.group] = mine or others
        return found or None
