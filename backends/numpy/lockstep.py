# SPDX-License-Identifier: Apache-2.0
"""Distribute, redistribute and gather: a plan's steps on the arrays of all ranks at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from hyper_parallel.backends.numpy.ops import Array, NumpyOps, reduction
from hyper_parallel.backends.numpy.stacks import (
    LocalArrays,
    elements,
    from_stack,
    offsets_in,
    same_places,
    spread,
    to_stack,
)
from hyper_parallel.core.collective import Step
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.plan import Plan, plan
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime.executor import pending_op
from hyper_parallel.runtime.refusals import integer_average

__all__ = ["distribute", "execute", "gather", "redistribute"]

_OPS = NumpyOps()


def distribute(array: Array, layout: Layout) -> LocalArrays:
    """Cut an array for every rank of a mesh.

    Args:
        array: the whole; of `layout.shape`, any dtype.
        layout: what each rank shall hold, on a mesh of any device type.

    Returns:
        The array of the rank at coordinate (i, j) is `[i][j]` of it: one array with the mesh axes
        in front where all shards are alike, else nested lists. Where replicas share memory it is
        read-only.

    Raises:
        LayoutError: `array` has another shape, or integers would be averaged.

    Example:
        >>> import numpy as np
        >>> from hyper_parallel.core import AbstractMesh, Layout, Shard
        >>> mesh = AbstractMesh("numpy", (4,))
        >>> distribute(np.arange(8), Layout(mesh, (Shard(0),), (8,))).tolist()
        [[0, 1], [2, 3], [4, 5], [6, 7]]
        >>> distribute(np.arange(5), Layout(mesh, (Shard(0),), (5,)))
        [array([0, 1]), array([2, 3]), array([4]), array([], dtype=int64)]
    """
    array = np.asarray(array)
    if array.shape != layout.shape:
        raise LayoutError(
            "distribute",
            f"the array must have the layout's shape {layout.shape}",
            "Pass the whole array, or the layout of this one",
            shape=array.shape,
        )
    whole = array.copy()[(None,) * layout.mesh.ndim]
    return from_stack(_run(plan(layout.replicated, layout), whole, "distribute"), layout)


def redistribute(local_arrays: LocalArrays, src: Layout, dst: Layout) -> LocalArrays:
    """Move the arrays of all ranks from one layout to another.

    Args:
        local_arrays: what the ranks hold, as `distribute` gives it, or nested lists of arrays; they
            are not changed.
        src: the layout they are in.
        dst: the layout they shall have; on the same mesh or on another one.

    Returns:
        What the ranks hold afterwards, as `distribute` gives it; `local_arrays` itself where no
        rank's part changes.

    Raises:
        LayoutError: an array does not fit `src`, the shapes differ, or integers would be averaged.
        PlanError: there is no plan from `src` to `dst`.
        BackendError: the dtype has no such reduction.

    Example:
        >>> import numpy as np
        >>> from hyper_parallel.core import AbstractMesh, Layout, Partial, Shard
        >>> mesh = AbstractMesh("numpy", (2,))
        >>> terms, rows = (Layout(mesh, (p,), (4,)) for p in (Partial(), Shard(0)))
        >>> redistribute([np.arange(4), np.arange(4)], terms, rows)
        array([[0, 2],
               [4, 6]])
    """
    return _execute(plan(src, dst), local_arrays, "redistribute")


def gather(local_arrays: LocalArrays, layout: Layout) -> Array:
    """Give the whole array that the ranks hold together; pending reductions are done.

    Args:
        local_arrays: what the ranks hold, as `distribute` gives it, or nested lists of arrays.
        layout: the layout they are in.

    Returns:
        A new array, of `layout.shape`; what the first rank of the mesh gets.

    Raises:
        LayoutError: an array does not fit `layout`, or integers would be averaged.
        BackendError: the dtype has no such reduction.

    Example:
        >>> import numpy as np
        >>> from hyper_parallel.core import AbstractMesh, Layout, Partial
        >>> layout = Layout(AbstractMesh("numpy", (3,)), (Partial("max"),), (2,))
        >>> gather([np.array([1, 9]), np.array([7, 2]), np.array([5, 5])], layout)
        array([7, 9])
    """
    stack = to_stack(local_arrays, layout, "gather")
    whole = _run(plan(layout, layout.replicated), stack, "gather")
    return whole[(*(0,) * layout.mesh.ndim, ...)].copy()


def execute(plan: Plan, local_arrays: LocalArrays) -> LocalArrays:
    """Run a plan for all ranks; `redistribute` finds the plan first.

    Args:
        plan: what to do.
        local_arrays: what the ranks hold in `plan.src`, as `redistribute` takes it.

    Returns:
        What they hold in `plan.dst`, as `redistribute` gives it.

    Raises:
        LayoutError: an array does not fit `plan.src`, or integers would be averaged.
        BackendError: the dtype has no such reduction.
    """
    return _execute(plan, local_arrays, "execute")


def _execute(plan: Plan, local_arrays: LocalArrays, where: str) -> LocalArrays:
    stack = to_stack(local_arrays, plan.src, where)
    if not plan.steps and same_places(plan.src, plan.dst):
        return local_arrays
    return from_stack(_run(plan, stack, where), plan.dst)


def _run(plan: Plan, stack: Array, where: str) -> Array:
    """Run the steps on a stack; see [Note: stacks]."""
    averages = any(p.is_partial("avg") for p in (*plan.src.placements, *plan.dst.placements))
    if averages and stack.dtype.kind not in "fc":
        raise integer_average(where, stack.dtype)
    if 0 in plan.src.shape:
        return np.empty((1,) * plan.dst.mesh.ndim + plan.dst.largest_shape, stack.dtype)
    here = plan.src
    for step in plan.steps:
        stack = _STEPS[step.kind](_to_mesh_of(step.src, stack, here), step)
        here = step.dst
    return _to_mesh_of(plan.dst, stack, here)


def _to_mesh_of(layout: Layout, stack: Array, here: Layout) -> Array:
    """Put what the ranks hold at their places on another mesh, where no step had to move it."""
    if same_places(here, layout):
        return stack
    return elements(stack, here, layout, ())


def _move(stack: Array, step: Step) -> Array:
    return elements(stack, step.src, step.dst, step.axes)


def _reduce(stack: Array, step: Step) -> Array:
    """Reduce over the step's axes in group order, in the arrays' dtype."""
    sizes = [step.src.mesh.shape[axis] for axis in step.axes]
    op = pending_op(step.src, step.axes[0])
    add = reduction(step.kind, op, stack.dtype)
    shape = list(stack.shape)
    for axis, size in zip(step.axes, sizes, strict=True):
        shape[axis] = size
    every = np.broadcast_to(stack, shape)
    total: Array | None = None
    for places in itertools.product(*map(range, sizes)):
        pick = [slice(None)] * stack.ndim
        for axis, place in zip(step.axes, places, strict=True):
            pick[axis] = slice(place, place + 1)
        part = every[tuple(pick)]
        total = part.copy() if total is None else add(total, part, out=total)
    assert total is not None
    return _OPS.scale(total, math.prod(sizes), divide=True) if op == "avg" else total


def _reduce_scatter(stack: Array, step: Step) -> Array:
    return _move(_reduce(stack, step), step)


def _fill(stack: Array, step: Step) -> Array:
    """Turn R or a cut into a pending reduction: the own share, the identity elsewhere."""
    (axis,) = step.axes
    op, size, num_axes = pending_op(step.dst, axis), step.src.mesh.shape[axis], step.src.mesh.ndim
    if step.src.placements[axis].cut_dim is None:
        if op in ("avg", "max", "min"):
            return stack.copy()
        shape = (*stack.shape[:axis], size, *stack.shape[axis + 1 :])
        pending = _OPS.identity(shape, op, stack)
        first = (*(slice(None),) * axis, slice(1))
        pending[first] = stack[first]
        return pending
    counting = [int(i == axis) for i in range(stack.ndim)]  # an offset is then the holder's number
    holder = offsets_in(step.src, step.dst, counting, num_axes, step.axes)
    is_own = holder == spread(np.arange(size), [axis], stack.ndim)
    whole = _move(stack, step)
    whole = _OPS.scale(whole, size) if op == "avg" else whole
    return np.where(is_own, whole, _OPS.identity((), op, stack))


def _scale(stack: Array, step: Step) -> Array:
    (axis,) = step.axes
    return _OPS.scale(stack, step.src.mesh.shape[axis], divide=pending_op(step.dst, axis) == "sum")


_STEPS: dict[str, Callable[[Array, Step], Array]] = {
    "all_reduce": _reduce,
    "all_gather": _move,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _move,
    "exchange": _move,
    "slice": _move,
    "fill": _fill,
    "scale": _scale,
}
