# SPDX-License-Identifier: Apache-2.0
"""register_op_rule: teach DTensor how an op may be sharded, in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.rule import parse_rule
from hyper_parallel.dtensor.signatures import op_name
from hyper_parallel.rules import register

__all__ = ["register_op_rule"]


def register_op_rule(
    op: str | Callable[..., Any],
    rule: str,
    *,
    reduce: str = "sum",
    linear: bool | Sequence[int] = False,
    random: bool = False,
    replace: bool = False,
) -> None:
    """Say how an op's tensors may be cut between ranks.

    A name in the rule is a dim that may be cut, in all tensors that have it alike. `_` is a dim
    that every rank holds whole. `...` stands for any leading dims. A name that a result lacks
    leaves a pending reduction. docs/architecture.md has more.

    Args:
        op: a torch function, or its name (`torch.ops.mylib.swiglu` is "swiglu").
        rule: for example "... k, n k -> ... n". Operands are the call's tensors, in order.
        reduce: the reduction of a name that a result lacks: "sum", "avg", "max" or "min".
        linear: the op is linear in all operands, or in those at these positions, so that a
            pending sum may pass through.
        random: the op draws random numbers; refused on DTensors.
        replace: allow an op that has a rule already.

    Raises:
        RuleError: the rule is malformed, or the op has one and `replace` is False.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, distribute_tensor, init_device_mesh
        >>> from hyper_parallel import register_op_rule, simulate
        >>> register_op_rule(torch.heaviside, "..., ... -> ...")
        >>> @simulate(2)
        ... def placements():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.randn(4), mesh, [Shard(0)])
        ...     return torch.heaviside(x, x).placements
        >>> placements()
        [(S(0),), (S(0),)]
    """
    flags = True if linear is True else tuple(linear or ())
    parsed = parse_rule(rule, reduce=reduce, linear=flags, random=random)
    register(op if isinstance(op, str) else op_name(op), parsed, replace=replace)
