# SPDX-License-Identifier: Apache-2.0
"""fully_shard itself: check, hand over, let torch's FSDP2 do the rest; see [Note: hand over]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hyper_parallel.core import Layout, Placement
from hyper_parallel.dtensor import DTensor
from hyper_parallel.dtensor.interop import to_torch, torch_placement
from hyper_parallel.errors import LayoutError
from hyper_parallel.fsdp.meshes import read_data_mesh, sibling_handles
from hyper_parallel.runtime import DeviceMesh

__all__ = ["fully_shard"]

# Set on a parameter that some fully_shard call took, in case another module still has it.
_TAKEN = "_hyper_parallel_fully_sharded"

# Path, owner, name, parameter.
Entry = tuple[str, nn.Module, str, nn.Parameter]


def fully_shard(module: Any, *, mesh: Any = None, **kwargs: Any) -> Any:
    """Shard a module's parameters over a data-parallel mesh with torch's FSDP2.

    Call parallelize_module first. Parameters the plan left plain stay plain for FSDP2, too.

    Args:
        module: the module, or a list of modules to be one group; changed in place as FSDP2 does.
        mesh: the data-parallel mesh, ours or torch's, of one axis (or two: HSDP); a sibling of
            the tensor-parallel one, `mesh["dp"]` of one parent. It must be given.
        **kwargs: everything else torch's fully_shard takes. A `shard_placement_fn` is given the
            parameters as they are now, and may return our Shard.

    Returns:
        What torch's fully_shard returns: the module or modules.

    Communicates:
        Now: nothing. Later as FSDP2: all-gathers of parameters before forward and backward,
        reduce-scatters of gradients over `mesh`.

    Raises:
        LayoutError: no mesh, a mesh whose backend is not torch's or that is no sibling of the
            tensor-parallel one; a parameter that torch cannot express or cannot cut, or that an
            earlier call took from a module it is tied to.

    Source: PyTorch FSDP2, torch.distributed.fsdp.fully_shard.
    """
    from torch.distributed import fsdp

    shard: Any = fsdp.fully_shard
    data = read_data_mesh(mesh)
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    ignored = {id(param) for param in kwargs.get("ignored_params") or ()}
    managed = [entry for entry in _managed(modules) if id(entry[3]) not in ignored]
    originals: dict[int, nn.Parameter] = {}
    if kwargs.get("shard_placement_fn") is not None:
        kwargs["shard_placement_fn"] = _with_originals(kwargs["shard_placement_fn"], originals)
    for path, _, _, param in managed:
        _refuse_tie(path, param)
    handle, param_handle = _check_ours(managed, data, kwargs)
    _hand_over(managed, originals, param_handle)
    try:
        result = shard(module, mesh=handle, **kwargs)
    except BaseException:
        for _, owner, name, param in managed:
            owner.register_parameter(name, param)
        raise
    for _, _, _, param in managed:
        setattr(param, _TAKEN, True)
    return result


def _check_ours(managed: list[Entry], data: DeviceMesh, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Refuse what FSDP2 would refuse or do wrongly; give torch's meshes as sibling_handles does."""
    ours = [(path, param) for path, _, _, param in managed if isinstance(param, DTensor)]
    for path, param in ours:
        _check_layout(path, param)
    if kwargs.get("dp_mesh_dims") is not None:  # then `data` is the whole mesh
        return data.handle, None
    handles = sibling_handles(data, [(path, param.device_mesh) for path, param in ours])
    choose = kwargs.get("shard_placement_fn")
    for path, param in ours:
        answer = None if choose is None else choose(param)
        if not hasattr(answer, "placement"):  # else it names a mesh of its own, too
            _check_sizes(path, param.layout, getattr(answer, "dim", 0), data.shape[-1])
    return handles


def _check_layout(path: str, param: DTensor) -> None:
    """Refuse a parameter whose layout torch has no words for."""
    if param.layout.has_partial:
        raise LayoutError(
            "fully_shard",
            f"parameter {path!r} must not be a pending reduction",
            "Redistribute it to Replicate or Shard first",
            placements=param.placements,
        )
    try:
        to_torch(param)
    except LayoutError as error:
        raise LayoutError(f"fully_shard: parameter {path!r}: {error}") from error


def _check_sizes(path: str, layout: Layout, dim: int, num_shards: int) -> None:
    """Refuse local parts that FSDP2 cannot cut in `num_shards` along `dim`, on any rank.

    It pads only dim 0, and loses the sizes of a part that is empty in another dim than `dim`.
    """
    dim = dim % max(layout.ndim, 1)
    parts = {rank: layout.local_shape(rank) for rank in layout.mesh.ranks}
    uneven = dim > 0 and any(shape[dim] % num_shards for shape in parts.values())
    lost = any(shape[dim] and 0 in shape for shape in parts.values() if shape)
    if uneven:
        must = f"every local part of parameter {path!r} must divide by {num_shards} in dim {dim}"
        do = "Let FSDP2 cut dim 0, which may be uneven, or choose a size that divides"
    elif lost:
        must = f"no local part of parameter {path!r} may be empty in another dim than {dim}"
        do = "Use fewer tensor-parallel ranks, or leave the module out of the plan"
    else:
        return
    shapes = sorted(set(parts.values()), reverse=True)
    raise LayoutError("fully_shard", must, do, layout=layout, local_shapes=shapes)


def _managed(modules: list[nn.Module]) -> Iterator[Entry]:
    """List what this call shards: path, owner, name, parameter; not what an earlier call did."""
    seen: set[int] = set()
    for module in modules:
        yield from _managed_below(module, "", seen)


def _managed_below(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[Entry]:
    from torch.distributed.fsdp import FSDPModule

    if id(module) in seen or isinstance(module, FSDPModule):
        return
    seen.add(id(module))
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, module, name, param
    for name, child in module.named_children():
        yield from _managed_below(child, f"{prefix}{name}.", seen)


def _refuse_tie(path: str, param: nn.Parameter) -> None:
    """Refuse a parameter of which another module's half is sharded already: the tie would end."""
    if hasattr(param, _TAKEN):
        raise LayoutError(
            "fully_shard",
            f"parameter {path!r} must not be tied to one that an earlier call sharded",
            "Shard the modules that share it in one call (of a module above both)",
            shape=tuple(param.shape),
        )


def _hand_over(managed: list[Entry], originals: dict[int, nn.Parameter], handle: Any) -> None:
    """Replace parameters that are our DTensors by torch's on the same storage; ties stay."""
    done: dict[int, nn.Parameter] = {}
    for _, owner, name, param in managed:
        if not isinstance(param, DTensor):
            continue
        if id(param) not in done:
            data = to_torch(_contiguous(param), handle=handle)
            done[id(param)] = new = nn.Parameter(data, requires_grad=param.requires_grad)
            originals[id(new)] = param
        owner.register_parameter(name, done[id(param)])


def _contiguous(param: DTensor) -> DTensor:
    """Give the parameter with a local part that FSDP2 accepts."""
    local = param.to_local().detach()
    return param if local.is_contiguous() else DTensor(local.contiguous(), param.layout)


def _with_originals(
    choose: Callable[[Any], Any], originals: dict[int, nn.Parameter]
) -> Callable[[torch.Tensor], Any]:
    """Let the user's function see the parameters it may know, and say Shard in our words."""

    def chosen(param: torch.Tensor) -> Any:
        answer = choose(originals.get(id(param), param))
        return torch_placement(answer) if isinstance(answer, Placement) else answer

    return chosen
