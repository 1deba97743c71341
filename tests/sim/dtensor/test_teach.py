# SPDX-License-Identifier: Apache-2.0
"""register_op_rule: an op that a user taught runs on shards, and mistakes are refused."""

import pytest
import torch

from hyper_parallel import (
    Partial,
    Replicate,
    RuleError,
    Shard,
    distribute_tensor,
    init_device_mesh,
    register_op_rule,
    rules,
    simulate,
    strict_rules,
)
from hyper_parallel.core.rule import parse_rule
from hyper_parallel.rules import names, register
from support.device import DEVICE, DTYPE

LIB = torch.library.Library("hp_test", "FRAGMENT")
LIB.define("scaled_sum(Tensor x, Tensor y, float factor) -> Tensor")
LIB.impl("scaled_sum", lambda x, y, factor: (x + y) * factor, "CompositeImplicitAutograd")


def scaled_sum(cut):
    mesh = init_device_mesh(DEVICE, (2,))
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


def test_a_replaced_rule_counts_at_once(monkeypatch):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))

    def placements():
        mesh = init_device_mesh(DEVICE, (2,))
        return distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).sinh().placements

    register("sinh", parse_rule("... -> ..."), replace=True)
    assert simulate(2).run(placements)[0] == (Shard(0),)
    register_op_rule(torch.sinh, "_ b -> _ b", replace=True)
    assert simulate(2).run(placements)[0] != (Shard(0),)


@pytest.mark.parametrize(
    ("given", "must"),
    [
        ({"op": 3, "rule": "... -> ..."}, "op must be a torch function or its name, but got op=3"),
        ({"op": "f", "rule": None}, "rule must be a string, but got rule=None"),
        (
            {"op": "f", "rule": "... -> ...", "linear": 0},
            "linear must be a bool or a list of operand",
        ),
        ({"op": "f", "rule": "... -> ...", "linear": ["x"]}, "linear must be a bool or a list of"),
        (
            {"op": "f", "rule": "... -> ...", "linear": [1]},
            "linear must hold operand positions below 1",
        ),
        ({"op": "f", "rule": "... -> ...", "reduce": "mean"}, "reduce must be a reduction"),
        ({"op": "f", "rule": "a b"}, "there must be exactly one '->'"),
        ({"op": "f", "rule": "a -> b"}, "result factor 'b' must occur in an operand"),
    ],
)
def test_a_malformed_rule_is_refused(given, must):
    with pytest.raises(RuleError, match=must):
        register_op_rule(**given)
    assert "f" not in names()


LIB.define("row_means(Tensor x) -> Tensor")
LIB.impl("row_means", lambda x: x.reshape(-1).sum() / len(x), "CompositeImplicitAutograd")


def test_a_call_that_a_taught_rule_does_not_fit_is_gathered_and_says_why(monkeypatch):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    register_op_rule("row_means", "a b c -> c")

    def run():
        mesh = init_device_mesh(DEVICE, (2,))
        x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        return torch.ops.hp_test.row_means(x).placements

    with pytest.warns(UserWarning, match=r"for this call.*operand 0 must have 3 dims"):
        assert simulate(2).run(run) == [(Replicate(),)] * 2


@pytest.mark.parametrize(("rows", "placement"), [(5, Partial()), (1, Replicate())])
def test_a_taught_average_counts_uneven_pieces_and_is_not_cut_in_empty_ones(
    monkeypatch, rows, placement
):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    register_op_rule("row_means", "a -> ", reduce="avg", linear=True)

    def run():
        mesh = init_device_mesh(DEVICE, (2,))
        x = torch.arange(rows, dtype=DTYPE)
        found = torch.ops.hp_test.row_means(distribute_tensor(x, mesh, [Shard(0)]))
        torch.testing.assert_close(found.full_tensor(), x.mean())
        return found.placements

    with strict_rules():
        assert simulate(2).run(run) == [(placement,)] * 2


def test_an_op_with_a_rule_is_not_replaced_silently():
    with pytest.raises(RuleError, match="must have no rule yet"):
        register_op_rule(torch.add, "... -> ...")
