# SPDX-License-Identifier: Apache-2.0
"""Decisions of propagate: a table of rules and placements."""

from __future__ import annotations

import pytest

from hyper_parallel.core.factor import bind
from hyper_parallel.core.placement import Partial, Replicate, Shard
from hyper_parallel.core.propagate import Shift, choices, propagate
from hyper_parallel.core.rule import parse_rule
from hyper_parallel.errors import RuleError

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
AVG, MAX = Partial("avg"), Partial("max")

UNARY = (parse_rule("... -> ..."), [(8, 4)])
NEG = (parse_rule("... -> ...", linear=True), [(8, 4)])
ADD = (parse_rule("... + ... -> ...", linear=True), [(8, 4), (8, 4)])
ADD_SCALAR = (ADD[0], [(8, 4), None])
MUL = (parse_rule("..., ... -> ...", linear=True), [(8, 4), (8, 4)])
MUL_SCALAR = (MUL[0], [(8, 4), None])
LINEAR = (parse_rule("... k, n k + n -> ... n", linear=True), [(8, 4), (6, 4), (6,)])
EMBED = (parse_rule("..., v h -> ... h", index={"v": 0}, linear=(1,)), [(8,), (12, 4)])
MEAN = (parse_rule("a b -> a", reduce="avg", linear=True), [(8, 4)])
MEAN_ODD = (MEAN[0], [(8, 5)])
AMAX = (parse_rule("a b -> a", reduce="max"), [(8, 4)])
NORM = (parse_rule("... _, _ -> ... _"), [(8, 4), (4,)])
SOFTMAX = (parse_rule("a _ -> a _"), [(8, 4)])
GQA = (parse_rule("b (k g) s, b k s -> b (k g) s"), [(2, 8, 4), (2, 4, 4)])
ODD = (parse_rule("... -> ..."), [(5, 4)])


@pytest.mark.parametrize(
    ("rule", "given", "inputs", "output", "gradients"),
    [
        # unary
        (UNARY, [R], [R], R, [R]),
        (UNARY, [S1], [S1], S1, [S1]),
        (UNARY, [P], [R], R, [R]),
        (UNARY, [MAX], [R], R, [R]),
        (ODD, [S0], [S0], S0, [S0]),
        (NEG, [P], [P], P, [R]),
        (NEG, [AVG], [AVG], AVG, [R]),
        (NEG, [MAX], [R], R, [R]),
        # add: a replicated term is kept on the first rank; a shard is met by a reduce-scatter
        (ADD, [P, P], [P, P], P, [R, R]),
        (ADD, [P, R], [P, P], P, [R, R]),
        (ADD, [S0, P], [S0, S0], S0, [S0, S0]),
        (ADD, [P, S0], [S0, S0], S0, [S0, S0]),
        (ADD, [S0, R], [S0, S0], S0, [S0, S0]),
        (ADD, [S0, S1], [S0, S0], S0, [S0, S0]),
        (ADD_SCALAR, [P, None], [R, None], R, [R, None]),
        (ADD_SCALAR, [S0, None], [S0, None], S0, [S0, None]),
        # mul
        (MUL, [P, R], [P, R], P, [R, P]),
        (MUL, [AVG, R], [AVG, R], AVG, [R, AVG]),
        (MUL, [P, P], [P, R], P, [R, P]),
        (MUL_SCALAR, [P, None], [P, None], P, [R, None]),
        # linear: column, row, batch, pending
        (LINEAR, [R, R, R], [R, R, R], R, [R, R, R]),
        (LINEAR, [R, S0, S0], [R, S0, S0], S1, [P, S0, S0]),
        (LINEAR, [S1, S1, R], [S1, S1, P], P, [S1, S1, R]),
        (LINEAR, [S1, R, R], [S1, S1, P], P, [S1, S1, R]),
        (LINEAR, [S0, R, R], [S0, R, R], S0, [S0, P, P]),
        (LINEAR, [P, R, R], [P, R, P], P, [R, P, R]),
        # look-ups
        (EMBED, [R, S0], [R, S0], P, [P, S0]),
        (EMBED, [R, S1], [R, S1], S1, [P, S1]),
        (EMBED, [S0, R], [S0, R], S0, [S0, P]),
        # reductions
        (MEAN, [S1], [S1], AVG, [S1]),
        (MEAN, [P], [P], P, [R]),
        (AMAX, [S1], [S1], MAX, [S1]),
        # whole dims
        (NORM, [S0, R], [S0, R], S0, [S0, P]),
        (NORM, [S1, R], [S0, R], S0, [S0, P]),
        (SOFTMAX, [S1], [S0], S0, [S0]),
        # compound
        (GQA, [S1, S1], [S1, S1], S1, [S1, S1]),
        (GQA, [S1, R], [S1, S1], S1, [S1, S1]),
    ],
)
def test_propagate_one_axis(rule, given, inputs, output, gradients) -> None:
    def one(values):
        return tuple(None if p is None else (p,) for p in values)

    decision = propagate(bind(*rule), one(given), (2,))
    assert decision.inputs == one(inputs)
    assert decision.outputs == ((output,),)
    assert decision.gradients == one(gradients)


