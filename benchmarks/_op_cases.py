# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's own op database on DTensors, compared with the plain call: values and gradients.

A case is one sample of `torch.testing._internal.common_methods_invocations.op_db` with one way to
lay its tensors over one mesh axis. Operands that are a pending sum hold 2x on rank 0 and -x on
rank 1, which add up exactly and which no op but a linear one can take apart.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["Case", "Sample", "cases_of", "compare", "contribution", "differs", "infos"]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)
# Not ops on a tensor's values: makers, samplers of a fixed generator, serialised or sparse forms.
NOT_COMPARED = ("hash_tensor", "jiterator_", "sparse.", "to_sparse", "_segment_reduce", "masked.")
# What they give is not determined: only shapes are compared. So it is for random ops.
ONLY_SHAPES = (
    "empty",
    "new_empty",
    "new_empty_strided",
    "empty_like",
    "empty_permuted",
    "resize_",
    "resize_as_",
)

Way = tuple[int | str | None, ...]
"""Per tensor: a dim that is cut, "sum" for a pending sum, None for replicated."""


@dataclass
class Sample:
    """One plain call: its arguments, results, and gradients for seeded cotangents."""

    op: Callable[..., Any]
    leaves: list[Any]
    tree: Any
    slots: list[int]
    results: list[Any] = field(default_factory=list)
    seeds: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor | None] = field(default_factory=list)
    is_in_place: bool = False
    only_shapes: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [self.leaves[i] for i in self.slots]

    def call(self, tensors: list[Any]) -> list[Any]:
        """Call the op with other tensors in place of its own; give the results, flat."""
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        args, kwargs = tree_unflatten(leaves, self.tree)
        if self.is_in_place:
            with torch.no_grad():
                self.op(*args, **kwargs)
            return [tensors[0]]
        return tree_flatten(self.op(*args, **kwargs))[0]

    def with_gradients(self, tensors: list[Any], seeds: list[Any]) -> tuple[list[Any], list[Any]]:
        """Call the op; give results, and gradients of the tensors that require one."""
        results = self.call(tensors)
        outs = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        asked = [t for t in tensors if t.requires_grad]
        if not outs or not asked:
            return results, []
        grads = torch.autograd.grad(outs, asked, seeds, allow_unused=True)
        return results, list(grads)


@dataclass
class Case:
    """A sample, and how its tensors are laid out."""

    sample: Sample
    way: Way
    num_ranks: int = 2


def infos(only: str | None = None) -> list[Any]:
    """List the entries of the op database that can be compared."""
    from torch.testing._internal.common_methods_invocations import op_db

    names = set(only.split(",")) if only else None
    return [
        info
        for info in op_db
        if not info.name.startswith(NOT_COMPARED) and (names is None or info.name in names)
    ]


def cases_of(
    info: Any, num_samples: int, num_ways: int, num_ranks: int, *, in_place: bool = False
) -> list[Case]:
    """Give some cases of an op, the same each time."""
    found: list[Case] = []
    for sample in samples_of(info, num_samples, in_place):
        every = ways(sample)
        rng = random.Random(f"{info.name} {len(found)}")
        picked = every if len(every) <= num_ways else rng.sample(every, num_ways)
        found += [Case(sample, way, num_ranks) for way in picked]
    return found


def samples_of(info: Any, limit: int, in_place: bool) -> Iterator[Sample]:
    """Give plain calls that torch itself can do, spread over all that the database has."""
    op = info.inplace_variant if in_place else info.op
    if op is None:
        return
    supported = info.supported_dtypes("cpu")
    dtype = next((d for d in DTYPES if d in supported), None)
    if dtype is None:
        return
    needs_grad = info.supports_autograd and dtype.is_floating_point and not in_place
    given = list(info.sample_inputs("cpu", dtype, requires_grad=needs_grad))
    if in_place:
        given = [one for one in given if not one.broadcasts_input]
    step = max(1, len(given) // limit)
    for one in given[::step][:limit]:
        sample = _sample(op, one, info.name, in_place)
        if sample is not None:
            yield sample


class _Draws(TorchDispatchMode):
    """Tell whether random numbers are drawn: those on shards are not those of one process."""

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _sample(op: Any, given: Any, name: str, in_place: bool) -> Sample | None:
    leaves, tree = tree_flatten(((given.input, *given.args), given.kwargs))
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in slots]
    if not tensors or any(t.layout is not torch.strided for t in tensors):
        return None
    sample = Sample(op, leaves, tree, slots, is_in_place=in_place)
    sample.only_shapes = name in ONLY_SHAPES
    for slot, tensor in zip(slots, tensors, strict=True):
        leaves[slot] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = [t.detach().clone().requires_grad_(t.requires_grad) for t in sample.tensors]
            torch.manual_seed(1)
            again = sample.call([t.detach().clone() for t in sample.tensors])
            torch.manual_seed(0)
            with _Draws() as draws:
                sample.results = sample.call(plain)
            sample.only_shapes |= draws.seen
            sample.only_shapes |= any(
                bool(compare(a, b)) for a, b in zip(again, sample.results, strict=True)
            )
            outs = [r for r in sample.results if isinstance(r, torch.Tensor) and r.requires_grad]
            generator = torch.Generator().manual_seed(1)
            sample.seeds = [
                torch.rand(r.shape, generator=generator, dtype=torch.float64).to(r.dtype)
                for r in outs
            ]
            asked = [t for t in plain if t.requires_grad]
            if outs and asked:
                grads = torch.autograd.grad(outs, asked, sample.seeds, allow_unused=True)
                sample.grads = list(grads)
    except Exception:  # torch cannot do it: there is nothing to compare with
        return None
    return sample


