# SPDX-License-Identifier: Apache-2.0
"""DTensor: one rank's part of a global tensor, and the layout that says which part.

[Note: one tensor] A DTensor's storage, strides and autograd metadata are those of the LOCAL part;
only what Python asks (`shape`, `size()`, `numel()`, ...) is answered for the global tensor. So a
parameter is its own autograd leaf, the engine accumulates plain local gradients into it at no
extra cost, and hooks, `backward(inputs=...)` and a user's autograd.Function meet the real leaf.
`_local` is a plain alias of the same storage; it shares the version counter, too.

[Note: gradients] A gradient that flows to a value of layout A is laid out as A's cotangent. Between
autograd nodes it is a DTensor, which may also be a pending sum, or a plain local tensor, which
then IS in the cotangent layout. What our nodes hand to a leaf is plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core import (
    Layout,
    Packed,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from hyper_parallel.dtensor import dispatch, entries
from hyper_parallel.dtensor.declare import layout_of_local
from hyper_parallel.dtensor.edges import declared, handed_out, layout_of_gradient
from hyper_parallel.dtensor.local_op import needs_grad, redistributed
from hyper_parallel.dtensor.moves import PLAIN, How, move
from hyper_parallel.dtensor.outside import refuse_value
from hyper_parallel.dtensor.pending import LocalPart, bare
from hyper_parallel.dtensor.read import (
    read_explicit_mesh,
    read_mesh,
    read_placements,
    refuse_casts,
    refuse_pending,
    refuse_slices,
)
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh
from hyper_parallel.runtime.mesh import restore_mesh

__all__ = ["DTensor"]


class DTensor(torch.Tensor):
    """A global tensor of which each rank of a mesh holds a part.

    Make one with `DTensor.from_local`, `distribute_tensor` or a parallel style. `shape`, `size()`
    and `numel()` are global; `dtype`, `device` and `requires_grad` are as for any tensor.

    Example:
        >>> import torch
        >>> from hyper_parallel import DTensor, Replicate, Shard, init_device_mesh, simulate
        >>> @simulate(2)
        ... def example():
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     part = torch.full((2, 3), float(mesh.get_local_rank()))
        ...     whole = DTensor.from_local(part, mesh, [Shard(0)])
        ...     rows = whole.redistribute(mesh, [Replicate()]).to_local()
        ...     return tuple(whole.shape), rows[:, 0].tolist()
        >>> example()[0]
        ((4, 3), [0.0, 0.0, 1.0, 1.0])
    """

    _local = LocalPart()
    _layout: Layout
    _shown_grad: tuple[torch.Tensor, DTensor] | None = None
    _write_is_lost: bool = False
    """A view of a gathered copy; see [Note: lost writes] in views.py."""
    _is_scattered: bool = False
    """Whether it is a view that a dense tensor would not have contiguous; see views.py."""
    _graph: torch.Tensor | None = None
    """The plain local result that it is an alias of; see [Note: above autograd] in local_op.py."""
    _ready_at: int = -1
    """Whether Functions may give it DTensors as gradients; see `expect_wrapped` in local_op.py."""
    _parts: tuple[int, dict[Layout | None, torch.Tensor]] | None = None
    """What `graph_part` has handed out, by the layout of its gradients."""

    @staticmethod
    def __new__(
        cls: type[DTensor], local: torch.Tensor, layout: Layout, *, requires_grad: bool = False
    ) -> DTensor:
        """Wrap a plain local tensor. Internal: users call `from_local`."""
        if local.requires_grad:
            local = local.detach()
        self = torch.Tensor._make_subclass(cls, local, requires_grad)
        self._local = local
        # One object for equal layouts: calls are known by it; see [Note: known calls] in known.py.
        self._layout = Layout.of(layout.mesh, layout.placements, layout.shape, layout.order)
        return self

    def __init__(self, local: torch.Tensor, layout: Layout, *, requires_grad: bool = False):
        del local, layout, requires_grad

    # ------------------------------------------------------------------ moves

    @staticmethod
    def from_local(  # noqa: PLR0913  # torch's signature
        local_tensor: torch.Tensor,
        device_mesh: Any = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Declare a plain local tensor to be this rank's part of a global tensor.

        Args:
            local_tensor: this rank's part; any shape and dtype. Storage is shared. A rank that
                is not in the mesh holds nothing, whatever it passes.
            device_mesh: the mesh; default the one of the enclosing `with mesh:` block.
            placements: one per mesh axis; default Replicate on each.
            run_check: compare what the ranks declare (placements, dtype, shapes) and, along
                Replicate axes, that they hold equal values (a NaN equals a NaN). All ranks refuse
                alike; nothing is overwritten.
            shape: the global shape; needed when shards are uneven. Default: local size times
                the number of ranks on each sharded dim.
            stride: accepted as torch has it; the global tensor is always contiguous.
            grad_placements: the layout in which `local_tensor.grad` is wanted; default the
                exact adjoint.

        Returns:
            The DTensor.

        Communicates:
            Forward: nothing (`run_check`: two exchanges of a few integers per axis; values are
            compared by a fingerprint).
            Backward: the move from the gradient's layout to the cotangent layout; for a
            pending max or min two all-reduces, for a pending product one all-gather.

        Raises:
            LayoutError: the local shape does not fit `shape` and `placements`, or
                `grad_placements` not the local shape; an average of integers is asked for; or
                `run_check` finds a rank that differs.

        Example:
            >>> import torch
            >>> from hyper_parallel import DTensor, Partial, init_device_mesh, simulate
            >>> @simulate(2)
            ... def total():
            ...     mesh = init_device_mesh("cpu", (2,))
            ...     return DTensor.from_local(torch.ones(2), mesh, [Partial()]).full_tensor()
            >>> total()[0]
            tensor([2., 2.])
        """
        del stride
        where = "DTensor.from_local"
        if isinstance(local_tensor, DTensor):
            raise LayoutError(
                where,
                "local_tensor must be a plain tensor",
                "Use redistribute to change the layout of a DTensor",
                local_tensor=type(local_tensor).__name__,
            )
        mesh = read_mesh(device_mesh, where)
        layout = layout_of_local(
            local_tensor, mesh, read_placements(placements, mesh, where), shape, run_check
        )
        grad_layout = layout_of_gradient(layout, grad_placements, where)
        return declared(DTensor, local_tensor, layout, grad_layout)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Hand out this rank's part as a plain tensor that shares storage.

        Args:
            grad_placements: the layout the local gradients will have; default the cotangent
                layout (for Replicate: every rank computes the same full gradient; pass Partial
                when each rank uses its copy for a different part of the loss).

        Returns:
            The local tensor.

        Communicates:
            Forward and backward: nothing; a gradient given as a pending sum is reduced where it
            reaches a leaf or a gradient of another layout.

        Raises:
            LayoutError: a pending max, min or product that needs a gradient, or grad_placements
                of parts of another shape.
        """
        if not needs_grad((self,)):
            return self._local
        lies = None
        if grad_placements is not None:
            lies = layout_of_gradient(self._layout, grad_placements, "DTensor.to_local")
        return handed_out(self, lies)

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Move to other placements of the same global tensor, on this or another mesh.

        To another mesh, every rank of both calls this. A rank that only joins needs a handle of
        the tensor: `from_local(torch.empty(0), mesh, placements, shape=...)`, of its dtype and
        requires_grad. A rank that only leaves gets a DTensor that holds nothing; backward it must
        be entered like all others, by the same ops or by `x.backward(torch.zeros_like(x))`.

        Args:
            device_mesh: the mesh, always given.
            placements: one per mesh axis; no Partial unless the tensor has it there already
                or it can be made locally.
            async_op: return while the last collective is in flight, in backward too. The result
                waits at the first use of what it holds; its shape and layout can be asked before.
                A gradient that reaches a leaf is waited for.
            forward_dtype: cast this rank's part before anything is sent; the result stays in it.
            backward_dtype: cast the gradient before anything is sent back; it arrives in the
                tensor's dtype. Default: it travels in the tensor's dtype.

        Returns:
            The DTensor in the new layout; `self` if it is there already, in `forward_dtype`.

        Communicates:
            Forward: the steps of `plan(layout, new layout)`; to another mesh one exchange among
            the ranks of both, and steps on either. Backward: the steps between the cotangent
            layouts, back.

        Raises:
            LayoutError: no mesh, placements that do not fit, a reduction that the dtype has not
                (an average of integers), or a dtype that is none.
            PlanError: a mesh of other ranks, where one of the two is a slice.

        Example:
            >>> import torch
            >>> from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
            >>> from hyper_parallel import simulate
            >>> @simulate(2)
            ... def gathered():
            ...     mesh = init_device_mesh("cpu", (2,))
            ...     rows = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
            ...     whole = rows.redistribute(mesh, [Replicate()], async_op=True)
            ...     other = rows.to_local() + 1  # runs while the all-gather does
            ...     return whole.to_local().tolist(), other.tolist()
            >>> gathered()[0]
            ([0.0, 1.0, 2.0, 3.0], [1.0, 2.0])
        """
        where, layout = "DTensor.redistribute", self._layout
        if not isinstance(device_mesh, DeviceMesh):
            device_mesh = read_explicit_mesh(device_mesh, where, layout)
        placements = read_placements(placements, device_mesh, where)
        dst = Layout.of(device_mesh, placements, layout.shape)
        how = PLAIN
        if async_op or forward_dtype is not None or backward_dtype is not None:
            how = How(forward_dtype, backward_dtype, async_op)
            refuse_casts((forward_dtype, backward_dtype), (layout, dst), where)
        if dst == layout and (how is PLAIN or {how[0], how[1]} <= {None, self.dtype}):
            return self
        if device_mesh is not layout.mesh:
            refuse_slices(self.device_mesh, device_mesh, where)
        if dst.has_partial:
            refuse_pending(forward_dtype or self.dtype, dst.placements, where)
        return redistributed(self, dst, how)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Gather the global tensor on every rank, as a plain tensor.

        Args:
            grad_placements: the layout the gradients of the result will have; default every
                rank computes the same full gradient.

        Returns:
            The whole tensor.

        Communicates:
            Forward: the plan to Replicate on every axis. Backward: the way back.

        Raises:
            LayoutError: this rank is not in the mesh.
        """
        if self.device_mesh.get_coordinate() is None:
            refuse_value(self.device_mesh, "DTensor.full_tensor")
        replicated = self.redistribute(self.device_mesh, self._layout.replicated.placements)
        return replicated.to_local(grad_placements=grad_placements)

    # ------------------------------------------------------------------ what it is

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._layout.mesh  # type: ignore[return-value]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._layout.placements

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Mesh, placements and global shape (in place of torch's strided / sparse flag)."""
        return self._layout

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return torch.Size(self._layout.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return len(self._layout.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The element type."""
        return (self._local if self._graph is None else self._graph).dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where this rank's part lies."""
        return bare(self).device

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """Whether the local part is sparse."""
        return bare(self).is_sparse

    def size(self, dim: int | None = None) -> Any:
        """Give the global shape, or the global size of one dim."""
        return self.shape if dim is None else self._layout.shape[dim]

    def dim(self) -> int:
        """Give the number of dims."""
        return len(self._layout.shape)

    def numel(self) -> int:
        """Give the number of elements of the global tensor."""
        return self.shape.numel()

    nelement = numel

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the global tensor."""
        return self.numel() * self.dtype.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """Give the strides that a contiguous global tensor has."""
        strides: list[int] = []
        step = 1
        for size in reversed(self._layout.shape):
            strides.append(step)
            step *= max(size, 1)
        strides.reverse()
        return tuple(strides) if dim is None else strides[dim]

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._layout.shape[0]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        marks = ", ".join(
            f"{p!r}@{n}" for p, n in zip(self.placements, self._layout.mesh.axis_names, strict=True)
        )
        kind = "Parameter of DTensor" if getattr(self, "_is_param", False) else "DTensor"
        return f"{kind}({list(self._layout.shape)}, {marks}, local={self._local!r})"

    # ------------------------------------------------------------------ gradients

    grad = property(entries.read_grad, entries.write_grad, entries.write_grad)  # type: ignore[assignment]
    backward = entries.backward_of  # type: ignore[assignment]

    def local_in(self, layout: Layout) -> torch.Tensor:
        """Give this rank's part in another layout; not differentiable. Internal."""
        return move(self._local, self._layout, layout)

    @property
    def _recorded(self) -> torch.Tensor:
        """The tensor that all its gradients pass."""
        return self if self._graph is None else self._graph

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only DTensors created explicitly by the user (graph leaves) support deepcopy."
            )
        copied = _rebuild(
            self._local.clone(), self._layout, self.requires_grad, hasattr(self, "_is_param")
        )
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = DTensor(self.grad._local.clone(), self.grad._layout)  # type: ignore[attr-defined]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        del protocol
        is_param = hasattr(self, "_is_param")
        return _rebuild, (self._local, self._layout, self.requires_grad, is_param)

    # ------------------------------------------------------------------ ops

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        route = dispatch.ROUTES.get(func) or dispatch.find_route(func)
        return route(cls, func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return dispatch.engine_call(cls, func, args, kwargs or {})


def _rebuild(local: torch.Tensor, layout: Layout, requires_grad: bool, is_param: bool) -> DTensor:
    tensor = DTensor(local, layout, requires_grad=requires_grad)
    if is_param:
        tensor._is_param = True  # type: ignore[attr-defined]
    return tensor


# What a saved DTensor is made of, so that torch.load reads it with weights_only=True, its default.
torch.serialization.add_safe_globals(
    [_rebuild, restore_mesh, Layout, Replicate, Shard, StridedShard, Packed, Partial]
)
