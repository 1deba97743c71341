# SPDX-License-Identifier: Apache-2.0
"""Rules of matrix products: a cut contracted dim leaves a pending sum."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.errors import RuleError
from hyper_parallel.rules.call import Call, Rule, aligned, letters

__all__ = ["RULES"]


def linear(call: Call) -> OpRule:
    """Linear layer with or without bias, weight `[out, in]`."""
    bias = " + n" if len(call.shapes) == 3 else ""
    return parse_rule(f"... k, n k{bias} -> ... n", linear=True)


def matmul(call: Call) -> OpRule:
    """Product of vectors, matrices, or batches of matrices with broadcasting."""
    left, right = (len(shape or ()) for shape in call.shapes)
    if left == 1:
        text = "k, k -> " if right == 1 else "k, ... k n -> ... n"
    else:
        text = "... k, k -> ..." if right == 1 else "... m k, ... k n -> ... m n"
    return parse_rule(text, linear=True)


def plus_product(product: str, result: str, call: Call, empty: bool = True) -> OpRule:
    """Bias plus product; a bias of size 1 in a dim is broadcast over it."""
    names = result.split()
    operands = zip(product.split(","), call.shapes[1:], strict=True)
    sizes = {
        name: size
        for dims, shape in operands
        for name, size in zip(dims.split(), shape or (), strict=True)
    }
    bias = aligned(names, call.shape_of(0), tuple(sizes[name] for name in names))
    return parse_rule(f"{bias} + {product} -> {result}", linear=True, empty=empty)


def chain(call: Call) -> OpRule:
    """Product of a list of matrices; the first and the last may be vectors."""
    names = letters(len(call.shapes) + 1)
    operands = [f"{a} {b}" for a, b in pairwise(names)]
    result = [names[0], names[-1]]
    for end, kept, position in ((0, names[1], 0), (-1, names[-2], -1)):
        if len(call.shapes[end] or ()) == 1:
            operands[end] = kept
            result[position] = ""
    return parse_rule(f"{', '.join(operands)} -> {' '.join(result)}", linear=True)


def einsum(call: Call) -> OpRule:
    """Sum of products by an equation such as `"b s d, h d -> b h s"`.

    A letter that occurs twice in one operand is a diagonal, which is whole.
    """
    equation = call.get("equation")
    if not isinstance(equation, str):
        must = "the equation must be a string"
        raise RuleError("einsum", must, "Write it out", equation=equation)
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = [_letters(text) for text in left.split(",")]
    every = [name for names in operands for name in names]
    if not arrow:
        result = sorted(name for name in set(every) if every.count(name) == 1 and name != "...")
        result = ["..."] * ("..." in every) + result
    else:
        result = _letters(right)
    diagonal = {name for names in operands for name in names if names.count(name) > 1}
    sizes: dict[str, set[int]] = {}
    for names, shape in zip(operands, call.shapes, strict=True):
        if "..." not in names:
            for name, size in zip(names, shape or (), strict=True):
                sizes.setdefault(name, set()).add(size)
    diagonal |= {name for name, found in sizes.items() if len(found) > 1}  # 1 is broadcast
    if "..." in every and "..." not in result:
        diagonal |= {"..."}
    texts = [" ".join("_" if n in diagonal else n for n in names) for names in (*operands, result)]
    if "..." in diagonal:
        must = "dims of '...' must be in the result"
        raise RuleError("einsum", must, "Write the summed dims out", equation=equation)
    return parse_rule(f"{', '.join(texts[:-1])} -> {texts[-1]}", linear=True)


def _letters(text: str) -> list[str]:
    return ["..." if name == "." else name for name in text.replace("...", ".")]


def tensordot(call: Call) -> OpRule:
    """Sum of products over paired dims (`dims`: a number, or two lists)."""
    left, right = (len(shape or ()) for shape in call.shapes)
    dims = call.get("dims", 2)
    if isinstance(dims, int):
        pairs = [(left - dims + i, i) for i in range(dims)]
    elif isinstance(dims, tuple) and len(dims) == 2:
        firsts, seconds = (dim if isinstance(dim, tuple) else (dim,) for dim in dims)
        pairs = [(_int(a) % left, _int(b) % right) for a, b in zip(firsts, seconds, strict=True)]
    else:
        raise RuleError("tensordot", "dims must be ints", "Write them out", dims=dims)
    names = letters(left + right)
    first, second = names[:left], names[left:]
    for a, b in pairs:
        second[b] = first[a]
    shared = {first[a] for a, _ in pairs}
    result = [name for name in (*first, *second) if name not in shared]
    return parse_rule(f"{' '.join(first)}, {' '.join(second)} -> {' '.join(result)}", linear=True)


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise RuleError("tensordot", "dims must be ints", "Write them out", dim=value)
    return value


def inner(call: Call) -> OpRule:
    """Sum of products over the last dims."""
    left, right = (len(shape or ()) for shape in call.shapes)
    if not left or not right:
        return parse_rule("..., ... -> ...", linear=True)
    names = letters(left + right - 2)
    first, second = " ".join(names[: left - 1]), " ".join(names[left - 1 :])
    return parse_rule(f"{first} z9, {second} z9 -> {first} {second}", linear=True)


def kron(call: Call) -> OpRule:
    """Kronecker product: each dim of the result is a dim of the first, and in it the second's."""
    first, second = (list(shape or ()) for shape in call.shapes)
    ndim = max(len(first), len(second))
    names = letters(2 * ndim)
    outer, inside = names[:ndim], names[ndim:]
    outer[: ndim - len(first)] = [""] * (ndim - len(first))
    inside[: ndim - len(second)] = [""] * (ndim - len(second))
    pairs = zip(outer, inside, strict=True)
    result = " ".join(f"({a} {b})" if a and b else a or b for a, b in pairs)
    return parse_rule(f"{' '.join(outer)}, {' '.join(inside)} -> {result}", linear=True)


