# SPDX-License-Identifier: Apache-2.0
"""Entries to autograd beside backward: hooks on several tensors, anomaly mode, wrong gradients."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from hyper_parallel import DTensor, Replicate, Shard, simulate
from hyper_parallel.errors import LayoutError
from support.device import DTYPE
from support.dtensors import laid, line, same, seeded


def leaf(seed=0):
    whole = seeded(4, 6, seed=seed)
    return laid(whole, line(2), Shard(0), requires_grad=True), whole.requires_grad_()


@simulate(2)
def test_a_hook_on_several_tensors_sees_the_gradient_of_each():
    (x, whole), (other, plain) = leaf(), leaf(seed=1)
    seen = []
    for a, b in ((x, other), (whole, plain)):
        middle = a * 2
        register_multi_grad_hook([middle, b], seen.append)
        (middle * b).sum().backward()
    for ours, wanted in zip(*seen, strict=True):
        same(ours, wanted)
    assert type(get_gradient_edge(x).node).__name__ == "AccumulateGrad"


@simulate(2)
def test_a_leaf_viewed_as_itself_is_a_view():
    x, whole = leaf()
    view = x.view_as(x)
    (view * view).sum().backward()
    same(x.grad, 2 * whole)
    with torch.no_grad():
        x.view_as(x).add_(1)
        same(x, whole + 1)


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("slope", [2.0, float("nan")])
def test_anomaly_mode_looks_at_gradients_between_moves(slope):
    @simulate(2)
    def run():
        x, whole = leaf()
        moved = (x * slope).redistribute(x.device_mesh, [Shard(1)])
        moved = moved.redistribute(x.device_mesh, [Replicate()])
        if slope == slope:
            (moved * moved).sum().backward()
            same(x.grad, 2 * slope**2 * whole)
        else:
            with pytest.raises(RuntimeError, match="'MulBackward0' returned nan values"):
                moved.sum().backward()

    with torch.autograd.detect_anomaly():  # a mode of the process, not of one rank
        run()


@simulate(2)
def test_gradients_that_do_not_fit_are_refused():
    x, _ = leaf()
    twice, wrong = x * 2, laid(seeded(6, 4), x.device_mesh, Shard(0))
    must = r"the gradient must be a DTensor of global shape \(4, 6\), but got grad="
    with pytest.raises(LayoutError, match="backward: " + must + r"'DTensor', shape=\(6, 4\)"):
        twice.backward(wrong)
    with pytest.raises(LayoutError, match="DTensor.grad: " + must):
        x.grad = 3
    with pytest.raises(RuntimeError, match="got 2 tensors and 1 gradients"):
        torch.autograd.backward([twice, twice], [wrong])
    with pytest.raises(RuntimeError, match="implicitly created only for real scalar outputs"):
        torch.view_as_complex(x.view(4, 3, 2)).sum().backward()


@simulate(2)
def test_a_number_to_the_power_of_each_of_a_list():
    x = laid(seeded(4, 6), line(2), Shard(0))
    two = torch.tensor(2.0, dtype=DTYPE)
    for result in (torch._foreach_pow(2.0, [x, two]), torch._foreach_pow(2, [x, two])):
        assert isinstance(result[0], DTensor)
        same(result[0], 2.0 ** seeded(4, 6))
        assert result[1] == 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_may_give_a_result_that_is_not_used(use_reentrant):
    @simulate(2)
    def run():
        x, whole = leaf()
        for a in (x, whole):
            used, _ = checkpoint(lambda h: (h * h, h.exp()), a, use_reentrant=use_reentrant)
            used.sum().backward()
        same(x.grad, whole.grad)

    run()
