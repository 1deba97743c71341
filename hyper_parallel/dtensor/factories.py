# SPDX-License-Identifier: Apache-2.0
"""DTensors made on a mesh: empty, zeros, ones, full, and those of random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core import Layout, Placement
from hyper_parallel.dtensor.moves import move
from hyper_parallel.dtensor.random import fill
from hyper_parallel.dtensor.read import read_mesh, read_placements, refuse_pending
from hyper_parallel.dtensor.tensor import DTensor
from hyper_parallel.errors import LayoutError

__all__ = ["empty", "full", "ones", "rand", "randn", "zeros"]

_DRAWS = {"rand": torch.Tensor.uniform_, "randn": torch.Tensor.normal_}


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Make a DTensor of values that are not set.

    Args:
        *size: the global shape, as ints or one sequence.
        dtype: the element type; default torch's default.
        layout: torch.strided, the only one there is.
        requires_grad: whether it is a leaf that needs a gradient.
        device_mesh: the mesh; default the one of the enclosing `with mesh:` block.
        placements: one per mesh axis; default Replicate on each.

    Returns:
        The DTensor.

    Communicates:
        Nothing.

    Raises:
        LayoutError: placements that do not fit, or another memory layout.

    Example:
        >>> from hyper_parallel import Shard, init_device_mesh, simulate
        >>> from hyper_parallel.dtensor import empty
        >>> @simulate(2)
        ... def shapes():
        ...     x = empty(5, 3, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     return tuple(x.shape), tuple(x.to_local().shape)
        >>> shapes()
        [((5, 3), (3, 3)), ((5, 3), (2, 3))]
    """
    return _made("empty", size, dtype, layout, requires_grad, (device_mesh, placements))


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Make a DTensor of zeros; see `empty` for the arguments."""
    return _made("zeros", size, dtype, layout, requires_grad, (device_mesh, placements))


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Make a DTensor of ones, which a pending reduction gives, too; see `empty`."""
    return _made("ones", size, dtype, layout, requires_grad, (device_mesh, placements))


def full(  # noqa: PLR0913  # torch's signature
    size: Any,
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Make a DTensor of one value, which a pending reduction gives, too.

    See `empty` for the arguments; the default dtype is that of the value.
    """
    on = (device_mesh, placements)
    return _made("full", (size,), dtype, layout, requires_grad, on, fill_value)


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Make a DTensor of numbers drawn evenly from [0, 1); see `empty` for the arguments.

    They are those of `torch.rand` in one process; see [Note: random numbers].

    Communicates:
        At the first draw on a mesh, two integers per axis, to compare the random states.

    Raises:
        LayoutError: as for `empty`, a dtype that is not drawn, or random states that differ.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, init_device_mesh, simulate
        >>> from hyper_parallel.dtensor import rand
        >>> @simulate(2)
        ... def draw():
        ...     torch.manual_seed(7)
        ...     on = {"device_mesh": init_device_mesh("cpu", (2,)), "placements": [Shard(0)]}
        ...     whole = rand(5, 3, **on).full_tensor()
        ...     torch.manual_seed(7)
        ...     return torch.equal(whole, torch.rand(5, 3))
        >>> draw()
        [True, True]
    """
    return _made("rand", size, dtype, layout, requires_grad, (device_mesh, placements))


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Make a DTensor of numbers drawn from the standard normal distribution; see `rand`.

    Communicates:
        At the first draw on a mesh, two integers per axis, to compare the random states.

    Raises:
        LayoutError: placements, a dtype or a memory layout that do not fit, or random states that
            differ.
    """
    return _made("randn", size, dtype, layout, requires_grad, (device_mesh, placements))


def _made(
    name: str,
    size: tuple[Any, ...],
    dtype: torch.dtype | None,
    memory: torch.layout,
    requires_grad: bool,
    on: tuple[Any, Any],
    *value: float,
) -> DTensor:
    """Make this rank's part as torch's function of that name does, or fill it with a draw."""
    if memory is not torch.strided:
        raise LayoutError(name, "layout must be torch.strided", "Leave it out", layout=memory)
    draw = _DRAWS.get(name)
    drawn = dtype or torch.get_default_dtype()
    if draw and not (drawn.is_floating_point or drawn.is_complex):
        must = "dtype must be floating point or complex"
        raise LayoutError(name, must, "Cast what it gives", dtype=drawn)
    mesh = read_mesh(on[0], name)
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    layout = Layout(mesh, read_placements(on[1], mesh, name), shape)
    make = torch.empty if draw else getattr(torch, name)
    part = layout.local_shape(mesh.get_rank())
    local = make(part, *value, dtype=dtype, device=mesh.device_type)
    refuse_pending(local.dtype, layout.placements, name)
    if layout.has_partial and make is not torch.empty and mesh.get_coordinate() is not None:
        local = move(local, layout.cotangent, layout)
    made = DTensor(local, layout, requires_grad=requires_grad)
    if draw:
        fill(draw, made, (), {}, name=name)
    return made
