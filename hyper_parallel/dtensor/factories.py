# SPDX-License-Identifier: Apache-2.0
"""DTensors made on a mesh: empty, zeros, ones, full, and those of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.core import Layout, Placement
from hyper_parallel.dtensor.moves import move
from hyper_parallel.dtensor.random import fill
from hyper_parallel.dtensor.read import read_mesh, read_placements, refuse_integer_average
from hyper_parallel.dtensor.tensor import DTensor
from hyper_parallel.errors import LayoutError, describe

__all__ = ["empty", "full", "ones", "rand", "randn", "zeros"]


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
    """
    made = _Made("empty", size, dtype, layout, requires_grad)
    return made.on(device_mesh, placements, torch.empty)


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Make a DTensor of zeros.

    Args:
        *size: the global shape, as ints or one sequence.
        requires_grad: whether it is a leaf that needs a gradient.
        dtype: the element type; default torch's default.
        layout: torch.strided, the only one there is.
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
        >>> from hyper_parallel.dtensor import zeros
        >>> @simulate(2)
        ... def shapes():
        ...     x = zeros(5, 3, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     return tuple(x.shape), tuple(x.to_local().shape)
        >>> shapes()
        [((5, 3), (3, 3)), ((5, 3), (2, 3))]
    """
    made = _Made("zeros", size, dtype, layout, requires_grad)
    return made.on(device_mesh, placements, torch.zeros)


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Make a DTensor of ones; a pending reduction gives ones, too.

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
    """
    made = _Made("ones", size, dtype, layout, requires_grad)
    return made.on(device_mesh, placements, torch.ones)


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
    """Make a DTensor of one value; a pending reduction gives the value, too.

    Args:
        size: the global shape.
        fill_value: the value.
        dtype: the element type; default that of the value.
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
    """
    made = _Made("full", (size,), dtype, layout, requires_grad)
    return made.on(device_mesh, placements, torch.full, fill_value)


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Make a DTensor of numbers drawn evenly from [0, 1).

    They are those of `torch.rand` in one process; see [Note: random numbers].

    Args:
        *size: the global shape, as ints or one sequence.
        requires_grad: whether it is a leaf that needs a gradient.
        dtype: the element type; default torch's default.
        layout: torch.strided, the only one there is.
        device_mesh: the mesh; default the one of the enclosing `with mesh:` block.
        placements: one per mesh axis; default Replicate on each.

    Returns:
        The DTensor.

    Communicates:
        At the first draw on a mesh, two integers per axis, to compare the random states.

    Raises:
        LayoutError: placements, a dtype or a memory layout that do not fit, or random states that
            differ.

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
    made = _Made("rand", size, dtype, layout, requires_grad)
    return made.drawn(device_mesh, placements, torch.Tensor.uniform_)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Make a DTensor of numbers drawn from the standard normal distribution.

    They are those of `torch.randn` in one process; see [Note: random numbers].

    Args:
        *size: the global shape, as ints or one sequence.
        requires_grad: whether it is a leaf that needs a gradient.
        dtype: the element type; default torch's default.
        layout: torch.strided, the only one there is.
        device_mesh: the mesh; default the one of the enclosing `with mesh:` block.
        placements: one per mesh axis; default Replicate on each.

    Returns:
        The DTensor.

    Communicates:
        At the first draw on a mesh, two integers per axis, to compare the random states.

    Raises:
        LayoutError: placements, a dtype or a memory layout that do not fit, or random states that
            differ.
    """
    made = _Made("randn", size, dtype, layout, requires_grad)
    return made.drawn(device_mesh, placements, torch.Tensor.normal_)


class _Made:
    """What the factories have in common."""

    def __init__(
        self,
        where: str,
        size: tuple[Any, ...],
        dtype: torch.dtype | None,
        layout: torch.layout,
        requires_grad: bool,
    ) -> None:
        if layout is not torch.strided:
            must = "layout must be torch.strided"
            raise LayoutError(describe(where, must, "Leave it out", layout=layout))
        self.where, self.dtype, self.requires_grad = where, dtype, requires_grad
        self.size = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size

    def on(
        self, device_mesh: Any, placements: Any, make: Callable[..., torch.Tensor], *value: float
    ) -> DTensor:
        """Make this rank's part on a mesh."""
        mesh = read_mesh(device_mesh, self.where)
        layout = Layout(mesh, read_placements(placements, mesh, self.where), self.size)
        shape = layout.local_shape(mesh.get_rank())
        local = make(shape, *value, dtype=self.dtype, device=mesh.device_type)
        refuse_integer_average(local.dtype, layout.placements, self.where)
        if layout.has_partial and make is not torch.empty and mesh.get_coordinate() is not None:
            local = move(local, layout.cotangent, layout)
        return DTensor(local, layout, requires_grad=self.requires_grad)

    def drawn(
        self, device_mesh: Any, placements: Any, draw: Callable[..., torch.Tensor]
    ) -> DTensor:
        """Make this rank's part on a mesh, and fill it."""
        dtype = self.dtype or torch.get_default_dtype()
        if not (dtype.is_floating_point or dtype.is_complex):
            must = "dtype must be floating point or complex"
            raise LayoutError(describe(self.where, must, "Cast what it gives", dtype=dtype))
        made = self.on(device_mesh, placements, torch.empty)
        fill(draw, made, (), {}, name=self.where)
        return made
