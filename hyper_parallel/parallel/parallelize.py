# SPDX-License-Identifier: Apache-2.0
"""parallelize_module: apply styles to the modules that a plan's patterns name.

[Note: siblings] With grouped query attention, wq has r features for each one of wk. A model that
works on plain local tensors pairs local query heads with local key heads, so rank by rank wq must
have r times wk's features. Even cuts always do. Uneven ones need not: 35 query heads and 5 key
heads over 3 ranks are 12, 12, 11 and 2, 2, 1, which a model would pair wrongly without any error.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from torch import nn

from hyper_parallel.core import Shard, chunk_sizes
from hyper_parallel.dtensor.read import one_axis_mesh
from hyper_parallel.errors import PlanError, describe, near_names
from hyper_parallel.parallel.linear import LinearForward
from hyper_parallel.parallel.sizes import open_scope
from hyper_parallel.parallel.style import Applying, ParallelStyle, applying
from hyper_parallel.runtime import DeviceMesh

__all__ = ["parallelize_module"]

_WHERE = "parallelize_module"
_TORCHS = "torch.distributed.tensor.parallel"


def parallelize_module(
    module: nn.Module,
    device_mesh: Any = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
    strict: bool = True,
) -> nn.Module:
    """Parallelize a module, in place, by a plan of styles.

    Args:
        module: the module.
        device_mesh: a mesh of one axis, ours or torch's; default the one of the enclosing
            `with mesh:` block. Slice a mesh of several axes: `mesh["tp"]`.
        parallelize_plan: a style for the module itself, or styles by pattern: the dotted path of
            submodules, each part an fnmatch pattern (`layers.*.attention.wq`); "" is the
            module itself.
        src_data_rank: the rank of the mesh whose parameters count; None takes every rank's own
            without communication (when all were initialised alike).
        strict: a pattern that matches nothing is an error; False makes it a warning.

    Returns:
        The module.

    Communicates:
        As distribute_tensor, for each sharded parameter, in the order of the plan.

    Raises:
        LayoutError: a mesh of several axes, this rank is outside the mesh, or a placement that
            does not fit a parameter.
        PlanError: a pattern that matches nothing, two that shard one module, a style that
            cannot serve its module, layers side by side whose cuts do not match. Nothing is
            undone: build the model anew.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from hyper_parallel import ColwiseParallel, RowwiseParallel, init_device_mesh
        >>> from hyper_parallel import parallelize_module, simulate
        >>> @simulate(2)
        ... def run():
        ...     torch.manual_seed(0)
        ...     net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        ...     want = net(torch.ones(2, 4))
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        ...     return torch.allclose(net(torch.ones(2, 4)), want, atol=1e-6)
        >>> run()
        [True, True]
    """
    if not isinstance(module, nn.Module):
        raise PlanError(
            _WHERE,
            "module must be an nn.Module",
            "Pass the model, then the mesh, then the plan",
            module=type(module).__name__,
        )
    mesh = one_axis_mesh(device_mesh, _WHERE)
    mesh.get_local_rank()
    _check_source(src_data_rank, mesh)
    if not parallelize_plan:
        warnings.warn(f"{_WHERE}: no parallelize_plan was given; nothing changes.", stacklevel=2)
        return module
    plan = (
        {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan
    )
    work = _match_all(module, plan, strict)
    with applying(Applying()) as call:
        for path, submodule, style in work:
            call.path = path
            style.src_data_rank = src_data_rank
            style.apply(submodule, mesh)
        _keep_ties(module, call)
    _refuse_unlike_siblings(module)
    if any(_may_need_sizes(style) for _, _, style in work):
        open_scope(module)
    return module


def _check_source(src_data_rank: Any, mesh: DeviceMesh) -> None:
    if src_data_rank is None or src_data_rank in range(mesh.size()):
        return
    raise PlanError(
        _WHERE,
        f"src_data_rank must be a position on the mesh (0 to {mesh.size() - 1}) or None",
        "Pass the position whose parameters count",
        src_data_rank=src_data_rank,
    )


def _match_all(
    module: nn.Module, plan: Any, strict: bool
) -> list[tuple[str, nn.Module, ParallelStyle]]:
    """List (path, module, style) in the plan's order, checking all patterns before any work."""
    if not isinstance(plan, Mapping):
        raise _wrong_type(plan)
    work: list[tuple[str, nn.Module, ParallelStyle]] = []
    owner: dict[int, str] = {}  # pattern that shards a module, by the module's identity
    for pattern, style in plan.items():
        if isinstance(pattern, str) and style is None:
            warnings.warn(f"{_WHERE}: key {pattern!r} has no style; nothing changes.", stacklevel=3)
            continue
        if not isinstance(pattern, str) or not isinstance(style, ParallelStyle):
            raise _wrong_type(style, key=pattern)
        matched = _match(module, pattern.split(".") if pattern else [], "")
        if not matched:
            _unmatched(module, pattern, strict)
        for path, submodule in matched.values():
            if _shards(style, submodule):
                other = owner.setdefault(id(submodule), pattern)
                if other != pattern:
                    raise _two_patterns(path, other, pattern)
            work.append((path, submodule, style))
    return work


