# SPDX-License-Identifier: Apache-2.0
"""Rules of look-ups and of writes by position: values of one operand are positions in a dim.

Where that dim is cut the decision carries a `Shift`: the local op subtracts the rank's start. A
look-up gives zero for positions that other ranks hold, so its results are a pending sum; a write
leaves them out. Where the positions are cut instead, every rank looks up or adds its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Argument, Call, Rule, aligned, letters, refuse, spec

__all__ = ["RULES"]


def index_select(call: Call) -> OpRule:
    """Select rows `index` of dim `dim`."""
    dim = call.dim("dim", 0)
    names = letters(len(call.shape))
    index, row = ("i0", "i0") if call.shapes[1] else ("", "_")  # one position selects a row
    result = " ".join([*names[:dim], row, *names[dim + 1 :]])
    text = f"{' '.join(names)}, {index} -> {result}"
    return parse_rule(text, index={names[dim]: 1}, linear=(0,))


def gather(call: Call) -> OpRule:
    """Take one element of dim `dim` per position; other dims are cut only where sizes agree."""
    names, positions, dim = _paired(call, 1)
    text = f"{' '.join(names)}, {' '.join(positions)} -> {' '.join(positions)}"
    return parse_rule(text, index={names[dim]: 1}, linear=(0,))


def _paired(call: Call, *others: int) -> tuple[list[str], list[str], int]:
    """Name the dims of the first operand, and of operands of positions beside it; give `dim`."""
    if call.get("dim") is None:
        raise refuse("gather", "dim must be given")
    dim = call.dim("dim")
    names = letters(len(call.shape))
    positions = list(names)
    if not names:
        raise refuse("gather", "the operand must have a dim", shape=call.shape)
    for other in others:
        shape = call.shapes[other] or ()
        if len(shape) != len(names):
            raise refuse("gather", "all operands must have as many dims", shapes=call.shapes)
        for i, size in enumerate(shape):
            if size != call.shape[i] and i != dim:
                names[i] = positions[i] = "_"
    positions[dim] = "i0"
    return names, positions, dim


def scatter(is_added: bool, call: Call) -> OpRule:
    """Write or add one element of `src` (a tensor or a number) per position in dim `dim`.

    Additions may be cut by position, too: then they are a pending sum.
    """
    names, positions, dim = _paired(call, 1)
    if not is_added and call.get("reduce") is not None:
        raise refuse("scatter", "reduce must be left out")
    source = call.shapes[2] if len(call.shapes) > 2 else None
    if source is not None and source != call.shape_of(1):
        return _whole(call)  # only a part of src is read
    if not is_added:
        positions[dim] = "_"
    target, index = " ".join(names), " ".join(positions)
    if source is None:
        text = f"{target}, {index}{', ' * (len(call.shapes) > 2)} -> {target}"
        return parse_rule(text, index={names[dim]: 1})
    text = f"{target} + {index}, {index} -> {target}"
    return parse_rule(text, index={names[dim]: 1}, linear=(0, 2))


def scatter_reduce(call: Call) -> OpRule:
    """Combine one element of `src` per position with dim `dim`; sums are additions."""
    if call.get("reduce") == "sum" and call.flag("include_self", True):
        return scatter(True, call)
    rule = scatter(False, Call(call.shapes, tuple(a for a in call.args if a[0] != "reduce")))
    return parse_rule(rule.text.replace("+", ","), index=dict(rule.index))


def _whole(call: Call) -> OpRule:
    dims = [" ".join(["_"] * len(shape or ())) for shape in call.shapes]
    return parse_rule(f"{', '.join(dims)} -> {dims[0]}")


def index_write(kind: str, call: Call) -> OpRule:
    """Write, add or fill whole rows `index` of dim `dim`."""
    dim, names = call.dim("dim"), letters(len(call.shape))
    if not call.shape or not call.shapes[1]:
        return _whole(call)
    row = "i0" if kind == "add" else "_"
    target, source = " ".join(names), " ".join([*names[:dim], row, *names[dim + 1 :]])
    address = {names[dim]: 1}
    value = call.shapes[2] if len(call.shapes) > 2 else None
    if kind == "fill" or value is None:
        text = f"{target}, {row}{', ' * (len(call.shapes) > 2)} -> {target}"
        return parse_rule(text, index=address)
    if kind == "reduce":
        return parse_rule(f"{target}, {row}, {source} -> {target}", index=address)
    return parse_rule(f"{target} + {row}, {source} -> {target}", index=address, linear=(0, 2))


def select(call: Call) -> OpRule:
    """Take position `index` of dim `dim`; where that dim is cut, its owner gives it."""
    dim, names = call.dim("dim", 0), letters(len(call.shape))
    result = " ".join(name for i, name in enumerate(names) if i != dim)
    return parse_rule(f"{' '.join(names)} -> {result}", index={names[dim]: -1}, linear=True)


def take(call: Call) -> OpRule:
    """Take elements of the flattened, whole operand."""
    whole = " ".join(["_"] * len(call.shape))
    names = " ".join(spec(len(call.shape_of(1))))
    return parse_rule(f"{whole}, {names} -> {names}", linear=(0,))


def isin(call: Call) -> OpRule:
    """Look elements up in whole test elements."""
    first, second = (len(shape or ()) for shape in call.shapes)
    names, whole = " ".join(letters(first)), " ".join(["_"] * second)
    return parse_rule(f"{names}, {whole} -> {names}")


# ---------------------------------------------------------------------- x[...]


def getitem(call: Call) -> OpRule:
    """Index with ints, slices, None, `...` and tensors of positions.

    Entries of the static argument `index`: an int, None, "...", ("slice", start, stop, step),
    "tensor", which stands for the next operand, or ("list", size) for a list of ints.
    """
    names = letters(len(call.shape))
    operand: list[str] = []
    result: list[str] = []
    entries = _entries(call)
    sizes = [shape or () for shape in call.shapes[1:]]
    lists = [size for entry in entries if (size := _list_size(entry)) is not None]
    full = _broadcast([*sizes, *((size,) for size in lists)])
    has_one = len(sizes) == 1 and not lists
    rows = [f"i{i}" if not lists else "_" for i in range(len(full))]
    address: dict[str, int] = {}
    starts: list[int] = []
    for entry in entries:
        if entry is None:
            result.append("1")
            continue
        name, size = names[len(operand)], call.shape[len(operand)]
        if entry == "tensor" or _list_size(entry) is not None:
            starts.append(len(result))
            name = name if has_one else "_"
            address |= {name: 1} if has_one else {}
        elif isinstance(entry, int):
            address[name] = -1
        else:
            name = name if _is_full(entry, size) else "_"
            result.append(name)
        operand.append(name)
    if starts:  # torch puts the dims of tensors that are not side by side first
        at = starts[0] if len(set(starts)) == 1 else 0
        result[at:at] = rows
    indices = "".join(f", {aligned(rows, shape, full)}" for shape in sizes)
    text = f"{' '.join(operand)}{indices} -> {' '.join(result)}"
    return parse_rule(text, index=address, linear=(0,))


def _list_size(entry: Argument) -> int | None:
    if not isinstance(entry, tuple) or entry[0] != "list":
        return None
    return entry[1] if isinstance(entry[1], int) else None


def _is_full(entry: Argument, size: int) -> bool:
    """Tell whether a slice takes all of a dim."""
    bounds = entry[1:] if isinstance(entry, tuple) else ("",)
    is_told = all(bound is None or isinstance(bound, int) for bound in bounds)
    return is_told and range(size)[slice(*cast("Any", bounds))] == range(size)


def _entries(call: Call) -> list[Argument]:
    """Write `...` and missing entries out as full slices."""
    given = call.get("index")
    if not isinstance(given, tuple) or "other" in given:
        raise refuse("index", "the index must hold ints, slices, None, ... and positions")
    full: Argument = ("slice", None, None, None)
    count = len(call.shape) - sum(entry not in (None, "...") for entry in given)
    if count < 0:
        raise refuse("index", "there must be as many dims", index=given)
    if "..." not in given:
        return [*given, *[full] * count]
    place = given.index("...")
    return [*given[:place], *[full] * count, *given[place + 1 :]]


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    ndim = max(map(len, shapes), default=0)
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def index_put(call: Call) -> OpRule:
    """Write or add at positions in one dim; with positions in several dims all are whole."""
    if call.flag("has_mask"):
        raise refuse("index_put", "the indices must be positions")
    names = letters(len(call.shape))
    indices, values = call.shapes[1:-1], call.shapes[-1]
    tensors = [shape for shape in indices if shape is not None]
    dims = [dim for dim, shape in enumerate(indices) if shape is not None]
    full = _broadcast(tensors)
    rows = [f"i{i}" for i in range(len(full))]
    if not call.flag("accumulate") or len(dims) > 1:
        rows = ["_"] * len(full)
    if len(dims) > 1:
        names = ["_" if dim in dims else name for dim, name in enumerate(names)]
    rest = [(names[i], call.shape[i]) for i in range(len(names)) if i not in dims]
    start = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    made = [*rest[:start], *zip(rows, full, strict=True), *rest[start:]]
    whole = [name for name, _ in made]
    value = aligned(whole, values or (), [size for _, size in made])
    index = ", ".join(aligned(rows, shape, full) if shape else "" for shape in indices)
    text = f"{' '.join(names)} + {index}, {value} -> {' '.join(names)}"
    address = {names[dims[0]]: 1 + dims[0]} if len(dims) == 1 else {}
    return parse_rule(text, index=address, linear=(0, len(call.shapes) - 1))


RULES: dict[str, Rule] = {
    "embedding": parse_rule("..., v h -> ... h", index={"v": 0}, linear=(1,)),
    "index_select": index_select,
    "gather": gather,
    "take_along_dim": gather,
    "scatter": partial(scatter, False),
    "scatter_add": partial(scatter, True),
    "scatter_reduce": scatter_reduce,
    **{f"index_{kind}": partial(index_write, kind) for kind in ("add", "copy", "fill", "reduce")},
    "select": select,
    "__getitem__": getitem,
    "index_put": index_put,
    "take": take,
    "isin": isin,
}
