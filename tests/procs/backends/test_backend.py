# SPDX-License-Identifier: Apache-2.0
"""Meshes on torch's process groups: shared, sliced, flattened, adopted and wrapped."""

from __future__ import annotations

import os
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh, backend_for, init_device_mesh
from hyper_parallel.runtime.checked import CheckedCommunicator
from support.device import DEVICE
from support.procs import free_port


def gathered(mesh: DeviceMesh, axis: int = 0) -> list[int]:
    """Gather the ranks of an axis: shows which ranks the group has, and in which order."""
    return mesh.communicator(axis).all_gather(torch.tensor([mesh.get_rank()])).tolist()


def shared_groups() -> list[bool]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    again = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = mesh.handle
    whole = init_device_mesh(DEVICE, (4,))
    return [
        isinstance(theirs, TorchMesh),
        mesh.get_group("tp") is theirs.get_group("tp"),
        mesh["tp"].get_group() is theirs["tp"].get_group(),
        [mesh.get_group(0), mesh.get_group(1)] == theirs.get_all_groups(),
        theirs == torch_init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp")),
        mesh == again and hash(mesh) == hash(again),
        mesh["tp"] == again["tp"] and mesh["tp"] is mesh["tp"],
        mesh != whole,
        torch.equal(mesh.mesh, theirs.mesh) and mesh.mesh.dtype == theirs.mesh.dtype,
        whole.get_group() is dist.group.WORLD,
        mesh.backend.device().type == DEVICE,
    ]


def test_groups_are_shared_with_torch(procs4: Any) -> None:
    assert procs4.run(shared_groups) == [[True] * 11] * 4


