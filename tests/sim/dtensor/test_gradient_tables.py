# SPDX-License-Identifier: Apache-2.0
"""Rows of the gradient tables: from_local, to_local and full_tensor, with and without placements.

The global gradient is always [1, 2, 3, 4], on two ranks; a row says how it arrives and how it must
leave. What the moves between do is tested in test_moves.py.
"""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, simulate
from hyper_parallel.core import Packed, StridedShard
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import current_rank
from support.device import DTYPE
from support.dtensors import laid, line, same

R, S, P, AVG, MAX, MIN = (
    Replicate(),
    Shard(0),
    Partial(),
    Partial("avg"),
    Partial("max"),
    Partial("min"),
)
PRODUCT, STRIDED, PACKED = Partial("product"), StridedShard(0, 2), Packed(0, (2, 2))
WHOLE = [1.0, 2.0, 3.0, 4.0]
# The global gradient as the two ranks hold it.
HELD = {
    R: (WHOLE, WHOLE),
    S: (WHOLE[:2], WHOLE[2:]),
    STRIDED: ([1.0, 3.0], [2.0, 4.0]),
    PACKED: ([1.0, 3.0], [2.0, 4.0]),
    P: ([1.0, 0.0, 3.0, 1.0], [0.0, 2.0, 0.0, 3.0]),
}
FIRST = (WHOLE, [0.0] * 4)  # the canonical image of R -> P
HALF = ([0.5, 1.0, 1.5, 2.0],) * 2
LOCALS = ([0.0, 2.0, 5.0, 1.0], [3.0, 2.0, 4.0, 1.0])  # of a pending max, min or product
OF_MAX = ([0.0, 1.0, 3.0, 2.0], [1.0, 1.0, 0.0, 2.0])  # ties share
OF_MIN = ([1.0, 1.0, 0.0, 2.0], [0.0, 1.0, 3.0, 2.0])
OF_PRODUCT = ([3.0, 4.0, 12.0, 4.0], [0.0, 4.0, 15.0, 4.0])  # times the other contribution

# placement, grad_placements, how the gradient arrives, the local gradient by rank
FROM_LOCAL = [
    (S, None, S, HELD[S]),
    (S, None, STRIDED, HELD[S]),
    (STRIDED, None, STRIDED, HELD[STRIDED]),
    (STRIDED, None, S, HELD[STRIDED]),
    (PACKED, None, PACKED, HELD[PACKED]),
    (R, None, R, HELD[R]),
    (R, None, P, HELD[R]),
    (P, None, R, HELD[R]),
    (P, None, P, HELD[R]),
    (AVG, None, R, HALF),
    (AVG, None, P, HALF),
    (MAX, None, R, OF_MAX),
    (MAX, None, P, OF_MAX),
    (MIN, None, R, OF_MIN),
    (PRODUCT, None, R, OF_PRODUCT),
    (PRODUCT, None, P, OF_PRODUCT),
    (R, R, P, HELD[R]),
    (R, P, R, FIRST),
    (R, P, P, HELD[P]),
    (P, R, P, HELD[R]),
    (P, P, P, HELD[P]),
    (AVG, R, R, HELD[R]),  # as stated, so not divided
    (MAX, R, P, HELD[R]),  # as stated, so not masked
    (S, STRIDED, S, HELD[STRIDED]),
]


@pytest.mark.parametrize(("placement", "wanted", "arrives", "leaves"), FROM_LOCAL, ids=str)
def test_from_local_gives_the_local_gradient(placement, wanted, arrives, leaves):
    @simulate(2)
    def run():
        values = LOCALS[current_rank()] if placement.is_partial() else HELD[placement][0]
        local = torch.tensor(values, requires_grad=True)
        asked = None if wanted is None else [wanted]
        x = DTensor.from_local(local, line(2), [placement], grad_placements=asked)
        handed = x.to_local(grad_placements=[arrives])
        handed.backward(torch.tensor(HELD[arrives][current_rank()]))
        assert local.grad.tolist() == leaves[current_rank()]

    run()


# placement, grad_placements, the local cotangents by rank, the global gradient
TO_LOCAL = [
    (S, None, HELD[S], WHOLE),
    (STRIDED, None, HELD[STRIDED], WHOLE),
    (PACKED, None, HELD[PACKED], WHOLE),
    (R, None, HELD[R], WHOLE),
    (P, None, HELD[R], WHOLE),
    (AVG, None, HALF, WHOLE),  # times n: the inverse of from_local's division
    (R, P, HELD[P], WHOLE),
    (R, R, HELD[R], WHOLE),
    (P, P, HELD[P], WHOLE),
    (P, R, HELD[R], WHOLE),
    (AVG, R, HELD[R], WHOLE),
    (MAX, R, HELD[R], WHOLE),
    (MIN, P, HELD[P], WHOLE),
    (PRODUCT, R, HELD[R], WHOLE),
    (S, STRIDED, HELD[STRIDED], WHOLE),
]


@pytest.mark.parametrize(("placement", "given", "cotangents", "whole"), TO_LOCAL, ids=str)
def test_to_local_takes_the_local_cotangents(placement, given, cotangents, whole):
    @simulate(2)
    def run():
        x = laid(torch.ones(4), line(2), placement, requires_grad=True)
        for between in (
            x,
            x.redistribute(x.device_mesh, [placement], backward_dtype=DTYPE),
        ):
            check(x, between)

    def check(x, between):
        x.grad = None
        local = between.to_local(grad_placements=None if given is None else [given])
        local.backward(torch.tensor(cotangents[current_rank()]))
        same(x.grad, torch.tensor(whole))
        assert x.grad.layout == x.layout.cotangent

    run()


# placement, grad_placements, the local cotangents by rank, the gradient by rank
FULL_TENSOR = [
    (S, None, HELD[R], HELD[S]),
    (S, P, HELD[P], HELD[S]),
    (STRIDED, None, HELD[R], HELD[STRIDED]),
    (STRIDED, P, HELD[P], HELD[STRIDED]),
    (PACKED, P, HELD[P], HELD[PACKED]),
    (R, None, HELD[R], HELD[R]),
    (R, P, HELD[P], HELD[R]),
    (P, None, HELD[R], HELD[R]),
    (P, P, HELD[P], HELD[R]),
    (AVG, None, HELD[R], HELD[R]),
    (AVG, P, HELD[P], HELD[R]),
    (MAX, P, HELD[P], HELD[R]),
]


@pytest.mark.parametrize(("placement", "given", "cotangents", "leaves"), FULL_TENSOR, ids=str)
def test_full_tensor_takes_the_cotangents_of_the_whole(placement, given, cotangents, leaves):
    @simulate(2)
    def run():
        x = laid(torch.ones(4), line(2), placement, requires_grad=True)
        whole = x.full_tensor(grad_placements=None if given is None else [given])
        whole.backward(torch.tensor(cotangents[current_rank()]))
        assert x.grad.to_local().tolist() == leaves[current_rank()]
        assert x.grad.layout == x.layout.cotangent

    run()


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_to_local_refuses_a_pending_extreme_that_needs_a_gradient(op):
    @simulate(2)
    def run():
        tensor = laid(torch.ones(4), line(2), Partial(op), requires_grad=True)
        with pytest.raises(LayoutError, match=r"DTensor.to_local: a pending max, min or product"):
            tensor.to_local()
        with torch.no_grad():
            assert tensor.to_local().shape == (4,)

    run()
