# SPDX-License-Identifier: Apache-2.0
"""A fused matmul that takes the two steps, for backends that have no kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hyper_parallel.backends._torch.simulated import SimulatedBackend
from hyper_parallel.runtime import Communicator

__all__ = ["Stepwise", "give_kernels"]


class Stepwise:
    """See [Note: fused kinds]; takes matrices only, as a backend's would."""

    unserved: torch.dtype | None = None

    def __init__(self, kind: str, communicator: Communicator) -> None:
        self.kind, self.comm = kind, communicator

    def refusal(self, x: torch.Tensor, w: torch.Tensor) -> str | None:
        return f"{x.dtype} is not served" if x.dtype == self.unserved else None

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        assert x.dim() == w.dim() == 2
        assert x.is_contiguous()
        if self.kind == "all_gather_matmul":
            whole = self.comm.all_gather(x)
            return whole @ w, whole
        if self.kind == "matmul_reduce_scatter":
            return self.comm.reduce_scatter(x @ w)
        return self.comm.all_reduce(x @ w)


def give_kernels(monkeypatch: pytest.MonkeyPatch, kernel: type[Stepwise] = Stepwise) -> None:
    """Let simulated ranks have kernels of all kinds."""
    make = SimulatedBackend.__init__

    def make_fusing(self: Any, *args: Any) -> None:
        make(self, *args)
        self.capabilities = replace(self.capabilities, fused=kernel)

    monkeypatch.setattr(SimulatedBackend, "__init__", make_fusing)
