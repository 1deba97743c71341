# SPDX-License-Identifier: Apache-2.0
"""TorchWork: a torch collective in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.backends._torch.faults import Faults
from hyper_parallel.runtime.interface import Work
from hyper_parallel.runtime.program import Rest

__all__ = ["TorchWork", "then"]

Finish = Callable[[torch.Tensor], torch.Tensor]


class TorchWork:
    """A collective in flight; `wait` gives its result.

    Args:
        faults: waits, and says what went wrong.
        name: the collective, for error texts.
        given: its arguments, for error texts.
        work: torch's handle.
        result: the tensor it fills.
    """

    __slots__ = ("_faults", "_given", "_name", "_result", "_work")

    def __init__(
        self, faults: Faults, name: str, given: dict[str, Any], work: Any, result: torch.Tensor
    ) -> None:
        self._faults = faults
        self._name = name
        self._given = given
        self._work = work
        self._result = result

    def wait(self) -> torch.Tensor:
        """Wait (accelerators: order the current stream after it), then give the result."""
        if self._work is not None:
            try:
                if self._result.is_cpu:
                    self._faults.wait(self._work)
                else:
                    self._work.wait()
            except RuntimeError as error:
                raise self._faults.failed(self._name, self._given, error) from error
            self._work = None
            self._given = {}
        return self._result


def then(result: torch.Tensor | Work, finish: Finish) -> torch.Tensor | Work:
    """Finish a result now, or once it has been waited for."""
    return finish(result) if isinstance(result, torch.Tensor) else Rest(result, finish)
