# SPDX-License-Identifier: Apache-2.0
"""Rules of ops that move or regroup elements: generated from shapes, all linear."""

from __future__ import annotations

from functools import partial
from math import gcd, prod

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.errors import RuleError
from hyper_parallel.rules.call import Call, Rule, letters, refuse, spec

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
        raise RuleError("reshape", "the number of elements must stay", fix, src=src, dst=dst)
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
        raise RuleError("reshape", must, "Write the sizes out", shape=sizes)
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
        raise RuleError("permute", must, "Pass a permutation", dims=tuple(order))
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


def movedim(call: Call) -> OpRule:
    """Move dims `source` to the places `destination`."""
    names = letters(len(call.shape))
    sources = [call.normalize(dim) for dim in call.numbers("source") or ()]
    places = [call.normalize(dim) for dim in call.numbers("destination") or ()]
    moved = {place: names[dim] for dim, place in zip(sources, places, strict=True)}
    rest = iter(name for dim, name in enumerate(names) if dim not in sources)
    return _linear(names, [moved[i] if i in moved else next(rest) for i in range(len(names))])


def repeat(name: str, call: Call) -> OpRule:
    """Repeat dims as often as `name` says; a dim that is repeated is whole."""
    src, times = call.shape, call.numbers(name) or ()
    times = (1,) * (len(src) - len(times)) + times
    new = len(times) - len(src)
    operand = ["_" if n != 1 else a for n, a in zip(times[new:], letters(len(src)), strict=True)]
    result = [f"_={n}" for n in times[:new]]
    sizes = zip(operand, src, times[new:], strict=True)
    result += [f"_={size * n}" if name == "_" else name for name, size, n in sizes]
    return _linear(operand, result)


def repeat_interleave(call: Call) -> OpRule:
    """Repeat each row of dim `dim` `repeats` times in place, as key heads are for their group."""
    times = call.get("repeats")
    if not isinstance(times, int) or len(call.shapes) > 1:
        raise refuse("repeat_interleave", "repeats must be an int")
    if call.get("dim") is None:
        return _linear(["_"] * len(call.shape), [f"_={prod(call.shape) * times}"])
    dim, names = call.dim("dim"), letters(len(call.shape))
    grouped = f"({names[dim]} _={times})" if times > 1 else names[dim]
    return _linear(names, [*names[:dim], grouped, *names[dim + 1 :]])


def at_least(ndim: int, call: Call) -> OpRule:
    """Add size-1 dims up to `ndim`."""
    names = letters(len(call.shape))
    missing = ndim - len(names)
    if missing <= 0 or len(call.shapes) > 1:
        return _linear(names, names)
    if ndim < 3 or not names:
        return _linear(names, ["1"] * missing + names)
    return _linear(names, ["1", names[0], "1"] if len(names) == 1 else [*names, "1"])


def diagonal(first: int, second: int, call: Call) -> OpRule:
    """Take a diagonal of two whole dims; it is the last dim."""
    dims = call.dim("dim1", first), call.dim("dim2", second)
    names = spec(len(call.shape), dims)
    return _linear(names, [*(name for name in names if name != "_"), "_"])


def diag_embed(call: Call) -> OpRule:
    """Lay the last dim, which is whole, on a diagonal of two new dims."""
    dims = call.dim("dim1", -2, extra=1), call.dim("dim2", -1, extra=1)
    names = spec(len(call.shape), (len(call.shape) - 1,))
    rest = iter(names[:-1])
    result = ["_" if i in dims else next(rest) for i in range(len(names) + 1)]
    return _linear(names, result)


def diag(call: Call) -> OpRule:
    """Make a matrix of a whole vector, or a vector of a whole matrix."""
    return parse_rule("_ _ -> _" if len(call.shape) == 2 else "_ -> _ _", linear=True)


def unfold(call: Call) -> OpRule:
    """Slide along dim `dimension`, which is whole; the window is the last dim."""
    names = spec(len(call.shape), (call.dim("dimension"),))
    return _linear(names, [*names, "_"])


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
    "movedim": movedim,
    "mT": parse_rule("... a b -> ... b a", linear=True),
    "mH": parse_rule("... a b -> ... b a", linear=True),
    "repeat": partial(repeat, "repeats"),
    "tile": partial(repeat, "dims"),
    "repeat_interleave": repeat_interleave,
    **{f"atleast_{n}d": partial(at_least, n) for n in (1, 2, 3)},
    "diagonal": partial(diagonal, 0, 1),
    "linalg_diagonal": partial(diagonal, -2, -1),
    "diag_embed": diag_embed,
    "diag": diag,
    "tril": parse_rule("... _ _ -> ... _ _", linear=True),
    "triu": parse_rule("... _ _ -> ... _ _", linear=True),
    "unfold": unfold,
}
