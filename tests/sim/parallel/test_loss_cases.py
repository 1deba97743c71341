# SPDX-License-Identifier: Apache-2.0
"""Losses of cut classes in hard cases: nothing to count, few classes, low precision, modes."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    HyperParallelError,
    LayoutError,
    Replicate,
    Shard,
    init_device_mesh,
    linear_cross_entropy,
    loss_parallel,
    simulate,
    vocab_parallel_cross_entropy,
)
from support.device import DEVICE, DTYPE, TOLERANCE
from support.dtensors import laid, line, seeded

CLASSES = 7
ROWS = 6


def logits_and_target():
    return seeded(ROWS, CLASSES), torch.tensor([6, -100, 3, 0, 3, 5])


def three_losses(kind, x, w, target, **options):
    """Give one loss of cut logits in one of the three ways, of x [N, H] and a cut head w."""
    if kind == "linear":
        return linear_cross_entropy(x, w, target, **options).to_local()
    logits = x @ w.t()
    with loss_parallel():
        if kind == "nll":
            return F.nll_loss(logits.log_softmax(-1), target, **options).to_local()
        return F.cross_entropy(logits, target, **options).to_local()


KINDS = pytest.mark.parametrize("kind", ["cross_entropy", "nll", "linear"])


def compare_three(kind, mesh, target, *, classes=CLASSES, **options):
    """Check loss and gradients of one way against the dense ones."""
    x, w = seeded(len(target), 5), seeded(classes, 5, seed=1)
    dense = [t.clone().requires_grad_() for t in (x, w)]
    want = F.cross_entropy(dense[0] @ dense[1].T, target, **options)
    want.backward()
    cut = [laid(x, mesh, Replicate(), requires_grad=True), laid(w, mesh, Shard(0))]
    cut[1].requires_grad_()
    got = three_losses(kind, *cut, target, **options)
    got.backward()
    close = partial(
        torch.testing.assert_close, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE], equal_nan=True
    )
    close(got, want)
    for ours, theirs in zip(cut, dense, strict=True):
        close(ours.grad.full_tensor(), theirs.grad)


@KINDS
@simulate(2)
def test_where_all_targets_are_ignored_the_mean_is_nan_and_gradients_are_zero(kind):
    compare_three(kind, line(2), torch.full((4,), -100))


@KINDS
@simulate(4)
def test_some_ranks_hold_no_class(kind):
    compare_three(kind, line(4), torch.tensor([2, -100, 0]), classes=3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@KINDS
@simulate(2)
def test_targets_of_any_integer_dtype(kind, dtype):
    mesh, target = line(2), torch.tensor([6, 0, 5, 3])
    x, w = laid(seeded(4, 5), mesh, Replicate()), laid(seeded(CLASSES, 5), mesh, Shard(0))
    got = three_losses(kind, x, w, target.to(dtype), ignore_index=5)
    want = three_losses(kind, x, w, target, ignore_index=5)
    assert torch.equal(got, want)


@simulate(2)
def test_infinite_log_probabilities_of_ignored_rows_do_not_count():
    mesh, target = line(2), torch.tensor([1, -100])
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-torch.inf, 0.0, -torch.inf]])
    with loss_parallel():
        got = F.nll_loss(laid(log_probs, mesh, Shard(1)), target)
    assert got.to_local() == F.nll_loss(log_probs, target) == 2


@pytest.mark.parametrize("placements", [[Shard(1), Shard(1)], [Replicate(), Replicate()]], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 1)], ids=str)
@simulate(2)
def test_plain_targets_and_weights_where_one_rank_has_all_classes(shape, placements):
    mesh = init_device_mesh(DEVICE, shape)
    if mesh.get_coordinate() is None:
        return
    logits, target = logits_and_target()
    weight = seeded(CLASSES).abs()
    with loss_parallel():
        loss = F.cross_entropy(laid(logits, mesh, *placements), target, weight)
    torch.testing.assert_close(loss.to_local(), F.cross_entropy(logits, target, weight))


@simulate(2)
def test_softmax_in_bfloat16_is_as_good_as_dense():
    mesh, x = line(2), (4 * seeded(64, 70)).bfloat16()
    with loss_parallel():
        got = laid(x, mesh, Shard(1)).softmax(1)
        with pytest.raises(IndexError, match="Dimension out of range"):
            laid(x, mesh, Shard(1)).softmax(3)
    assert got.dtype == torch.bfloat16 and got.placements == (Shard(1),)
    torch.testing.assert_close(got.full_tensor(), x.softmax(1), rtol=1 / 128, atol=0)


@simulate(2)
def test_under_autocast_sums_are_exact_and_a_head_in_float32_trains():
    mesh, target = line(2), torch.arange(6)
    logits = (5 * seeded(6, 70)).float()
    want = F.cross_entropy(logits, target, label_smoothing=0.5)
    x = seeded(6, 8).bfloat16().requires_grad_()
    head = laid(seeded(CLASSES, 8).float(), mesh, Shard(0), requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        with loss_parallel():
            cut = laid(logits, mesh, Shard(1))
            got = F.cross_entropy(cut, target, label_smoothing=0.5)
        loss = linear_cross_entropy(x, head, target)
    torch.testing.assert_close(got.to_local(), want)
    loss.backward()
    dense = [x.detach().clone().requires_grad_(), head.detach().full_tensor().requires_grad_()]
    with torch.autocast(DEVICE, torch.bfloat16):
        F.cross_entropy(F.linear(*dense), target).backward()
    for ours, theirs in zip((x.grad, head.grad.full_tensor()), dense, strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-2, atol=1e-2)


@simulate(2)
def test_probabilities_are_freed_by_backward_and_must_not_change_before():
    mesh, (logits, _) = line(2), logits_and_target()
    target = seeded(ROWS, CLASSES, seed=1).softmax(1)
    own = laid(logits, mesh, Shard(1)).to_local().requires_grad_()
    p = laid(target, mesh, Shard(1)).to_local().clone()
    alive = weakref.ref(p)
    loss = vocab_parallel_cross_entropy(own, p, device_mesh=mesh)
    del p
    assert alive() is not None
    loss.backward()
    assert alive() is None
    p = laid(target, mesh, Shard(1)).to_local()
    loss = vocab_parallel_cross_entropy(own, p, device_mesh=mesh)
    p.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
@simulate(2)
def test_checkpointed_losses_enter_the_context_themselves(reentrant):
    mesh, (logits, target) = line(2), logits_and_target()
    cut = laid(logits, mesh, Shard(1), requires_grad=True)

    def loss(x):
        with loss_parallel():
            return F.cross_entropy(x * 1, target)

    checkpoint(loss, cut, use_reentrant=reentrant).backward()
    dense = logits.clone().requires_grad_()
    F.cross_entropy(dense, target).backward()
    torch.testing.assert_close(
        cut.grad.full_tensor(), dense.grad, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE]
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@KINDS
@simulate(2)
def test_without_gradients(kind, mode):
    mesh, target = line(2), torch.tensor([6, 0, -100, 3])
    x, w = seeded(4, 5), seeded(CLASSES, 5)
    with mode():
        got = three_losses(kind, laid(x, mesh, Replicate()), laid(w, mesh, Shard(0)), target)
    torch.testing.assert_close(
        got, F.cross_entropy(x @ w.T, target), rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE]
    )


@KINDS
@simulate(2)
def test_second_derivatives_are_refused(kind):
    mesh = line(2)
    x, w = laid(seeded(4, 5), mesh, Replicate()), laid(seeded(CLASSES, 5), mesh, Shard(0))
    loss = three_losses(kind, x, w.requires_grad_(), torch.arange(4))
    with pytest.raises(HyperParallelError, match="backward must run without create_graph"):
        torch.autograd.grad(loss, w, create_graph=True)


@simulate(2)
def test_operands_of_a_wrong_kind_are_refused():
    mesh = line(2)
    logits, target = logits_and_target()
    cut, weight = laid(logits, mesh, Shard(1)), seeded(CLASSES).requires_grad_()
    with loss_parallel():
        with pytest.raises(LayoutError, match="loss_parallel: weight must not need a gradient"):
            F.cross_entropy(cut, target, weight)
        with pytest.raises(LayoutError, match=r"target must be integer .* dtype=torch\.bool"):
            F.cross_entropy(cut, target > 0)
        with pytest.raises(LayoutError, match="loss_parallel: the tensor must be a torch"):
            F.cross_entropy(cut, target.tolist())
        with pytest.raises(LayoutError, match="logits must be floating"):
            F.cross_entropy(cut.long(), target)
        with pytest.raises(IndexError, match=r"but got target=\[9\], classes=7"):
            F.cross_entropy(cut, torch.full((ROWS,), 9))
    whole = logits.softmax(1)
    match = r"vocab_parallel_cross_entropy: probabilities must be plain and of the logits' shape"
    with pytest.raises(LayoutError, match=match):
        vocab_parallel_cross_entropy(cut.to_local(), whole, device_mesh=mesh)
    head = laid(seeded(CLASSES, 5), mesh, Shard(0))
    with pytest.raises(LayoutError, match="linear_cross_entropy: target must be integer classes"):
        linear_cross_entropy(seeded(ROWS, 5), head, whole)
    match = r"input must be \[..., H\] and linear_weight \[V, H\]"
    with pytest.raises(LayoutError, match=match):
        linear_cross_entropy(seeded(ROWS, 4), head, target)
    with pytest.raises(LayoutError, match=match):
        linear_cross_entropy(seeded(ROWS, 5), laid(seeded(5), mesh, Shard(0)), target)
    match = r"linear_cross_entropy: target must have the global shape \(6,\)"
    with pytest.raises(LayoutError, match=match):
        linear_cross_entropy(seeded(ROWS, 5), head, target[1:])
