# SPDX-License-Identifier: Apache-2.0
"""What a user meets before a mesh exists: environment, world size, unknown or missing backends."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from hyper_parallel.errors import BackendError
from hyper_parallel.runtime import backend_for, init_device_mesh
from support.device import DEVICE
from support.procs import ProcessError, ProcessPool, run_processes

# What dist.get_backend says of the default group that a mesh starts.
GROUP = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[DEVICE]


def starts_by_itself() -> list[Any]:
    mesh = init_device_mesh(DEVICE, (2,))
    return [mesh.get_rank(), dist.get_backend()]


def test_mesh_starts_the_default_group_from_the_environment() -> None:
    assert run_processes(starts_by_itself, 2, group=False) == [[0, GROUP], [1, GROUP]]


def without_environment() -> str:
    del os.environ["MASTER_PORT"], os.environ["RANK"]
    try:
        init_device_mesh(DEVICE, (1,))
    except BackendError as error:
        return str(error)
    return "not refused"


def test_missing_environment_says_to_use_torchrun() -> None:
    assert run_processes(without_environment, 1, group=False) == [
        "init_device_mesh: torch's default process group must exist, or torchrun's environment"
        " variables, but got missing=['RANK', 'MASTER_PORT']. Start the script with torchrun"
        " --nproc-per-node=N, or call torch.distributed.init_process_group first; in one process,"
        " use hyper_parallel.simulate."
    ]


def too_large() -> str:
    try:
        init_device_mesh(DEVICE, (2, 2))
    except BackendError as error:
        return str(error)
    return "not refused"


def test_world_smaller_than_the_mesh(procs2: Any) -> None:
    for text in procs2.run(too_large):
        assert "must be below the world size 2, but got mesh_shape=(2, 2), world_size=2." in text


def test_unknown_device_type_lists_backends_with_reasons() -> None:
    with pytest.raises(BackendError) as caught:
        backend_for("gpu")
    text = str(caught.value)
    assert "device_type must name a backend that can be used here (cpu: available; cuda: " in text
    assert f"{DEVICE}: available" in text
    assert "but got device_type='gpu'" in text


def fails_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def dies() -> None:
    os._exit(3)


def test_pool_reports_the_failing_rank_and_starts_anew() -> None:
    pool = ProcessPool(2)
    try:
        with pytest.raises(ProcessError, match=r"(?s)on rank 1 of 2:.*ValueError: only here"):
            pool.run(fails_on_one_rank)
        with pytest.raises(ProcessError, match="the process died"):
            pool.run(dies)
        assert pool.run(dist.get_world_size) == [2, 2]
    finally:
        pool.close()