def test_propagate_mean_uneven_is_a_weighted_sum() -> None:
    decision = propagate(bind(*MEAN_ODD), [(S1,)], (2,))
    assert decision.inputs == ((S1,),)
    assert decision.outputs == ((Partial("sum"),),)
    assert len(decision.weights) == 1


def test_propagate_mean_divides_the_cotangent() -> None:
    assert propagate(bind(*MEAN), [(S1, S1)], (2, 2)).divisors == (4,)
    assert propagate(bind(*MEAN), [(S1, S0)], (2, 2)).divisors == (2,)
    assert propagate(bind(*MEAN), [(AVG,)], (2,)).divisors == (1,)


def test_propagate_empty_piece_of_a_maximum_is_not_cut() -> None:
    bound = bind(AMAX[0], [(8, 5)])
    assert propagate(bound, [(S1,)], (4,)).outputs == ((S0,),)
    assert propagate(bound, [(S1,)], (2,)).outputs == ((MAX,),)


def test_propagate_maximum_is_whole_when_a_gradient_is_needed() -> None:
    decision = propagate(bind(*AMAX), [(S1,)], (2,), needs_grad=True)
    assert decision.outputs == ((S0,),)


def test_propagate_embedding_shift() -> None:
    assert propagate(bind(*EMBED), [(R,), (S0,)], (2,)).shifts == (Shift(0, 1, 0),)
    assert propagate(bind(*EMBED), [(R,), (S1,)], (2,)).shifts == ()


def test_propagate_two_axes_nest() -> None:
    decision = propagate(bind(*LINEAR), [(S0, S1), (R, S1), (R, R)], (2, 2))
    assert decision.inputs == ((S0, S1), (R, S1), (R, P))
    assert decision.outputs == ((S0, P),)
    assert decision.gradients == ((S0, S1), (P, S1), (P, R))
    assert decision.why == "axis 0: cut ...0; axis 1: cut k"
    same = propagate(bind(*ODD), [(S0, S0)], (2, 2))
    assert same.inputs == same.outputs == ((S0, S0),)


def test_propagate_pending_reductions_that_do_not_commute_are_not_mixed() -> None:
    rule = parse_rule("a b c -> a", reduce="max")
    assert propagate(bind(rule, [(8, 4, 4)]), [(S1, S2)], (2, 2)).outputs == ((MAX, MAX),)
    mixed = propagate(bind(*MEAN), [(P, S1)], (2, 2))
    assert mixed.outputs == ((P, AVG),)


@pytest.mark.parametrize("sizes, kept", [((2, 8), S1), ((8, 2), S0), ((4, 4), S0)], ids=str)
def test_propagate_moves_the_operand_of_fewer_bytes(sizes, kept) -> None:
    decision = propagate(bind(*MUL), [(S0,), (S1,)], (2,), itemsizes=sizes)
    assert decision.inputs == ((kept,), (kept,))


def test_propagate_scatters_a_pending_sum_where_the_other_operand_is_cut() -> None:
    bound = bind(parse_rule("a b, a b -> a b"), [(8, 8), (8, 8)])
    assert propagate(bound, [(P,), (S1,)], (2,)).inputs == ((S1,), (S1,))


def test_propagate_compound_minor_is_never_cut() -> None:
    found = {decision.why for decision in choices(bind(*GQA), 2)}
    assert found == {"cut b", "cut k", "cut s", "replicate"}


def test_propagate_compound_that_does_not_divide_uses_blocks() -> None:
    bound = bind(parse_rule("a (h=3 d=4) -> a h d"), [(2, 12)])
    decision = propagate(bound, [(S1,)], (2,))
    assert decision.inputs == ((Shard(1, block=4),),)
    assert decision.outputs == ((S1,),)
    none = propagate(bound, [(S1,)], (4,))
    assert none.outputs == ((R,),), "three groups do not go round four ranks"


@pytest.mark.parametrize(
    ("given", "must"),
    [
        ([(R,)], "one entry per operand"),
        ([(R,), None], "both a shape and placements"),
        ([(R,), (R, R)], "must have 1 placements on dims of its shape"),
        ([(R,), (Shard(-1),)], "must have 1 placements on dims of its shape"),
    ],
)
def test_propagate_wrong_placements(given, must: str) -> None:
    with pytest.raises(RuleError, match=must):
        propagate(bind(*ADD), given, (2,))


def test_choices_of_a_linear_rule() -> None:
    found = [decision.why for decision in choices(bind(*LINEAR), 2)]
    assert found == [
        "cut ...0",
        "cut k",
        "cut n",
        *["pass P(sum)"] * 2,
        *["pass P(avg)"] * 2,
        "replicate",
    ]
