# SPDX-License-Identifier: Apache-2.0
"""fully_shard: torch's FSDP2 for a model that is tensor-parallel on another mesh axis.

FSDP2 knows only torch's own DTensor, so parameters that are ours are handed over as torch's, on the
same storage and process groups; the styles' local forms work on either kind.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.interop import to_torch
from hyper_parallel.dtensor.read import read_mesh
from hyper_parallel.errors import LayoutError, describe

__all__ = ["fully_shard"]


def fully_shard(module: nn.Module, *, mesh: Any = None, **kwargs: Any) -> Any:
    """Shard a module's parameters over a data-parallel mesh with torch's FSDP2.

    Call parallelize_module first. Parameters the plan left plain stay plain for FSDP2, too.

    Args:
        module: the module; changed in place as FSDP2 does.
        mesh: the data-parallel mesh, ours or torch's, of one axis (or two: HSDP); a sibling of
            the tensor-parallel one, `mesh["dp"]` of one parent.
        **kwargs: everything else torch's fully_shard takes.

    Returns:
        The module, as torch's fully_shard returns it.

    Communicates:
        As FSDP2: all-gathers of parameters, reduce-scatters of gradients over `mesh`.

    Raises:
        LayoutError: no mesh, a mesh whose backend is not torch's, or a parameter in a layout
            torch cannot express.

    Source: PyTorch FSDP2, torch.distributed.fsdp.fully_shard.
    """
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    data_mesh = read_mesh(mesh, "fully_shard")
    if not isinstance(data_mesh.handle, TorchMesh):
        raise LayoutError(
            describe(
                "fully_shard",
                "the mesh must be made of torch process groups",
                "FSDP2 needs a real world (torchrun); it cannot run on simulated ranks",
                mesh=data_mesh,
            )
        )
    hand_over(module)
    return torch_fully_shard(module, mesh=data_mesh.handle, **kwargs)


def hand_over(module: nn.Module) -> None:
    """Replace parameters that are our DTensors by torch's on the same storage; ties stay."""
    done: dict[int, nn.Parameter] = {}
    for submodule in module.modules():
        for name, param in submodule.named_parameters(recurse=False):
            if isinstance(param, DTensor):
                if id(param) not in done:
                    done[id(param)] = nn.Parameter(
                        to_torch(param), requires_grad=param.requires_grad
                    )
                submodule.register_parameter(name, done[id(param)])