def vecdot(call: Call) -> OpRule:
    """Sum of products along one dim (`dim`)."""
    left, right = (shape or () for shape in call.shapes)
    if left != right:
        raise RuleError("vecdot", "the shapes must be equal", "Expand", shapes=call.shapes)
    names, dim = letters(len(left)), call.dim("dim", -1)
    result = " ".join(name for i, name in enumerate(names) if i != dim)
    return parse_rule(f"{' '.join(names)}, {' '.join(names)} -> {result}", linear=True)


def grouped_mm(call: Call) -> OpRule:
    """Products by group (experts). With offsets, the ragged dim is whole: they count its rows."""
    left, right = (len(shape or ()) for shape in call.shapes[:2])
    offsets = ", _" * (len(call.shapes) - 2)
    texts = {
        (3, 3): "e t k, e k n -> e t n",
        (2, 3): f"_ k, _ k n{offsets} -> _ n",
        (3, 2): f"_ t k, k _{offsets} -> t _",
        (2, 2): f"m _, _ n{offsets} -> _ m n",
    }
    return parse_rule(texts[left, right], linear=(0, 1))


def bilinear(call: Call) -> OpRule:
    """Bilinear layer with or without bias, weight `[out, in1, in2]`."""
    bias = " + o" if len(call.shapes) == 4 else ""
    return parse_rule(f"... i, ... j, o i j{bias} -> ... o", linear=True, empty=False)


RULES: dict[str, Rule] = {
    "linear": linear,
    "matmul": matmul,
    "mm": parse_rule("m k, k n -> m n", linear=True),
    "bmm": parse_rule("b m k, b k n -> b m n", linear=True),
    "mv": parse_rule("m k, k -> m", linear=True),
    "dot": parse_rule("k, k -> ", linear=True),
    "outer": parse_rule("m, n -> m n", linear=True),
    "addmm": partial(plus_product, "m k, k n", "m n"),
    # torch gives a wrong shape for no rows
    "addmv": partial(plus_product, "m k, k", "m", empty=False),
    "addr": partial(plus_product, "m, n", "m n"),
    "baddbmm": partial(plus_product, "b m k, b k n", "b m n"),
    "addbmm": partial(plus_product, "b m k, b k n", "m n"),
    "linalg_multi_dot": chain,
    "chain_matmul": chain,
    "einsum": einsum,
    "tensordot": tensordot,
    "inner": inner,
    "kron": kron,
    "linalg_vecdot": vecdot,
    "grouped_mm": grouped_mm,
    "bilinear": bilinear,
    "cdist": parse_rule("... p _, ... r _ -> ... p r"),
}
