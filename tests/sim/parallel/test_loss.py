# SPDX-License-Identifier: Apache-2.0
"""Losses of logits cut along the classes equal the dense ones, values and gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import (
    DTensor,
    LayoutError,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
    linear_cross_entropy,
    loss_parallel,
    simulate,
    vocab_parallel_cross_entropy,
)
from hyper_parallel.dtensor import dispatch
from support.device import DEVICE, DTYPE, TOLERANCE

CLASSES = 7  # uneven over 2 and 4 ranks: 4, 3 and 2, 2, 2, 1
ROWS = 6


def logits_and_target(kind, dtype=DTYPE, shape=(ROWS, CLASSES)):
    torch.manual_seed(0)
    logits = torch.randn(shape, dtype=dtype)
    dims = (shape[0], *shape[2:])
    if kind == "probabilities":
        target = torch.randn(shape, dtype=dtype).softmax(1)
    else:
        target = torch.randint(CLASSES, dims)
        target.view(-1)[1] = -100
        target.view(-1)[2] = 3
    return logits, target


def rank_target(target, mesh, rows, dim=0):
    """Place a target as the rows of logits with such placements are."""
    placements = [p if p.is_shard() and p.dim == dim else Replicate() for p in rows]
    return distribute_tensor(target, mesh, placements)


GRID = [
    {"reduction": reduction, "label_smoothing": smoothing, "weighted": weighted, **ignore}
    for reduction, smoothing, weighted, ignore in itertools.product(
        ("none", "sum", "mean"), (0.0, 0.3), (False, True), ({}, {"ignore_index": 3})
    )
]


@pytest.mark.parametrize("kind", ["classes", "probabilities"])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
@simulate(4)
def test_cross_entropy_equals_dense(shape, kind):
    mesh = init_device_mesh(DEVICE, shape)
    placements = [Shard(1)] if len(shape) == 1 else [Shard(0), Shard(1)]
    if mesh.get_coordinate() is None:
        return
    logits, target = logits_and_target(kind)
    weights = torch.rand(CLASSES, dtype=DTYPE) + 0.5
    for options in map(dict, GRID):
        if kind == "probabilities" and "ignore_index" in options:
            continue
        options["weight"] = weights if options.pop("weighted") else None
        if options.get("ignore_index") == 3:
            target = target.clamp(min=0)
        dense = logits.clone().requires_grad_()
        want = F.cross_entropy(dense, target, **options)
        want.square().sum().backward()
        cut = distribute_tensor(logits, mesh, placements).requires_grad_()
        given = rank_target(target, mesh, placements)
        if kind == "probabilities":
            given = distribute_tensor(target, mesh, placements)
        with loss_parallel():
            got = F.cross_entropy(cut, given, **options)
        got.square().sum().backward()
        torch.testing.assert_close(
            got.full_tensor(), want, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE]
        )
        torch.testing.assert_close(
            cut.grad.full_tensor(), dense.grad, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE]
        )
        assert cut.grad.placements == tuple(placements)


@pytest.mark.parametrize(
    "placements",
    [[Shard(1), Shard(1)], [Shard(2), Shard(1)], [Shard(1), Replicate()], [Shard(1), Partial()]],
    ids=str,
)
@simulate(4)
def test_classes_in_the_middle_on_two_axes(placements):
    mesh = init_device_mesh(DEVICE, (2, 2))
    logits, target = logits_and_target("classes", shape=(3, CLASSES, 5))
    dense = logits.clone().requires_grad_()
    want = F.cross_entropy(dense, target, label_smoothing=0.1)
    want.backward()
    whole = distribute_tensor(logits, mesh, [Replicate()] * 2).requires_grad_()
    rows = [Shard(p.dim - 1) if p.is_shard() and p.dim == 2 else Replicate() for p in placements]
    with loss_parallel():
        got = F.cross_entropy(
            whole.redistribute(mesh, placements),
            distribute_tensor(target, mesh, rows),
            label_smoothing=0.1,
        )
    got.backward()
    assert got.placements == (Replicate(), Replicate())
    torch.testing.assert_close(got.to_local(), want, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE])
    torch.testing.assert_close(
        whole.grad.full_tensor(), dense.grad, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE]
    )


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@simulate(4)
def test_log_softmax_its_consumers_and_nll_loss_equal_dense(reduction):
    mesh = init_device_mesh(DEVICE, (2, 2))
    placements = [Shard(0), Shard(1)]
    logits, target = logits_and_target("classes", shape=(5, CLASSES))
    weight = torch.rand(CLASSES, dtype=DTYPE)
    other = torch.randn(5, CLASSES, dtype=DTYPE)

    def losses(x, target, weight, other):
        log_probs = F.log_softmax(x, -1)
        nll = F.nll_loss(log_probs, target, weight, reduction=reduction).square().sum()
        entropy = -(log_probs.exp() * log_probs).sum()
        return nll + entropy + (log_probs * other).sum() + (x.softmax(dim=1) * other).square().sum()

    dense = logits.clone().requires_grad_()
    want = losses(dense, target, weight, other)
    want.backward()
    cut = distribute_tensor(logits, mesh, placements).requires_grad_()
    with loss_parallel():
        got = losses(
            cut,
            rank_target(target, mesh, placements),
            distribute_tensor(weight, mesh, [Replicate()] * 2),
            distribute_tensor(other, mesh, placements),
        )
    got.backward()
    torch.testing.assert_close(
        got.full_tensor(), want, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE]
    )
    torch.testing.assert_close(
        cut.grad.full_tensor(), dense.grad, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE]
    )


@simulate(2)
def test_probability_targets_get_a_gradient():
    mesh = init_device_mesh(DEVICE, (2,))
    logits, target = logits_and_target("probabilities")
    dense = target.clone().requires_grad_()
    F.cross_entropy(logits, dense, label_smoothing=0.2).backward()
    cut = distribute_tensor(target, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        F.cross_entropy(
            distribute_tensor(logits, mesh, [Shard(1)]), cut, label_smoothing=0.2
        ).backward()
    torch.testing.assert_close(
        cut.grad.full_tensor(), dense.grad, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE]
    )


@simulate(4)
def test_one_row_and_fewer_classes_than_ranks():
    mesh = init_device_mesh(DEVICE, (4,))
    logits = torch.tensor([0.5, -1.0, 2.0], dtype=DTYPE)
    dense = logits.clone().requires_grad_()
    want = F.cross_entropy(dense, torch.tensor(2))
    want.backward()
    cut = distribute_tensor(logits, mesh, [Shard(0)]).requires_grad_()
    with loss_parallel():
        got = torch.nn.CrossEntropyLoss()(cut, torch.tensor(2))
    got.backward(retain_graph=True)
    got.backward()
    torch.testing.assert_close(got.to_local(), want, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE])
    torch.testing.assert_close(
        cut.grad.full_tensor(), 2 * dense.grad, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@simulate(2)
def test_low_precision_is_as_good_as_dense(dtype):
    mesh = init_device_mesh(DEVICE, (2,))
    logits, target = logits_and_target("classes", dtype)
    dense = logits.clone().requires_grad_()
    want = F.cross_entropy(dense, target)
    want.backward()
    cut = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        got = F.cross_entropy(cut, target)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert F.cross_entropy(cut, target).dtype == torch.float32
    got.backward()
    assert got.dtype == want.dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(got.to_local(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cut.grad.full_tensor(), dense.grad, rtol=tolerance, atol=tolerance)


@simulate(2)
def test_the_context_ends_with_its_block_and_nests():
    mesh = init_device_mesh(DEVICE, (2,))
    logits, target = logits_and_target("classes")
    cut = distribute_tensor(logits, mesh, [Shard(1)])
    outside = dict(dispatch._served.get())
    assert "log_softmax" not in outside
    with pytest.raises(ZeroDivisionError), loss_parallel():
        with loss_parallel():
            pass
        assert cut.log_softmax(-1).placements == (Shard(1),)
        assert "log_softmax" in dispatch._served.get()
        raise ZeroDivisionError
    assert dict(dispatch._served.get()) == outside
    with loss_parallel():  # cut along the batch: served as always
        rows = distribute_tensor(logits, mesh, [Shard(0)])
        loss = F.cross_entropy(rows, distribute_tensor(target, mesh, [Shard(0)]))
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(logits, target))


@simulate(2)
def test_refusals():
    mesh = init_device_mesh(DEVICE, (2,))
    logits, target = logits_and_target("classes")
    cut = distribute_tensor(logits, mesh, [Shard(1)])
    with loss_parallel():
        with pytest.raises(IndexError, match="every target must be a class or ignore_index"):
            F.cross_entropy(cut, torch.full((ROWS,), CLASSES))
        with pytest.raises(IndexError, match="every target must be a class or ignore_index"):
            F.nll_loss(cut, torch.full((ROWS,), -1))
        with pytest.raises(LayoutError, match=r"target must have the global shape \(6,\)"):
            F.cross_entropy(cut, target[1:])
        with pytest.raises(LayoutError, match="reduction must be 'none', 'mean' or 'sum'"):
            F.cross_entropy(cut, target, reduction="total")
        with pytest.raises(LayoutError, match="label_smoothing must be between 0 and 1"):
            F.cross_entropy(cut, target, label_smoothing=2.0)
        with pytest.raises(LayoutError, match="weight must have 7 entries"):
            F.cross_entropy(cut, target, torch.ones(2))
    with pytest.raises(LayoutError, match="logits must be plain"):
        vocab_parallel_cross_entropy(cut, target, device_mesh=mesh)
    with pytest.raises(LayoutError, match=r"this rank must hold \d of 8 classes"):
        vocab_parallel_cross_entropy(torch.zeros(2, 3), target[:2], device_mesh=mesh, vocab_size=8)


@simulate(4)
def test_a_plain_target_of_a_cut_batch_is_refused():
    mesh = init_device_mesh(DEVICE, (2, 2))
    logits, target = logits_and_target("classes")
    cut = distribute_tensor(logits, mesh, [Shard(0), Shard(1)])
    match = "a target must be a DTensor where an axis cuts the batch"
    with loss_parallel(), pytest.raises(LayoutError, match=match):
        F.cross_entropy(cut, target)
    with loss_parallel(), implicit_replication():
        loss = F.cross_entropy(cut, target)
    torch.testing.assert_close(loss.to_local(), F.cross_entropy(logits, target))


@pytest.mark.parametrize("vocab_size", [None, CLASSES])
@simulate(2)
def test_plain_local_logits(vocab_size):
    mesh = init_device_mesh(DEVICE, (2,))
    torch.manual_seed(0)
    logits = torch.randn(2, 3, CLASSES, dtype=DTYPE)
    target = torch.randint(CLASSES, (2, 3))
    dense = logits.clone().requires_grad_()
    want = F.cross_entropy(dense.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    want.backward()
    own = logits.split([4, 3], -1)[mesh.get_local_rank()].clone().requires_grad_()
    got = vocab_parallel_cross_entropy(
        own, target, device_mesh=mesh, vocab_size=vocab_size, label_smoothing=0.1
    )
    got.backward()
    torch.testing.assert_close(got, want, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE])
    mine = dense.grad.split([4, 3], -1)[mesh.get_local_rank()]
    torch.testing.assert_close(own.grad, mine, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE])


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "dtensor"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@simulate(4)
def test_linear_cross_entropy_equals_dense(reduction, plain):
    shape = (4,) if plain else (2, 2)
    mesh = init_device_mesh(DEVICE, shape)
    torch.manual_seed(0)
    x, w = torch.randn(3, 5, 6, dtype=DTYPE), torch.randn(CLASSES, 6, dtype=DTYPE)
    b, target = torch.randn(CLASSES, dtype=DTYPE), torch.randint(CLASSES, (3, 5))
    target[0, 0] = -100
    options = {"reduction": reduction, "label_smoothing": 0.2}
    dense = [t.clone().requires_grad_() for t in (x, w, b)]
    want = F.cross_entropy(F.linear(*dense).flatten(0, 1), target.flatten(), **options)
    want.square().sum().backward()
    across = [Replicate()] * (len(shape) - 1)
    cut = [distribute_tensor(t, mesh, [*across, Shard(0)]).requires_grad_() for t in (w, b)]
    given = x.clone().requires_grad_()
    if not plain:
        given = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
        target = distribute_tensor(target, mesh, [Shard(0), Replicate()])
    got = linear_cross_entropy(given, cut[0], target, linear_bias=cut[1], chunk_size=4, **options)
    got.square().sum().backward()
    assert isinstance(got, DTensor) is not plain
    whole = got if plain else got.full_tensor()
    torch.testing.assert_close(
        whole.reshape(want.shape), want, rtol=TOLERANCE[DTYPE], atol=TOLERANCE[DTYPE]
    )
    for one, other in zip([given, *cut], dense, strict=True):
        grad = one.grad.full_tensor() if isinstance(one, DTensor) else one.grad
        tolerance = TOLERANCE[DTYPE]
        largest = other.grad.abs().max().item()
        torch.testing.assert_close(grad, other.grad, rtol=tolerance, atol=tolerance * largest)


@simulate(2)
def test_linear_cross_entropy_refuses():
    mesh = init_device_mesh(DEVICE, (2,))
    head = distribute_tensor(torch.zeros(4, 8), mesh, [Shard(0)])
    x, target = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(LayoutError, match="linear_weight must be a DTensor"):
        linear_cross_entropy(x, torch.zeros(4, 8), target)
    with pytest.raises(LayoutError, match="linear_bias must lie as linear_weight's classes do"):
        bias = distribute_tensor(torch.zeros(4), mesh, [Replicate()])
        linear_cross_entropy(x, head, target, linear_bias=bias)
    with pytest.raises(LayoutError, match="chunk_size must be positive"):
        linear_cross_entropy(x, head, target, chunk_size=0)
    with pytest.raises(IndexError, match="every target must be a class or ignore_index"):
        linear_cross_entropy(x, head, target + 4)
