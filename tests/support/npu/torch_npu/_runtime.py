# SPDX-License-Identifier: Apache-2.0
"""The module `torch.npu`, with the names that torch and we call."""

import contextlib
import os
import types

import torch

from torch_npu import _device

# What torch.utils.checkpoint asks before it keeps random states.
_initialized = True
_state = {"device": 0, "initialized": False}


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    """One process sees up to eight devices, fewer if the environment says so."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return 8 if visible is None else len([name for name in visible.split(",") if name])


def is_initialized() -> bool:
    return _state["initialized"]


def set_device(device) -> None:
    index = torch.device("npu", device).index if isinstance(device, int) else device.index
    if not 0 <= index < device_count():
        raise RuntimeError(f"Invalid device ID {index}: there are {device_count()} NPUs")
    _state.update(device=index, initialized=True)


def current_device() -> int:
    _state["initialized"] = True
    return 0


def synchronize(device=None) -> None:
    """Do nothing: every kernel is done when it returns."""


def manual_seed(seed: int) -> None:
    _device.generator.manual_seed(seed)


def get_rng_state(device="npu") -> torch.Tensor:
    return _device.generator.get_state()


def set_rng_state(new_state: torch.Tensor, device="npu") -> None:
    _device.generator.set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def _is_in_bad_fork() -> bool:
    return False


@contextlib.contextmanager
def device(index):
    yield


class Stream:
    """The one stream there is; work is in order."""

    def __init__(self, *args, **kwargs) -> None: ...
    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None: ...
    def wait_stream(self, stream) -> None: ...
    def wait_event(self, event) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event=None):
        return event or Event()


class Event:
    """An event that has happened."""

    def __init__(self, *args, **kwargs) -> None: ...
    def record(self, stream=None) -> None: ...
    def wait(self, stream=None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


_stream = Stream()


def current_stream(device=None) -> Stream:
    return _stream


def stream(stream) -> Stream:
    return _stream


module = types.ModuleType("torch.npu")
module.__dict__.update({k: v for k, v in globals().items() if not k.startswith("__")})
module.manual_seed_all = manual_seed
