# SPDX-License-Identifier: Apache-2.0
"""Start the default process group and choose this process's device, as torch's own mesh does."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist

from hyper_parallel.errors import BackendError

__all__ = ["start_world"]

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start_world(device_type: str, library: str) -> None:
    """Start the default process group if there is none; choose the device if none was.

    An accelerator's group also serves CPU tensors, over gloo ("cpu:gloo,cuda:nccl"), so that host
    integers are exchanged without the device. A group that the user started is used as it is.

    Args:
        device_type: such as "cpu" or "cuda".
        library: the collective library its tensors need, such as "gloo" or "nccl".

    Raises:
        BackendError: torchrun's environment is missing, the default group does not serve
            `device_type`, or LOCAL_RANK names no device.
    """
    if device_type != "cpu":
        _choose_device(device_type)
    if dist.is_initialized():
        _check_served(device_type, library)
        return
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing:
        raise BackendError(
            "init_device_mesh",
            "torch's default process group must exist, or torchrun's environment variables",
            "Start the script with torchrun --nproc-per-node=N, or call"
            " torch.distributed.init_process_group first; in one process, use"
            " hyper_parallel.simulate",
            missing=missing,
        )
    dist.init_process_group(
        library if device_type == "cpu" else f"cpu:gloo,{device_type}:{library}"
    )


def _choose_device(device_type: str) -> None:
    module = torch.get_device_module(device_type)
    if module.is_initialized():
        return
    count = module.device_count()
    if "LOCAL_RANK" in os.environ:
        local_rank = int(os.environ["LOCAL_RANK"])
    else:
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        local_rank = rank % count
        warnings.warn(
            f"init_device_mesh: LOCAL_RANK is not set; rank {rank} takes device {local_rank}."
            " Start with torchrun, or set the current device before.",
            stacklevel=2,
        )
    if local_rank >= count:
        raise BackendError(
            "init_device_mesh",
            f"LOCAL_RANK must name one of the {count} {device_type} devices of this machine",
            "Start at most one process per device, or set the current device before",
            LOCAL_RANK=local_rank,
        )
    module.set_device(local_rank)


def _check_served(device_type: str, library: str) -> None:
    """Refuse a default group without a library for this device; which one is the user's choice."""
    config = dist.get_backend_config()
    if f"{device_type}:" not in config:
        raise BackendError(
            "init_device_mesh",
            f"the default process group must serve {device_type} tensors",
            f"Start it with init_process_group('cpu:gloo,{device_type}:{library}'), or leave it"
            " to init_device_mesh"
            if device_type != "cpu"
            else "Start it with init_process_group('gloo'), or leave it to init_device_mesh",
            backend=config,
        )
