# SPDX-License-Identifier: Apache-2.0
"""TorchState: what torch keeps per process or per thread, given to each simulated rank."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["TorchState", "carry_modes"]


class TorchState:
    """The default generators and the default dtype.

    Args:
        device_type: an accelerator's generator is swapped, too.
    """

    def __init__(self, device_type: str) -> None:
        module = None if device_type == "cpu" else getattr(torch, device_type, None)
        self._device: Any = module if hasattr(module, "get_rng_state") else None

    def fork(self) -> Any:
        """Copy the states."""
        device = None if self._device is None else self._device.get_rng_state()
        return torch.default_generator.get_state(), torch.get_default_dtype(), device

    def swap(self, state: Any) -> Any:
        """Set the states and give the old ones."""
        before = self.fork()
        generator, dtype, device = state
        torch.default_generator.set_state(generator)
        if dtype != before[1]:
            torch.set_default_dtype(dtype)
        if device is not None:
            self._device.set_rng_state(device)
        return before

    def seed(self, seed: int) -> None:
        """Seed every default generator."""
        torch.manual_seed(seed)


def carry_modes(device_type: str) -> Callable[[], AbstractContextManager[None]]:
    """Read this thread's modes; give a context that enters them on another thread.

    Carries grad mode, inference mode, autocast and the default device. Backward runs on the rank's
    own thread: an engine thread shared by all ranks would deadlock in a backward collective.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    default_device = torch.get_default_device()
    autocasts = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in {"cpu", device_type} - {"meta"}
        if torch.is_autocast_enabled(kind)
    ]

    @contextmanager
    def modes() -> Generator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            if default_device != torch.get_default_device():
                stack.enter_context(default_device)
            yield

    return modes
