# SPDX-License-Identifier: Apache-2.0
"""TorchWork: a torch collective in flight, with the local steps that finish its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.backends._torch.faults import Faults

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

    __slots__ = ("_faults", "_finish", "_given", "_name", "_result", "_work")

    def __init__(
        self, faults: Faults, name: str, given: dict[str, Any], work: Any, result: torch.Tensor
    ) -> None:
        self._faults = faults
        self._name = name
        self._given = given
        self._work = work
        self._result = result
        self._finish: Finish | None = None

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
            if self._finish is not None:
                self._result = self._finish(self._result)
        return self._result

    def then(self, finish: Finish) -> TorchWork:
        """Pass the result through one more local step when it is waited for."""
        before = self._finish
        self._finish = finish if before is None else lambda result: finish(before(result))
        return self


def then(result: torch.Tensor | TorchWork, finish: Finish) -> torch.Tensor | TorchWork:
    """Finish a result now, or once it has been waited for."""
    return result.then(finish) if isinstance(result, TorchWork) else finish(result)
