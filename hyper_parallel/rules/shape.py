# SPDX-License-Identifier: Apache-2.0
"""Rules of ops that move or regroup elements: generated from shapes, all linear."""

from __future__ import annotations

from functools import partial
from math import gcd, prod

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.errors import RuleError, describe
from hyper_parallel.rules.call import Call, Rule, letters, spec

__all__ = ["RULES", "reshape_rule"]

Shape = tuple[int, ...]


def reshape_rule(src: Shape, dst: Shape, *, local: tuple[str, ...] = ("shape",)) -> OpRule:
    """Make the rule of a reshape between two global shapes.

    Walks both shapes from the left. The greatest common divisor of what is left of two dims is a
    factor of both. Where nothing common is left the dims are whole up to where they align again.

    Args:
        src: the operand's shape.
        dst: the result's shape, without -1.
        local: names of the arguments that hold result sizes.

    Returns:
        The rule.

    Raises:
        RuleError: the shapes have different numbers of elements.

    Example:
        >>> reshape_rule((4, 8, 6), (32, 6)).text, reshape_rule((6, 4), (4, 6)).text
        ('a=4 b=8 c=6 -> (a=4 b=8) c=6', '(a=2 _=3) _=4 -> (a=2 _=2) _=6')
    """
    if prod(src) != prod(dst):
        fix = "Pass a shape with as many elements"
        raise RuleError(
            describe("reshape", "the number of elements must stay", fix, src=src, dst=dst)
        )
    if 0 in src and src != dst:
        sides = [[[f"_={size}"] for size in shape] for shape in (src, dst)]
    else:
        sides = _walk(src, dst)
    texts = [
        " ".join(f"({' '.join(dim)})" if len(dim) > 1 else (*dim, "1")[0] for dim in side)
        for side in sides
    ]
    return parse_rule(f"{texts[0]} -> {texts[1]}", linear=True, local=local)


def _walk(src: Shape, dst: Shape) -> list[list[list[str]]]:
    """List the factors of every dim on both sides; a size-1 dim that has no partner has none."""
    names = iter(letters(len(src) + len(dst)))
    shapes = (src, dst)
    sides: list[list[list[str]]] = [[[] for _ in shape] for shape in shapes]
    at, left = [0, 0], [0, 0]
    while at[0] < len(src) and at[1] < len(dst):
        left = [left[i] or shapes[i][at[i]] for i in (0, 1)]
        common = gcd(*left)
        if common > 1 or left[0] == left[1]:
            factor = f"{next(names)}={common}"
            for i in (0, 1):
                sides[i][at[i]].append(factor)
                left[i] = left[i] // common if common else 1
        if min(left) > 1:
            _skip_to_alignment(shapes, sides, at, left)
        for i in (0, 1):
            if left[i] == 1:
                at[i], left[i] = at[i] + 1, 0
    return sides


def _skip_to_alignment(
    shapes: tuple[Shape, Shape], sides: list[list[list[str]]], at: list[int], left: list[int]
) -> None:
    """Make dims whole on both sides until both have covered the same number of elements."""
    for i in (0, 1):
        sides[i][at[i]].append(f"_={left[i]}")
    while left[0] != left[1]:
        i = 0 if left[0] < left[1] else 1
        at[i] += 1
        sides[i][at[i]].append(f"_={shapes[i][at[i]]}")
        left[i] *= shapes[i][at[i]]
    left[:] = [1, 1]


