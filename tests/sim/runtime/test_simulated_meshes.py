# SPDX-License-Identifier: Apache-2.0
"""Meshes, submeshes and groups on the simulated backend."""

import gc
import pickle

import pytest
import torch

from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh, backend_for, current_rank, init_device_mesh, simulate
from support.device import DEVICE


def test_meshes_slices_and_groups():
    def run():
        mesh = DeviceMesh(DEVICE, [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
        tp = mesh.get_group("tp")
        flat = mesh["dp", "tp"].flatten("all")
        other = DeviceMesh.from_group(mesh.get_all_groups(), DEVICE, mesh.mesh)
        value = torch.tensor([float(current_rank())])
        return (
            (tp.ranks, tp.rank(), tp.size()),
            mesh["tp"].communicator(0).all_gather(value).tolist(),
            flat.communicator(0).all_gather(value).tolist(),
            other.communicator(0).all_gather(value).tolist(),
            DeviceMesh.from_group(tp, DEVICE).ranks == mesh["tp"].ranks,
            mesh["tp"].get_group() == tp,
            mesh.mesh.tolist(),
            str(mesh.backend.device()),
        )

    whole = [3.0, 1.0, 0.0, 2.0]
    common = (True, True, [[3, 1], [0, 2]], DEVICE)
    assert simulate(4).run(run) == [
        (((0, 2), 0, 2), [0.0, 2.0], whole, [3.0, 0.0], *common),
        (((3, 1), 1, 2), [3.0, 1.0], whole, [1.0, 2.0], *common),
        (((0, 2), 1, 2), [0.0, 2.0], whole, [1.0, 2.0], *common),
        (((3, 1), 0, 2), [3.0, 1.0], whole, [3.0, 0.0], *common),
    ]


def test_flatten_of_a_submesh_meets_only_its_ranks():
    def run():
        mesh = init_device_mesh(DEVICE, (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        if current_rank() >= 4:
            return None
        flat = mesh["dp", "tp"].flatten()
        return flat.ranks, flat.communicator(0).all_gather(torch.tensor([current_rank()])).tolist()

    assert simulate(8).run(run) == [((0, 1, 2, 3), [0, 1, 2, 3])] * 4 + [None] * 4


def test_a_rank_outside_the_mesh_takes_part_in_making_it():
    def run():
        mesh = DeviceMesh(DEVICE, [2, 0])
        group = mesh.get_group()
        if mesh.get_coordinate() is None:
            with pytest.raises(LayoutError, match="rank 1 not in mesh"):
                mesh.communicator(0)
            assert (group.rank(), group.size()) == (-1, 0)
            return None
        return mesh.communicator(0).all_gather_ints([current_rank()])

    assert simulate(3).run(run) == [[(2,), (0,)], None, [(2,), (0,)]]


def test_a_mesh_larger_than_the_world_is_refused_on_every_rank():
    for one in simulate(2).outcomes(lambda: init_device_mesh(DEVICE, (4,))):
        assert str(one) == (
            "init_device_mesh: every rank of the mesh must be below the world size 2, but got "
            "mesh_shape=(4,), world_size=2. Use simulate(4), or make a smaller mesh."
        )


def test_groups_that_are_not_the_meshs_are_refused():
    def run():
        mesh = init_device_mesh(DEVICE, (2, 2))
        groups = mesh.get_all_groups()
        for wrong in ((groups, [0, 1, 2, 3]), (groups[::-1], [[0, 1], [2, 3]])):
            with pytest.raises(LayoutError, match="from_group: mesh must list the ranks"):
                DeviceMesh.from_group(wrong[0], DEVICE, wrong[1])
        with pytest.raises(LayoutError, match="from_group: mesh must be given for several groups"):
            DeviceMesh.from_group(groups, DEVICE)

    simulate(4).run(run)


def test_capabilities_say_what_the_executor_may_use():
    def run():
        backend = backend_for("npu")
        return backend.capabilities.uneven_gather, backend.capabilities.native_avg

    # On the CPU it can do all that the executor has two ways for; elsewhere what the device can.
    assert simulate(1).run(run) == [(DEVICE == "cpu",) * 2]


def test_a_mesh_of_the_framework_is_refused():
    import types

    from hyper_parallel import BackendError, distribute_tensor

    other = types.SimpleNamespace(device_type=DEVICE, get_group=None)

    def run():
        with pytest.raises(BackendError, match="made of simulated ranks"):
            distribute_tensor(torch.ones(2), other)

    simulate(2).run(run)


@simulate(2)
def test_a_pickled_mesh_without_an_equal_one_is_refused_each_time():
    mesh = DeviceMesh("cpu", [1, 0])
    data = pickle.dumps(mesh)
    assert pickle.loads(data) is mesh
    del mesh
    gc.collect()
    errors = []
    for _ in range(2):
        with pytest.raises(LayoutError, match="a pickled mesh must have an equal one") as caught:
            pickle.loads(data)
        errors.append(caught.value)  # what it keeps alive is no mesh to be found
