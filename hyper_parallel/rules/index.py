# SPDX-License-Identifier: Apache-2.0
"""Rules of look-ups: values of one operand are positions in a dim of another.

Where that dim is cut the decision carries a `Shift`: the local op subtracts the rank's start and
gives zero for positions that other ranks hold, so the results are a pending sum.
"""

from __future__ import annotations

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Call, Rule, letters

__all__ = ["RULES"]


def index_select(call: Call) -> OpRule:
    """Select rows `index` of dim `dim`."""
    dim = call.dim("dim", 0)
    names = letters(len(call.shape))
    result = [*names[:dim], "i0", *names[dim + 1 :]]
    text = f"{' '.join(names)}, i0 -> {' '.join(result)}"
    return parse_rule(text, index={names[dim]: 1}, linear=(0,))


def gather(call: Call) -> OpRule:
    """Take one element of dim `dim` per position; other dims are cut only where sizes agree."""
    dim = call.dim("dim", 0)
    source, positions = letters(len(call.shape)), letters(len(call.shape))
    for other, (have, want) in enumerate(zip(call.shape, call.shapes[1] or (), strict=True)):
        if other != dim and have != want:
            source[other] = positions[other] = "_"
    positions[dim] = "i0"
    text = f"{' '.join(source)}, {' '.join(positions)} -> {' '.join(positions)}"
    return parse_rule(text, index={source[dim]: 1}, linear=(0,))


RULES: dict[str, Rule] = {
    "embedding": parse_rule("..., v h -> ... h", index={"v": 0}, linear=(1,)),
    "index_select": index_select,
    "gather": gather,
}