def ways(sample: Sample) -> list[Way]:
    """List layouts: nothing cut, one tensor cut, all cut alike from right or left, pending sums."""
    tensors = sample.tensors
    none: list[int | str | None] = [None] * len(tensors)
    found: list[list[int | str | None]] = [none]
    for i, tensor in enumerate(tensors):
        found += [[*none[:i], dim, *none[i + 1 :]] for dim in range(tensor.ndim)]
    for dim in range(max(t.ndim for t in tensors)):
        found.append([dim if dim < t.ndim and t.shape[dim] > 1 else None for t in tensors])
        found.append(
            [t.ndim - 1 - dim if dim < t.ndim and t.shape[-1 - dim] > 1 else None for t in tensors]
        )
    pending = [
        i for i, t in enumerate(tensors) if t.is_floating_point() and bool(t.isfinite().all())
    ]
    found += [[*none[:i], "sum", *none[i + 1 :]] for i in pending]
    found.append(["sum" if i in pending else None for i in range(len(tensors))])
    return list(dict.fromkeys(tuple(way) for way in found))


def contribution(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Give a rank's part of a pending sum that adds up to `tensor` exactly."""
    whole = tensor.detach()
    return 2 * whole if rank == 0 else -whole if rank == 1 else torch.zeros_like(whole)


def compare(found: Any, expected: Any, *, only_shapes: bool = False) -> str | None:
    """Say how a result differs from the plain one; None if it does not."""
    if not isinstance(expected, torch.Tensor):
        if isinstance(expected, float) and isinstance(found, float):
            both_nan = found != found and expected != expected
            same = both_nan or abs(found - expected) <= 1e-9 * (1 + abs(expected))
            return None if same else f"{found} is not {expected}"
        return None if found == expected else f"{found!r} is not {expected!r}"
    if found is None:
        return "nothing came"
    if found.dtype != expected.dtype:
        return f"dtype {found.dtype} is not {expected.dtype}"
    if tuple(found.shape) != tuple(expected.shape):
        return f"shape {tuple(found.shape)} is not {tuple(expected.shape)}"
    if only_shapes:
        return None
    tolerance = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-4}
    limit = tolerance.get(expected.dtype, 2e-2)
    try:
        torch.testing.assert_close(
            found, expected.detach(), rtol=limit, atol=limit, equal_nan=True, check_stride=False
        )
    except AssertionError as error:
        return str(error).splitlines()[0] + f" {found.flatten()[:4]} {expected.flatten()[:4]}"
    return None


def differs(sample: Sample, results: list[Any], grads: list[Any]) -> str:
    """Say how whole results and gradients differ from the plain ones."""
    if len(results) != len(sample.results):
        return f"{len(results)} results, not {len(sample.results)}"
    for i, (found, expected) in enumerate(zip(results, sample.results, strict=True)):
        note = compare(found, expected, only_shapes=sample.only_shapes)
        if note:
            return f"result {i}: {note}"
    if len(grads) != len(sample.grads):
        return f"{len(grads)} gradients, not {len(sample.grads)}"
    for i, (found, expected) in enumerate(zip(grads, sample.grads, strict=True)):
        if expected is None:  # torch knows that nothing reaches it; zeros say the same
            is_nothing = found is None or sample.only_shapes or not found.count_nonzero()
            note = "" if is_nothing else "a gradient came where none should"
        else:
            note = compare(found, expected, only_shapes=sample.only_shapes)
        if note:
            return f"gradient {i}: {note}"
    return ""