def unordered() -> list[Any]:
    mesh = DeviceMesh(DEVICE, [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"))
    return [mesh.get_coordinate(), gathered(mesh, 0), gathered(mesh, 1), gathered(mesh["tp"])]


def test_ranks_in_no_order(procs4: Any) -> None:
    assert procs4.run(unordered) == [
        [[1, 1], [1, 0], [2, 0], [2, 0]],
        [[0, 1], [1, 0], [3, 1], [3, 1]],
        [[1, 0], [3, 2], [2, 0], [2, 0]],
        [[0, 0], [3, 2], [3, 1], [3, 1]],
    ]


def part_of_the_world() -> list[Any]:
    mesh = DeviceMesh(DEVICE, [[3], [1]], mesh_dim_names=("dp", "tp"))
    here = mesh.get_coordinate()
    if here is None:
        try:
            mesh.communicator(0)
        except LayoutError as error:
            return [here, str(error)]
    joint = mesh.flatten("all")
    return [here, gathered(mesh, 0), gathered(mesh, 1), gathered(joint), joint.shape]


def test_ranks_outside_the_mesh_take_part_in_making_it(procs4: Any) -> None:
    zero, one, _, three = procs4.run(part_of_the_world)
    assert one == [[1, 0], [3, 1], [1], [3, 1], (2,)]
    assert three == [[0, 0], [3, 1], [3], [3, 1], (2,)]
    assert zero[0] is None
    assert "rank 0 not in mesh" in zero[1]


def slices() -> list[str]:
    """Slice a mesh with an axis of size 1 by every choice of names, in every order."""
    ranks = [[[2, 0]], [[3, 1]]]
    mesh = DeviceMesh(DEVICE, ranks, mesh_dim_names=("pp", "dp", "tp"))
    bad = []
    for count in (1, 2, 3):
        for names in permutations(("pp", "dp", "tp"), count):
            part = mesh[names]
            for i, name in enumerate(names):
                axis = mesh.axis_index(name)
                same = part.get_group(name) is mesh.get_group(name)
                right = gathered(part, i) == gathered(mesh, axis)
                if not (same and right and part.mesh.equal(part.handle.mesh)):
                    bad.append(f"{names} {name}")
    return bad


def test_slices_in_any_order_make_no_group(procs4: Any) -> None:
    assert procs4.run(slices) == [[]] * 4


def flats() -> list[Any]:
    mesh = DeviceMesh(DEVICE, [[[2, 0]], [[3, 1]]], mesh_dim_names=("pp", "dp", "tp"))
    joint, rows = mesh.flatten(), mesh["dp", "tp"].flatten("row")
    return [
        joint.mesh_dim_names,
        gathered(joint),
        joint.get_group() is dist.group.WORLD,
        gathered(rows),
        mesh["dp", "tp"].flatten("row") is rows,
        gathered(mesh["tp"].flatten("other")),
    ]


def test_flatten(procs4: Any) -> None:
    even = [("pp_dp_tp",), [2, 0, 3, 1], True, [2, 0], True, [2, 0]]
    odd = [*even[:3], [3, 1], True, [3, 1]]
    assert procs4.run(flats) == [even, odd, even, odd]


def adopted() -> list[Any]:
    rank = dist.get_rank()
    rows = [dist.new_group([2 * i, 2 * i + 1]) for i in range(2)]
    columns = [dist.new_group([i, i + 2]) for i in range(2)]
    row, column = rows[rank // 2], columns[rank % 2]
    one = DeviceMesh.from_group(row, DEVICE, mesh_dim_names=("tp",))
    turned = [2 * (rank // 2) + 1, 2 * (rank // 2)]
    back = DeviceMesh.from_group(row, DEVICE, turned)
    two = DeviceMesh.from_group([column, row], DEVICE, [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    texts = []
    for mesh in (None, [[0, 2], [1, 3]]):
        try:
            DeviceMesh.from_group([column, row], DEVICE, mesh, mesh_dim_names=("a", "b"))
        except LayoutError as error:
            texts.append(str(error))
    same = one.get_group("tp") is row and two.get_group("a") is column
    return [gathered(one), gathered(back), gathered(two, 0), gathered(two, 1), same, texts]


def test_from_group(procs4: Any) -> None:
    for rank, (one, back, a, b, same, texts) in enumerate(procs4.run(adopted)):
        row = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert (one, back, b) == (row, row[::-1], row)
        assert a == [rank % 2, rank % 2 + 2]
        assert same
        assert "from_group: mesh must be given for several groups" in texts[0]
        assert "from_group: mesh must list the ranks of each group along its axis" in texts[1]


def wrapped() -> list[bool]:
    backend: Any = backend_for(DEVICE)
    theirs = torch_init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    ours = backend.wrap_mesh(theirs)
    made = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    part = theirs["tp"]
    nameless = torch_init_device_mesh(DEVICE, (4,))
    return [
        backend.wrap_mesh(theirs) is ours,
        ours.handle is theirs,
        ours == made and hash(ours) == hash(made),
        ours.get_group("tp") is theirs.get_group("tp"),
        backend.wrap_mesh(made.handle) is made,
        backend.wrap_mesh(part) == ours["tp"],
        gathered(backend.wrap_mesh(part)) == list(ours["tp"].ranks),
        backend.wrap_mesh(nameless).mesh_dim_names is None,
    ]


def test_wrap_mesh(procs4: Any) -> None:
    assert procs4.run(wrapped) == [[True] * 8] * 4


def anew(ports: list[int]) -> list[Any]:
    before = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
    old = before.get_group("tp")  # kept alive, with its store: hence another port
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(ports[0])
    after = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
    return [gathered(after), after.get_group("tp") is not old]


def test_default_group_made_anew(procs2: Any) -> None:
    assert procs2.run(anew, [free_port()]) == [[[0, 1], True]] * 2


@pytest.mark.parametrize("size", (1, 2))
def test_axes_of_size_one(procs2: Any, size: int) -> None:
    assert procs2.run(small, size) == [[[2.0 / size], [float(size)]], [[2.0 / size], [float(size)]]]


def small(size: int) -> list[list[float]]:
    mesh = init_device_mesh(DEVICE, (2 // size, size))
    one = torch.ones(1)
    return [mesh.communicator(axis).all_reduce(one.clone()).tolist() for axis in (0, 1)]


def flat_after_uneven_groups():
    """Join axes where ranks belong to different numbers of groups, which torch alone hangs on."""
    dist.new_group([0, 1])
    mesh = init_device_mesh(DEVICE, (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat = mesh["dp", "cp"].flatten("data")
    total = flat.communicator(0).all_reduce(torch.tensor([float(dist.get_rank())]))
    return flat.ranks, total.item()


def test_axes_are_joined_where_ranks_have_different_numbers_of_groups(procs4):
    assert procs4.run(flat_after_uneven_groups) == [
        ((0, 2), 2.0), ((1, 3), 4.0), ((0, 2), 2.0), ((1, 3), 4.0)
    ]  # fmt: skip


def checked_everywhere():
    """Tell which communicators compare calls, on a mesh that does and on one that does not."""
    found = []
    for check in (True, False):
        mesh = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("dp", "tp"), check=check)
        ones = [DeviceMesh(DEVICE, [rank], check=check) for rank in (0, 1)]
        every = [mesh.communicator(1), mesh.communicator((0, 1)), mesh["tp"].communicator(0)]
        every += [mesh.flatten().communicator(0), ones[0].communicator_with(ones[1])]
        found.append([type(one) is CheckedCommunicator for one in every])
    return found


def test_all_groups_of_a_mesh_compare_calls_or_none(procs2):
    assert procs2.run(checked_everywhere) == [[[True] * 5, [False] * 5]] * 2
