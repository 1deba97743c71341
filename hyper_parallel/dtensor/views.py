# SPDX-License-Identifier: Apache-2.0
"""Which results of ops are views, and which of these are views of a copy; views that torch makes.

[Note: lost writes] A view of a DTensor that had to be gathered is a view of a copy: an in-place op
on it would change the copy only. A moved operand carries a mark that views of it inherit and that
the in-place path refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hyper_parallel.dtensor.decisions import Spec
from hyper_parallel.dtensor.local_op import graph_part, needs_grad
from hyper_parallel.dtensor.pending import bare
from hyper_parallel.dtensor.signatures import BoundCall
from hyper_parallel.dtensor.wrapping import wrap

__all__ = ["gives_views", "mark_views", "memory_of", "view_as"]

_VIEWS = frozenset(
    "t mT mH transpose permute movedim view reshape flatten unflatten squeeze unsqueeze"
    " expand narrow select slice split chunk unbind tensor_split hsplit vsplit dsplit __getitem__"
    " diagonal linalg_diagonal unfold real imag as_strided detach view_as_real view_as_complex"
    " atleast_1d atleast_2d atleast_3d broadcast_tensors meshgrid".split()
)
# These copy where the local part has no view of this kind.
_MAY_COPY = frozenset("view reshape flatten unflatten".split())
# Views that are not contiguous, though their local part may be.
_SCATTERING = _VIEWS - _MAY_COPY - frozenset("detach squeeze unsqueeze".split())


def gives_views(name: str, bound: BoundCall) -> bool:
    """Tell whether an op's results may be views; indexing with positions or masks copies."""
    index = dict(bound.static).get("index") if len(bound.static) == 1 else None
    copies = ("tensor", "other", "list")
    entries = index if isinstance(index, tuple) else ()
    return name in _VIEWS and not any(
        (e[0] if isinstance(e, tuple) else e) in copies for e in entries
    )


def memory_of(local: torch.Tensor) -> int:
    """Name the memory that a plain tensor is in."""
    return local.untyped_storage().data_ptr()


def mark_views(
    cls: type[Any], name: str, spec: Spec, operands: Sequence[Any], result: Any, *, is_view: bool
) -> Any:
    """Mark results that are views of a copy, or scattered; see [Note: lost writes].

    Gives a copy where `contiguous` must make one though the local part needs none.
    """
    values = [result] if type(result) is cls else tree_flatten(result)[0]
    values = [value for value in values if isinstance(value, cls)]
    if is_view or spec.outputs is None:
        may_copy = is_view and (spec.local is not None or name in _MAY_COPY)
        if may_copy or any([t._write_is_lost for t in operands]):  # noqa: C419  # a short list
            _mark_copies(spec, operands, values, may_copy)
    is_scattered = operands[0]._is_scattered
    if name == "contiguous" and is_scattered and type(result) is cls:
        shares = memory_of(bare(result)) == memory_of(bare(operands[0]))
        return result.clone() if shares else result  # type: ignore[attr-defined]
    if (is_scattered and name in _VIEWS) or (is_view and name in _SCATTERING):
        for value in values:
            value._is_scattered = True  # type: ignore[attr-defined]
    return result


def _mark_copies(spec: Spec, operands: Sequence[Any], values: list[Any], may_copy: bool) -> None:
    """Mark results that are views of a copy, or copies where a dense tensor would give views."""
    # Where only some ranks have what it views, all results are marked.
    is_made = spec.local is not None and bool(spec.local.addressed)
    lost = {memory_of(bare(t)) for t in operands if t._write_is_lost}
    owners = {memory_of(bare(t)) for t in operands} if may_copy else None
    for value in values:
        at = memory_of(bare(value))
        if is_made or at in lost or (owners is not None and at not in owners):
            value._write_is_lost = True


def view_as(tensor: Any, other: Any) -> Any:
    """Serve `x.view_as(y)`; of a leaf as itself torch looks for the leaf one step behind it."""
    if other is tensor and tensor._graph is None and needs_grad((tensor,)) and tensor.is_leaf:
        return wrap(type(tensor), graph_part(tensor), tensor._layout)
    return tensor.view(other.shape)
