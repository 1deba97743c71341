# SPDX-License-Identifier: Apache-2.0
"""register_op_rule: teach DTensor how an op may be sharded, in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.rule import parse_rule
from hyper_parallel.dtensor.signatures import op_name
from hyper_parallel.errors import RuleError
from hyper_parallel.rules import register

__all__ = ["register_op_rule"]


def register_op_rule(  # noqa: PLR0913  # the words of the language
    op: str | Callable[..., Any],
    rule: str,
    *,
    reduce: str = "sum",
    linear: bool | Sequence[int] = False,
    random: bool = False,
    empty: bool = False,
    replace: bool = False,
) -> None:
    """Say how an op's tensors may be cut between ranks.

    A name in the rule is a dim that may be cut, in all tensors that have it alike. `_` is a dim
    that every rank holds whole. `...` stands for any leading dims. A name that a result lacks
    leaves a pending reduction. CONTRIBUTING.md has all of the language.

    A call that the rule does not fit runs on gathered operands, with a warning that says why.

    Args:
        op: a torch function, or its name (`torch.ops.mylib.swiglu` is "swiglu").
        rule: for example "... k, n k -> ... n". Operands are the call's tensors, in order.
        reduce: the reduction of a name that a result lacks: "sum", "avg" (of uneven pieces by
            their sizes), "max", "min" or "product".
        linear: the op is linear in all operands, or in those at these positions, so that a
            pending sum may pass through.
        random: the op draws random numbers: alike on replicas, unlike on shards.
        empty: the op can run on tensors without elements; else no dim is cut in more parts than
            it has entries.
        replace: allow an op that has a rule already.

    Raises:
        RuleError: the rule or a flag is malformed, `op` is no function or name, or it has a rule
            already and `replace` is False.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, distribute_tensor, init_device_mesh
        >>> from hyper_parallel import register_op_rule, simulate
        >>> register_op_rule(torch.linalg.vander, "... _ -> ... _ _")
        >>> @simulate(2)
        ... def placements():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
        ...     return torch.linalg.vander(x).placements
        >>> placements()
        [(S(0),), (S(0),)]
    """
    where = "register_op_rule"
    if not isinstance(op, str) and not callable(op):
        must = "op must be a torch function or its name"
        raise RuleError(where, must, "Pass torch.add, or 'add'", op=op)
    if not isinstance(rule, str):
        must = "rule must be a string"
        raise RuleError(where, must, "Write for example '... -> ...'", rule=rule)
    is_list = isinstance(linear, (list, tuple)) and all(type(i) is int for i in linear)
    if not isinstance(linear, bool) and not is_list:
        must = "linear must be a bool or a list of operand positions"
        raise RuleError(where, must, "Pass True, or for example [0]", linear=linear)
    parsed = parse_rule(rule, reduce=reduce, linear=linear, random=random, empty=empty)
    register(op if isinstance(op, str) else op_name(op), parsed, replace=replace)