def _wrong_type(style: Any, **key: Any) -> PlanError:
    """Give the error of what is no style of ours, which may be one of torch's."""
    kind = style if isinstance(style, type) else type(style)
    torchs = [c.__name__ for c in kind.__mro__ if c.__module__.startswith(_TORCHS)]
    got = {"value" if key else "parallelize_plan": style}
    must = "parallelize_plan must be a ParallelStyle, or map module paths to ParallelStyles"
    do = "Pass for example {'layers.*.wq': ColwiseParallel()}, with hyper_parallel's styles"
    if torchs:
        got = dict.fromkeys(got, f"{_TORCHS}.{torchs[0]}")
        do = f"Import hyper_parallel.{torchs[0]} in its place, which takes the same arguments"
    return PlanError(_WHERE, must, do, **key, **got)


def _two_patterns(path: str, *patterns: str) -> PlanError:
    return PlanError(
        _WHERE,
        f"one pattern at most may shard module {path!r}",
        "Make the patterns disjoint",
        patterns=patterns,
    )


def _match(module: nn.Module, atoms: list[str], prefix: str) -> dict[int, tuple[str, nn.Module]]:
    """List the submodules that a pattern names, part by part; each module once."""
    if not atoms:
        return {id(module): (prefix, module)}
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, child in module._modules.items():
        if child is not None and fnmatch.fnmatchcase(name, atoms[0]):
            path = f"{prefix}.{name}" if prefix else name
            for key, entry in _match(child, atoms[1:], path).items():
                found.setdefault(key, entry)
    return found


def _unmatched(module: nn.Module, pattern: str, strict: bool) -> None:
    names = [name for name, _ in module.named_modules() if name]
    near = near_names(pattern, names) or names[:5]
    text = describe(
        _WHERE,
        "every key of parallelize_plan must match a module",
        f"Did you mean one of {near}? (strict=False turns this into a warning)",
        key=pattern,
    )
    if strict:
        raise PlanError(text)
    warnings.warn(text, stacklevel=4)


def _shards(style: ParallelStyle, module: nn.Module) -> bool:
    """Tell whether a style replaces parameters of a module."""
    has_own = next(iter(module.parameters(recurse=False)), None) is not None
    return has_own and type(style).shard_param is not ParallelStyle.shard_param


def _keep_ties(module: nn.Module, call: Applying) -> None:
    """Give a sharded parameter to every module that held the plain one."""
    for submodule in module.modules():
        for name, param in list(submodule._parameters.items()):
            replaced = call.sharded.get(id(param))
            if replaced is not None and replaced[0] is param:
                submodule.register_parameter(name, replaced[1])


def _refuse_unlike_siblings(module: nn.Module) -> None:
    """Refuse layers of one parent that hand out plain cut features; see [Note: siblings]."""
    for path, parent in module.named_modules():
        cut = [
            (f"{path}.{name}".lstrip("."), forward)
            for name, child in parent.named_children()
            if isinstance(forward := child.__dict__.get("forward"), LinearForward)
            and forward.hands_out_features
        ]
        for one, two in combinations(cut, 2):
            _compare(one, two)


def _compare(one: tuple[str, LinearForward], two: tuple[str, LinearForward]) -> None:
    (small, a), (large, b) = sorted((one, two), key=lambda entry: entry[1].sizes[1])
    ratio, rest = divmod(b.sizes[1], max(a.sizes[1], 1))
    if a.mesh != b.mesh or a.sizes[0] != b.sizes[0] or rest:
        return
    pieces, larger = (chunk_sizes(edge.sizes[1], edge.mesh.size(), edge.block) for edge in (a, b))
    if tuple(size * ratio for size in pieces) == larger:
        return
    raise PlanError(
        f"ColwiseParallel on {large!r}",
        f"its {b.sizes[1]} features must be cut over {b.mesh.size()} ranks as those of"
        f" {small!r} are, {ratio} for each one",
        "Give both output_layouts=Shard(-1, block=...), the larger one the larger block, or"
        " use_local_output=False",
        **{"pieces": larger, "pieces beside it": pieces},
    )


def _may_need_sizes(style: ParallelStyle) -> bool:
    """Tell whether a style may meet a plain shard whose global size only the ranks together know.

    A style that is promised even shards never asks, but others may.
    """
    if getattr(style, "even_shards", False):
        return False
    return any(_cuts_rows(option) for option in vars(style).values())


def _cuts_rows(option: Any) -> bool:
    """Tell whether an option of a style names a cut of another dim than the last."""
    if isinstance(option, Shard):
        return option.dim != -1
    if isinstance(option, ParallelStyle):
        return _may_need_sizes(option)
    parts = option.values() if isinstance(option, Mapping) else option
    return isinstance(option, (Mapping, tuple, list)) and any(_cuts_rows(part) for part in parts)
