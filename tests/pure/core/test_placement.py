# SPDX-License-Identifier: Apache-2.0
"""Placements: values with torch's questions, and what they refuse."""

import pickle

import pytest

from hyper_parallel.core import Partial, Placement, Replicate, Shard, cotangent
from hyper_parallel.core.placement import REDUCE_OPS, normalize
from hyper_parallel.errors import LayoutError

EVERY = [Replicate(), Shard(0), Shard(1), Shard(1, block=2), *map(Partial, REDUCE_OPS)]


def test_placements_are_equal_by_value():
    assert len(set(EVERY)) == len(EVERY)
    assert Shard(1) == Shard(dim=1, block=1) and hash(Shard(1)) == hash(Shard(1, 1))
    assert Partial() == Partial("sum") != Partial("avg")
    assert Replicate() != Shard(0) != Partial()


@pytest.mark.parametrize("placement", EVERY, ids=repr)
def test_placements_are_frozen_and_survive_pickling(placement):
    assert pickle.loads(pickle.dumps(placement)) == placement
    with pytest.raises((AttributeError, TypeError)):
        placement.dim = 3


def test_repr_is_what_one_writes_on_a_board():
    assert repr(EVERY) == (
        "[R, S(0), S(1), S(1, block=2), P(sum), P(avg), P(max), P(min), P(product)]"
    )


@pytest.mark.parametrize("placement", EVERY, ids=repr)
def test_is_questions_name_exactly_one_kind(placement):
    kinds = [placement.is_replicate(), placement.is_shard(), placement.is_partial()]
    assert kinds.count(True) == 1
    assert isinstance(placement, Placement)


def test_is_shard_and_is_partial_take_what_to_look_for():
    assert Shard(1).is_shard(1) and not Shard(1).is_shard(0)
    assert Partial("max").is_partial("max") and not Partial("max").is_partial("sum")
    assert not Replicate().is_shard(0) and not Shard(0).is_partial("sum")


def test_cotangent_turns_partial_into_replicate():
    placements = (Shard(0), Partial("avg"), Replicate(), Shard(1, block=2))
    assert cotangent(placements) == (Shard(0), Replicate(), Replicate(), Shard(1, block=2))


def test_normalize_counts_negative_dims_from_the_end():
    given = [Shard(-1, block=4), Shard(-3), Shard(2), Replicate()]
    assert normalize(given, 3, where="f") == (Shard(2, block=4), Shard(0), Shard(2), Replicate())


def refuse(text):
    return pytest.raises(LayoutError, match=text)


@pytest.mark.parametrize("dim", [3, -4])
def test_normalize_refuses_a_dim_out_of_range(dim):
    with refuse(rf"f: Shard dim must be in \[-3, 3\) for a tensor of 3 dims, but got dim={dim}"):
        normalize([Shard(dim)], 3, where="f")


@pytest.mark.parametrize("dim", [0, -1])
def test_normalize_refuses_to_shard_a_tensor_without_dims(dim):
    with refuse(r"f: a tensor of 0 dims must be Replicate or Partial, but got placement=S\("):
        normalize([Shard(dim)], 0, where="f")


def test_normalize_refuses_what_is_no_placement():
    with refuse(
        "must be a Replicate, Shard, StridedShard, Packed or Partial, but got placement='S'"
    ):
        normalize("S", 1, where="f")


@pytest.mark.parametrize("dim", ["0", 0.0, True, None], ids=repr)
def test_shard_refuses_a_dim_that_is_no_int(dim):
    with refuse("Shard: dim must be an int, but got dim="):
        Shard(dim)


@pytest.mark.parametrize("block", [0, -2, 1.5, None, True], ids=repr)
def test_shard_refuses_a_block_that_is_no_positive_int(block):
    with refuse("Shard: block must be an int of at least 1, but got block="):
        Shard(0, block=block)


@pytest.mark.parametrize("op", ["SUM", "mean", "", None], ids=repr)
def test_partial_refuses_an_unknown_op(op):
    with refuse(r"Partial: reduce_op must be one of sum, avg, max, min, product, but got reduce_"):
        Partial(op)