def _resolve(sizes: Shape, numel: int) -> Shape:
    """Replace a -1."""
    if -1 not in sizes:
        return sizes
    known = prod(size for size in sizes if size != -1)
    if sizes.count(-1) > 1 or known == 0 or numel % known:
        must = f"at most one size may be -1 and the rest must divide {numel}"
        raise RuleError(describe("reshape", must, "Write the sizes out", shape=sizes))
    return tuple(numel // known if size == -1 else size for size in sizes)


def reshape(call: Call) -> OpRule:
    """View or reshape to `shape`."""
    shape = call.numbers("shape") or ()
    return reshape_rule(call.shape, _resolve(shape, prod(call.shape)))


def flatten(call: Call) -> OpRule:
    """Flatten dims `start_dim` to `end_dim`."""
    src = call.shape
    if not src:
        return parse_rule("-> 1", linear=True)
    start, end = call.dim("start_dim", 0), call.dim("end_dim", -1)
    return reshape_rule(src, (*src[:start], prod(src[start : end + 1]), *src[end + 1 :]), local=())


def unflatten(call: Call) -> OpRule:
    """Split dim `dim` in `sizes`."""
    src, dim = call.shape, call.dim("dim")
    sizes = _resolve(call.numbers("sizes") or (), src[dim])
    return reshape_rule(src, (*src[:dim], *sizes, *src[dim + 1 :]), local=("sizes",))


def permute(call: Call) -> OpRule:
    """Reorder all dims as `dims` says."""
    names = letters(len(call.shape))
    order = [call.normalize(dim) for dim in call.numbers("dims") or ()]
    if sorted(order) != list(range(len(names))):
        must = "dims must name every dim once"
        raise RuleError(describe("permute", must, "Pass a permutation", dims=tuple(order)))
    return _linear(names, [names[dim] for dim in order])


def transpose(call: Call) -> OpRule:
    """Swap dims `dim0` and `dim1`."""
    names = letters(len(call.shape))
    swapped, first, second = list(names), call.dim("dim0"), call.dim("dim1")
    swapped[first], swapped[second] = names[second], names[first]
    return _linear(names, swapped)


def t(call: Call) -> OpRule:
    """Transpose a matrix; a vector stays."""
    names = letters(len(call.shape))
    return _linear(names, names[::-1])


def unsqueeze(call: Call) -> OpRule:
    """Add a size-1 dim at `dim`."""
    names = letters(len(call.shape))
    dim = call.dim("dim", extra=1)
    return _linear(names, [*names[:dim], "1", *names[dim:]])


def squeeze(call: Call) -> OpRule:
    """Drop size-1 dims: all, or those in `dim`.

    `dim` is rewritten per rank (`local`): a dim whose local size happens to be 1 must stay.
    """
    asked = call.numbers("dim")
    dims = range(len(call.shape)) if asked is None else [call.normalize(dim) for dim in asked]
    dropped = [dim for dim in dims if call.shape[dim] == 1]
    names = letters(len(call.shape))
    operand = ["1" if dim in dropped else name for dim, name in enumerate(names)]
    result = [name for dim, name in enumerate(names) if dim not in dropped]
    return parse_rule(f"{' '.join(operand)} -> {' '.join(result)}", linear=True, local=("dim",))


def expand(call: Call) -> OpRule:
    """Broadcast size-1 dims, or new leading ones, to `sizes`; a broadcast dim is whole."""
    src, sizes = call.shape, call.numbers("sizes") or ()
    new = len(sizes) - len(src)
    operand, result = letters(len(src)), [f"_={size}" for size in sizes[: max(new, 0)]]
    for dim, (have, want) in enumerate(zip(src, sizes[max(new, 0) :], strict=True)):
        if have == 1 and want not in (1, -1):
            operand[dim] = "1"
            result.append(f"_={want}")
        else:
            result.append(operand[dim])
    return parse_rule(f"{' '.join(operand)} -> {' '.join(result)}", linear=True, local=("sizes",))


def cat(call: Call) -> OpRule:
    """Join along dim `dim`, which is whole."""
    dim = call.dim("dim", 0)
    names = spec(len(call.shape), (dim,))
    known = [shape[dim] for shape in call.shapes if shape is not None]
    result = [f"_={sum(known)}" if name == "_" else name for name in names]
    return parse_rule(_joined(names, len(call.shapes), result), linear=True)


def stack(call: Call) -> OpRule:
    """Join along a new dim `dim`, which is whole."""
    names = letters(len(call.shape))
    dim = call.dim("dim", 0, extra=1)
    result = [*names[:dim], f"_={len(call.shapes)}", *names[dim:]]
    return parse_rule(_joined(names, len(call.shapes), result), linear=True)


def _joined(operand: list[str], count: int, result: list[str]) -> str:
    return f"{' + '.join([' '.join(operand)] * count)} -> {' '.join(result)}"


def _pieces(keeps_dim: bool, call: Call) -> OpRule:
    """Take dim `dim`, which is whole, apart in pieces of `split_size`, `chunks` pieces, or rows."""
    dim = call.dim("dim", 0)
    names, size = spec(len(call.shape), (dim,)), call.shape[dim]
    asked = call.numbers("split_size")
    chunks = call.number("chunks", 0)
    if not keeps_dim:
        sizes = [1] * size
    elif asked is not None and isinstance(call.get("split_size"), tuple):
        sizes = list(asked)
    else:
        step = max(asked[0] if asked else -(-size // max(chunks, 1)), 1)
        sizes = [min(step, size - start) for start in range(0, size, step)] or [0]
    results = [
        " ".join(f"_={n}" if name == "_" else name for name in names if keeps_dim or name != "_")
        for n in sizes
    ]
    return parse_rule(f"{' '.join(names)} -> {', '.join(results)}", linear=True)


def _along(keeps_dim: bool, call: Call) -> OpRule:
    """Take part of dim `dim`, which is whole."""
    names = spec(len(call.shape), (call.dim("dim", 0),))
    return _linear(names, [name for name in names if keeps_dim or name != "_"])


def _linear(operand: list[str], result: list[str]) -> OpRule:
    return parse_rule(f"{' '.join(operand)} -> {' '.join(result)}", linear=True)


RULES: dict[str, Rule] = {
    "reshape": reshape,
    "view": reshape,
    "flatten": flatten,
    "unflatten": unflatten,
    "permute": permute,
    "transpose": transpose,
    "t": t,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "expand": expand,
    "cat": cat,
    "stack": stack,
    "split": partial(_pieces, True),
    "chunk": partial(_pieces, True),
    "unbind": partial(_pieces, False),
    "slice": partial(_along, True),
    "narrow": partial(_along, True),
    "flip": partial(_along, True),
    "roll": partial(_along, True),
    "select": partial(_along, False),
    "tril": parse_rule("... _ _ -> ... _ _", linear=True),
    "triu": parse_rule("... _ _ -> ... _ _", linear=True),
}
