# SPDX-License-Identifier: Apache-2.0
"""DTensors in autograd: graphs kept and dropped, hooks, losses, checkpoint, refusals."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hyper_parallel import DTensor, Partial, Replicate, Shard, simulate
from hyper_parallel.errors import HyperParallelError, LayoutError
from support.dtensors import laid, line, same, seeded


def leaf(placement=None, *, seed=0):
    mesh = line(2)
    whole = seeded(4, 6, seed=seed)
    placed = laid(whole, mesh, placement or Shard(0), requires_grad=True)
    return placed, whole.requires_grad_(), mesh


@simulate(2)
def test_backward_twice_with_retain_graph():
    x, whole, _ = leaf()
    loss = (x * x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    same(x.grad, 4 * whole)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@simulate(2)
def test_grad_twice_with_retain_graph():
    x, whole, _ = leaf()
    loss = (x * x).sum()
    for _ in range(2):
        same(torch.autograd.grad(loss, x, retain_graph=True)[0], 2 * whole)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_second_derivatives_equal_one_process(placement):
    """A gradient penalty: cut and replicated weights, pending sums in both passes."""

    @simulate(2)
    def run():
        mesh = line(2)
        wholes = [seeded(4, 6), seeded(8, 6, seed=1), seeded(8, seed=2), seeded(5, 8, seed=3)]
        placements = [Replicate(), placement, Shard(0) if placement.is_shard(0) else Replicate()]
        placements.append(Shard(1) if placement.is_shard(0) else Replicate())
        if placement.is_shard(1):
            placements[0] = Shard(1)
        ours = [
            laid(w, mesh, p, requires_grad=True) for w, p in zip(wholes, placements, strict=True)
        ]
        plain = [w.requires_grad_() for w in wholes]
        for x, up, bias, down in (ours, plain):
            hidden = x @ up.t() if placement.is_shard(1) else F.linear(x, up, bias).tanh()
            loss = hidden.sum() if placement.is_shard(1) else F.linear(hidden, down).sum()
            (slope,) = torch.autograd.grad([loss, (x * x * x).sum()], x, create_graph=True)
            (slope.square().sum() + (slope * x).sum()).backward()
        for x, y in zip(ours, plain, strict=True):
            if y.grad is None:
                assert x.grad is None
            else:
                same(x.grad, y.grad)

    run()


@simulate(2)
def test_create_graph_is_refused_through_moves():
    x, _, mesh = leaf()
    local = torch.ones(2, 6, requires_grad=True)
    losses = {
        "DTensor gradient": x.redistribute(mesh, [Replicate()]),
        "DTensor.from_local": DTensor.from_local(local, mesh, [Shard(0)]),
    }
    for where, loss in losses.items():
        at = local if "from" in where else x
        seed = torch.ones_like(loss).detach().requires_grad_()
        with pytest.raises(HyperParallelError, match=f"{where}: backward must run without create"):
            torch.autograd.grad(loss, [at], seed, create_graph=True)


@pytest.mark.parametrize("asked", [None, [Shard(0)]])
@simulate(2)
def test_second_derivatives_pass_to_local(asked):
    x, whole, _ = leaf()
    y = (x * x * x).to_local(grad_placements=asked)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    same(slope.detach(), 3 * whole.detach() ** 2)
    slope.sum().backward()
    same(x.grad, 6 * whole.detach())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@simulate(2)
def test_gradients_that_create_a_graph_keep_it():
    x, whole, _ = leaf()
    (x * x * x).sum().backward(create_graph=True)
    first, x.grad = x.grad, None
    same(first, 3 * whole * whole)
    first.sum().backward()
    same(x.grad, 6 * whole)


@simulate(2)
def test_second_derivatives_pass_moves_that_hand_gradients_on_as_they_are():
    whole = seeded(4, 6)
    mesh = line(2)
    x = laid(whole, mesh, Replicate(), requires_grad=True)
    y = x.redistribute(mesh, [Partial()]).redistribute(mesh, [Replicate()])
    (slope,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    slope.sum().backward()
    same(x.grad, 6 * whole)


@simulate(2)
def test_batched_gradients_are_refused():
    x, _, _ = leaf()
    with pytest.raises(HyperParallelError, match="gradients of DTensors must not be batched"):
        torch.autograd.grad(x, [x], torch.ones(3, 4, 6), is_grads_batched=True)


@simulate(2)
def test_what_is_saved_is_dropped_after_the_last_backward():
    x, _, _ = leaf()
    middle = x.exp()
    loss = (middle * middle).sum()
    held = weakref.ref(middle._graph)
    del middle
    loss.backward(retain_graph=True)
    assert held() is not None
    loss.backward()
    gc.collect()
    assert held() is None
    assert loss.grad_fn is not None


@simulate(2)
def test_kept_loss_does_not_keep_activations():
    x, _, _ = leaf()
    middle = x.exp()
    held = weakref.ref(middle._local)
    loss = (middle * middle).sum()
    loss.backward()
    del middle
    gc.collect()
    assert held() is None
    assert loss.item() > 0


@pytest.mark.parametrize("needs_grad", [False, True])
def test_in_place_change_of_a_saved_operand_is_detected(needs_grad):
    @simulate(2)
    def run():
        x, _, mesh = leaf()
        other = laid(seeded(4, 6, seed=1), mesh, Shard(0), requires_grad=needs_grad)
        changes = [
            lambda: other.add_(1),
            lambda: other.to_local().add_(1),
            lambda: other.view(-1).mul_(2),
            lambda: other.detach().zero_(),
            lambda: torch._foreach_mul_([other], 2.0),
        ]
        for change in changes:
            loss = (x * other).sum()
            with torch.no_grad():
                change()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    run()


@simulate(2)
def test_retain_grad_of_a_tensor_that_is_no_leaf():
    x, whole, _ = leaf()
    middle = x * 2
    middle.retain_grad()
    (middle * middle).sum().backward()
    same(middle.grad, 4 * whole)
    same(x.grad, 8 * whole)


@simulate(2)
def test_hooks_on_activations_see_reduced_dtensors():
    mesh = line(2)
    x = laid(seeded(4, 6), mesh, Replicate(), requires_grad=True)
    weight = laid(seeded(8, 6, seed=1), mesh, Shard(0))
    seen = []
    middle = x * 1
    middle.register_hook(lambda grad: seen.append(grad) or grad * 2)
    F.linear(middle, weight).sum().backward()
    expected = seeded(8, 6, seed=1).sum(0).expand(4, 6)
    assert seen[0].placements == (Replicate(),)
    same(seen[0], expected)
    same(x.grad, 2 * expected)


@simulate(2)
def test_hook_may_change_the_gradient_in_place():
    x, whole, _ = leaf()
    middle = x * 1

    def hook(grad):
        grad.mul_(3)

    middle.register_hook(hook)
    (middle * middle).sum().backward()
    same(x.grad, 6 * whole)


@pytest.mark.parametrize("through", [False, True], ids=["leaf", "activation"])
def test_gradients_of_different_layouts_add_up(through):
    @simulate(2)
    def run():
        mesh = line(2)
        whole, other = seeded(4, 6), seeded(8, 6, seed=1)
        x = laid(whole, mesh, Replicate(), requires_grad=True)
        weight = laid(other, mesh, Shard(0))
        plain = whole.clone().requires_grad_()
        a, b = (x * 1, plain * 1) if through else (x, plain)
        # A pending sum, a replicated gradient, a sharded consumer, and a pending sum again.
        ours = F.linear(a, weight).square().sum() + (a * a).sum()
        ours = ours + a.redistribute(mesh, [Shard(1)]).exp().sum() + F.linear(a, weight).sum()
        ours.backward()
        (
            F.linear(b, other).square().sum()
            + (b * b).sum()
            + b.exp().sum()
            + F.linear(b, other).sum()
        ).backward()
        same(x.grad, plain.grad)

    run()


@simulate(2)
def test_detach_and_no_grad():
    x, whole, _ = leaf()
    assert not x.detach().requires_grad
    assert x.detach().is_leaf
    (x.detach() * x).sum().backward()
    same(x.grad, whole)
    with torch.no_grad():
        assert not (x * 2).requires_grad
        assert (x * 2).grad_fn is None
    with torch.inference_mode():
        same(x * 2, whole * 2)
    assert torch.is_grad_enabled()
    x.detach_()
    assert x.is_leaf and not x.requires_grad


class KeepsItsOperand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@simulate(2)
def test_a_result_is_detached_in_place():
    x, whole, mesh = leaf()
    y = x.sin()
    before = y.exp()
    moved = x.redistribute(mesh, [Replicate()])
    for result, value in ((y, whole.sin()), (moved, whole)):
        assert result.detach_() is result
        assert result.is_leaf and not result.requires_grad and result.grad_fn is None
        same(result, value)
    before.sum().backward()
    same(x.grad, whole.sin().exp() * whole.cos())
    x.grad = None
    (x * y).sum().backward()
    same(x.grad, whole.sin())
    (y.requires_grad_() * y).sum().backward()
    same(y.grad, 2 * whole.sin())
    kept = x.cos()
    twice = KeepsItsOperand.apply(kept)
    with pytest.raises(LayoutError, match="'detach_': the tensor must not be kept for backward"):
        kept.detach_()
    assert twice.requires_grad


@simulate(2)
def test_loss_may_be_pending_or_replicated():
    x, whole, mesh = leaf()
    loss = (x * x).sum()
    assert loss.placements == (Partial("sum"),)
    loss.backward()
    same(x.grad, 2 * whole)
    x.grad = None
    loss = (x * x).mean()
    assert loss.placements == (Partial("avg"),)
    loss.backward()
    same(x.grad, 2 * whole / 24)
    x.grad = None
    (x * x).sum().redistribute(mesh, [Replicate()]).backward()
    same(x.grad, 2 * whole)


@simulate(2)
def test_backward_takes_gradients_in_any_layout():
    x, _, mesh = leaf()
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        x.grad = None
        (x * 1).backward(laid(seeded(4, 6, seed=5), mesh, placement))
        same(x.grad, seeded(4, 6, seed=5))
    replicated = laid(seeded(4, 6), mesh, Replicate(), requires_grad=True)
    torch.autograd.backward([replicated * 1, (x * 1).sum()], [seeded(4, 6, seed=6), None])
    same(replicated.grad, seeded(4, 6, seed=6))


@simulate(2)
def test_backward_refuses_a_plain_gradient_of_a_sharded_tensor():
    x, _, _ = leaf()
    with pytest.raises(LayoutError, match="backward: the gradient of a DTensor must be a DTensor"):
        (x * 1).backward(torch.ones(4, 6))
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        (x * 1).backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_once_and_gives_the_same_gradients(use_reentrant):
    @simulate(2)
    def run():
        mesh = line(2)
        whole_x, whole_w = seeded(3, 4), seeded(4, 4, seed=1)
        x = laid(whole_x, mesh, Replicate(), requires_grad=True)
        w = laid(whole_w, mesh, Shard(0), requires_grad=True)
        calls = []

        def block(h):
            calls.append(1)
            for _ in range(3):
                h = F.linear(h, w).tanh().redistribute(mesh, [Replicate()])
            return h

        checkpoint(block, x * 1, use_reentrant=use_reentrant).square().sum().backward()
        assert len(calls) == 2
        plain_x, plain_w = whole_x.requires_grad_(), whole_w.requires_grad_()
        h = plain_x
        for _ in range(3):
            h = F.linear(h, plain_w).tanh()
        h.square().sum().backward()
        same(x.grad, plain_x.grad)
        same(w.grad, plain_w.grad)

    run()


@simulate(2)
def test_checkpoint_of_a_module_that_mixes_plain_and_distributed_tensors():
    mesh = line(2)
    w = laid(seeded(4, 4, seed=1), mesh, Shard(0), requires_grad=True)
    x = seeded(3, 4).requires_grad_()

    def block(h):
        h = DTensor.from_local(h.sin(), mesh, [Replicate()])
        return F.linear(h, w).tanh().full_tensor().cos()

    loss = checkpoint(block, x, use_reentrant=False).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    ours, ours_w = x.grad.clone(), w.grad.full_tensor()
    x.grad = None
    plain_w = seeded(4, 4, seed=1).requires_grad_()
    (F.linear(x.sin(), plain_w).tanh().cos().sum() * 2).backward()
    torch.testing.assert_close(ours, x.grad)
    torch.testing.assert_close(ours_w, plain_w.grad)


@simulate(2)
def test_saved_tensor_hooks_of_the_user_see_local_tensors():
    x, whole, _ = leaf()
    packed = []
    with torch.autograd.graph.save_on_cpu():
        loss = (x * x.exp()).sum()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        again = (x * x).sum()
    loss.backward()
    same(x.grad, (1 + whole) * whole.exp())
    x.grad = None
    again.backward()
    same(x.grad, 2 * whole)
    assert packed
    assert not any(isinstance(t, DTensor) for t in packed)


@pytest.mark.parametrize(
    "options",
    [
        {"placements": [Partial("avg")]},
        {"placements": [Partial("max")], "retain": True},
        {"placements": [Replicate()], "grad_placements": [Replicate()]},
    ],
    ids=str,
)
def test_backward_twice_through_one_from_local(options):
    options = dict(options)
    retain = options.pop("retain", False)

    @simulate(2)
    def gradients():
        x = torch.ones(4, 4, requires_grad=True)
        d = DTensor.from_local(x, line(2), **options)
        d.sum().full_tensor().backward(retain_graph=retain)
        once = x.grad.clone()
        (d * 3).sum().full_tensor().backward()
        assert torch.equal(x.grad, 4 * once)
        return once.unique().tolist()

    assert gradients()[0] == ([1.0] if "grad_placements" in options else [0.5])


@pytest.mark.parametrize("op", ["max", "product"])
@simulate(2)
def test_checkpoint_over_from_local_of_a_pending_extreme(op):
    mesh, x = line(2), torch.arange(20.0).view(4, 5).t().requires_grad_()

    def moved(local):
        pending = DTensor.from_local(local, mesh, [Partial(op)])
        return (pending.redistribute(mesh, [Replicate()]).to_local() ** 2).sum()

    (plain,) = torch.autograd.grad(moved(x), x)  # of a tensor that is not contiguous
    (again,) = torch.autograd.grad(checkpoint(moved, x, use_reentrant=False), x)
    assert torch.equal(plain, again)
    assert torch.equal(plain, x.detach() if op == "max" else 2 * x.detach() ** 3)
