# SPDX-License-Identifier: Apache-2.0
"""The two meshes of 2-D sharding as FSDP2 wants them: slices of one torch mesh.

[Note: sibling meshes] FSDP2 joins the data mesh and a parameter's mesh to the mesh of the sharded
parameter, which works for slices of one root. A flattened mesh of ours, and slices in another order
of axes, are torch meshes of their own on the right groups; a root is built over these groups then.
No process group is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hyper_parallel.dtensor.read import read_mesh
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh

__all__ = ["read_data_mesh", "sibling_handles"]


def read_data_mesh(mesh: Any) -> DeviceMesh:
    """Read the mesh that fully_shard was given.

    Raises:
        LayoutError: there is none, or its backend is not torch's.
    """
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    if mesh is None:
        raise LayoutError(
            "fully_shard",
            "mesh must be given",
            "Pass the data-parallel mesh, such as mesh['dp']",
            mesh=None,
        )
    read = read_mesh(mesh, "fully_shard")
    if not isinstance(read.handle, TorchMesh):
        raise LayoutError(
            "fully_shard",
            "the mesh must be made of torch process groups",
            "FSDP2 needs a real world (torchrun); it cannot run on simulated ranks",
            mesh=read,
        )
    return read


def sibling_handles(
    data: DeviceMesh, tensor_meshes: Iterable[tuple[str, DeviceMesh]]
) -> tuple[Any, Any]:
    """Give torch's data mesh, and torch's mesh for the parameters where it is not their own.

    Args:
        data: the data-parallel mesh.
        tensor_meshes: a parameter's name for errors, and its mesh.

    Returns:
        Torch's data mesh, and None or the mesh to put all of the parameters on.

    Raises:
        LayoutError: no mesh spans the axes of both.
    """
    paths: dict[DeviceMesh, str] = {}
    for path, mesh in tensor_meshes:
        paths.setdefault(mesh, path)
    failed = {mesh: error for mesh in paths if (error := _cannot_join(data, mesh)) is not None}
    if not failed:
        return data.handle, None
    if len(paths) == 1 and (joint := _joint(data, *paths)) is not None:
        return joint
    mesh, error = next(iter(failed.items()))
    raise LayoutError(
        "fully_shard",
        f"mesh must be a sibling of the mesh of parameter {paths[mesh]!r}, on other axes",
        "Make one mesh, init_device_mesh(device_type, (dp, tp), mesh_dim_names=('dp', 'tp')),"
        " and pass mesh['tp'] to parallelize_module and mesh['dp'] here",
        mesh=_shown(data),
        parameter_mesh=_shown(mesh),
    ) from error


def _cannot_join(data: DeviceMesh, tensor: DeviceMesh) -> Exception | None:
    """Give the reason why torch cannot join two meshes, or None."""
    try:
        type(data.handle)._concatenate([data.handle, tensor.handle])
    except Exception as error:  # torch asserts and raises several types here
        return error
    return None


def _joint(data: DeviceMesh, tensor: DeviceMesh) -> tuple[Any, Any] | None:
    """Give both as slices of a torch mesh built over their groups, or None if there is none."""
    root = data.parent
    if root is None or root is not tensor.parent or data.ndim != 1 or tensor.ndim != 1:
        return None
    (name,), (tensor_name,) = data.axis_names, tensor.axis_names
    axis = root.axis_index(tensor_name)
    ranks = [list(root.group_ranks(axis, rank=rank)) for rank in data.ranks]
    is_once = len({rank for row in ranks for rank in row}) == data.size() * tensor.size()
    if not is_once or list(tensor.ranks) not in ranks or name == tensor_name:
        return None
    groups = [data.get_group(), tensor.get_group()]
    joint = type(data.handle).from_group(
        groups, data.device_type, mesh=ranks, mesh_dim_names=(name, tensor_name)
    )
    return joint[name], joint[tensor_name]


def _shown(mesh: DeviceMesh) -> str:
    axes = ", ".join(f"{n}={s}" for n, s in zip(mesh.axis_names, mesh.shape, strict=True))
    return f"DeviceMesh({axes}; ranks {list(mesh.ranks)})"
