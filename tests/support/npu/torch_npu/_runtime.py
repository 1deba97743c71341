# SPDX-License-Identifier: Apache-2.0
"""The module `torch.npu`, with the names that torch and we call.

A process has one NPU, and tensors say npu:0, whatever index was asked for.
"""

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch

from torch_npu import _device

# What torch.utils.checkpoint asks before it keeps random states.
_initialized = True
_is_set = [False]


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    """Count eight devices, or what the environment leaves of them."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return 8 if visible is None else len([name for name in visible.split(",") if name])


def is_initialized() -> bool:
    return _is_set[0]


def set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if not 0 <= index < device_count():
        raise RuntimeError(f"Invalid device ID {index}: there are {device_count()} NPUs")
    _is_set[0] = True


def current_device() -> int:
    _is_set[0] = True
    return 0


def get_device_name(device: Any = None) -> str:
    return "simulated NPU"


def synchronize(device: Any = None) -> None:
    """Do nothing: every kernel is done when it returns."""


def manual_seed(seed: int) -> None:
    _device.generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return _device.generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    _device.generator.set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def _is_in_bad_fork() -> bool:
    return False


@contextlib.contextmanager
def device(index: Any) -> Iterator[None]:
    yield


class Event:
    """An event, which has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what a real one takes."""

    def record(self, stream: Any = None) -> None:
        """Do nothing: there is one order of work."""

    wait = synchronize = record

    def query(self) -> bool:
        return True


class Stream(contextlib.nullcontext):
    """The one order of work that there is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what a real one takes."""
        super().__init__()

    def synchronize(self, other: Any = None) -> None:
        """Do nothing: there is one order of work."""

    wait_stream = wait_event = synchronize

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


_stream = Stream()


def current_stream(device: Any = None) -> Stream:
    return _stream


def stream(stream: Stream) -> Stream:
    return _stream


module = types.ModuleType("torch.npu")
module.__dict__.update({k: v for k, v in globals().items() if not k.startswith("__")})
