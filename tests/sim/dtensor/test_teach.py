# SPDX-License-Identifier: Apache-2.0
"""register_op_rule: an op that a user taught runs on shards, and mistakes are refused."""

import pytest
import torch

from hyper_parallel import (
    RuleError,
    Shard,
    distribute_tensor,
    init_device_mesh,
    register_op_rule,
    simulate,
    strict_rules,
)
from hyper_parallel.core.rule import parse_rule
from hyper_parallel.rules import names, register

LIB = torch.library.Library("hp_test", "FRAGMENT")
LIB.define("scaled_sum(Tensor x, Tensor y, float factor) -> Tensor")
LIB.impl("scaled_sum", lambda x, y, factor: (x + y) * factor, "CompositeImplicitAutograd")


def scaled_sum(cut):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(8.0).reshape(4, 2)
    return torch.ops.hp_test.scaled_sum(*(distribute_tensor(t, mesh, cut) for t in (x, x)), 2.0)


def test_a_taught_custom_op_runs_on_shards():
    def run():
        with strict_rules(), pytest.raises(RuleError, match="register_op_rule"):
            scaled_sum([Shard(0)])

    if "scaled_sum" not in names():
        simulate(2).run(run)
        register_op_rule("scaled_sum", "..., ... -> ...")

    def taught():
        with strict_rules():
            result = scaled_sum([Shard(0)])
        return result.placements, result.full_tensor()

    for placements, value in simulate(2).run(taught):
        assert placements == (Shard(0),)
        assert torch.equal(value, torch.arange(8.0).reshape(4, 2) * 4)


def test_a_replaced_rule_counts_at_once():
    def placements():
        mesh = init_device_mesh("cpu", (2,))
        return distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).sinh().placements

    register("sinh", parse_rule("... -> ..."), replace=True)
    assert simulate(2).run(placements)[0] == (Shard(0),)
    register_op_rule(torch.sinh, "_ b -> _ b", replace=True)
    assert simulate(2).run(placements)[0] != (Shard(0),)


def test_an_op_with_a_rule_is_not_replaced_silently():
    with pytest.raises(RuleError, match="must have no rule yet"):
        register_op_rule(torch.add, "... -> ...")


def test_a_malformed_rule_is_refused():
    with pytest.raises(RuleError, match="rule"):
        register_op_rule("some_op", "a b -> (")
