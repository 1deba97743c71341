# SPDX-License-Identifier: Apache-2.0
"""What is not linear is done on the value of a pending reduction, never on its contributions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import DTensor, Partial, Shard, distribute_tensor, simulate
from support.dtensors import line, same

PARTS = (torch.tensor([-1.0, 3, 4]), torch.tensor([2.0, -5, -4]))
WHOLE = torch.tensor([1.0, -2, 0])


def pending(reduce_op="sum"):
    mesh = line(2)
    part = PARTS[mesh.get_local_rank()] * (2 if reduce_op == "avg" else 1)
    return DTensor.from_local(part.clone(), mesh, [Partial(reduce_op)])


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (abs, [1, 2, 0]),
        (torch.relu, [1, 0, 0]),
        (lambda p: p.max(), 1),
        (lambda p: p.max(0).indices, 0),
        (torch.norm, 5**0.5),
        (lambda p: p == 0, [False, False, True]),
        (lambda p: p.bool().any(), True),
        (torch.exp, WHOLE.exp().tolist()),
        (lambda p: p.softmax(0), WHOLE.softmax(0).tolist()),
        (lambda p: F.rms_norm(p, (3,)), F.rms_norm(WHOLE, (3,)).tolist()),
        (lambda p: p + 1, [2, -1, 1]),
        (lambda p: p * p, [1, 4, 0]),
        (lambda p: p.to(torch.int64), [1, -2, 0]),
        (lambda p: p.half().float(), [1, -2, 0]),
        (lambda p: p.argsort(), [1, 2, 0]),
        (lambda p: torch.where(p > 0, p, 7), [1, 7, 7]),
        (lambda p: F.pad(p, (0, 1), value=3), [1, -2, 0, 3]),
        (lambda p: p[[0, 0]], [1, 1]),
        (lambda p: p.clone().clamp_(max=0.5), [0.5, -2, 0]),
        (lambda p: 3 * p.flip(0).cumsum(0) - p, [-1, -4, -3]),
    ],
)
@simulate(2)
def test_on_a_pending_reduction(op, expected, reduce_op):
    found = op(pending(reduce_op)).full_tensor()
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype))


@simulate(2)
def test_what_is_linear_leaves_it_pending():
    p = pending()
    assert (3 * p.flip(0).cumsum(0) - p).placements == (Partial(),)
    assert p.unsqueeze(0).expand(4, 3).placements == (Partial(),)
    assert p.double().placements == (Partial(),)
    assert not p.half().placements[0].is_partial()  # a sum of rounded parts is another one
    assert F.pad(p, (1, 1)).placements == (Partial(),)


@pytest.mark.filterwarnings("ignore:DTensor op")
@simulate(2)
def test_a_write_through_a_slice_is_not_lost():
    w = distribute_tensor(torch.ones(8, 8), line(2), [Shard(0)])
    torch.nn.init.zeros_(w[:, :2])
    same(w.sum(), torch.tensor(48.0))
    w.fill_(1)
    w[:2] = 0
    same(w.sum(), torch.tensor(48.0))
    with pytest.raises(ValueError, match="must not be a view that was gathered"):
        torch.nn.init.zeros_(w[:2])
