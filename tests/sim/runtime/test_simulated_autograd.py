# SPDX-License-Identifier: Apache-2.0
"""Backward passes that communicate, on simulated ranks, against one process."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hyper_parallel.runtime import backend_for, current_rank, init_device_mesh, simulate
from support.device import DEVICE, DTYPE, raises_in_backward

BATCH, WIDTH, HIDDEN, RANKS = 3, 4, 8, 4


class ReduceBackward(torch.autograd.Function):
    """The identity whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad.clone()), None


class ReduceForward(torch.autograd.Function):
    """The sum over the group, whose gradient is the identity."""

    @staticmethod
    def forward(ctx, x, comm):
        return comm.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class RunsBackwardInside(torch.autograd.Function):
    """A function that keeps a graph and runs it in its own backward (re-entrant)."""

    @staticmethod
    def forward(ctx, x, fn):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = fn(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, grad):
        torch.autograd.backward(ctx.y, grad)
        return ctx.x.grad, None


def group():
    return init_device_mesh(DEVICE, (backend_for(DEVICE).world_size,)).communicator(0)


def values():
    """Make the input and both weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = (BATCH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    drawn = [torch.randn(s, generator=generator, dtype=DTYPE, device="cpu") for s in shapes]
    return [x.to(DEVICE) for x in drawn]


def plain(fn, x):
    return fn(x)


WRAPPERS = {
    "plain": plain,
    "checkpoint": lambda fn, x: checkpoint(fn, x, use_reentrant=False),
    "re-entrant checkpoint": lambda fn, x: checkpoint(fn, x, use_reentrant=True),
    "re-entrant": lambda fn, x: RunsBackwardInside.apply(x, fn),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_tensor_parallel_mlp_equals_one_process(wrapper):
    x, up, down = (value.requires_grad_() for value in values())
    torch.nn.functional.linear(torch.tanh(x @ up.t()), down).square().sum().backward()

    def run():
        comm = group()
        x, up, down = values()
        x.requires_grad_()
        rank = current_rank()
        up = up.chunk(RANKS)[rank].clone().requires_grad_()
        down = down.chunk(RANKS, 1)[rank].clone().requires_grad_()

        def mlp(x):
            hidden = torch.tanh(ReduceBackward.apply(x, comm) @ up.t())
            return ReduceForward.apply(hidden @ down.t(), comm)

        WRAPPERS[wrapper](mlp, x).square().sum().backward()
        return x.grad, up.grad, down.grad

    results = simulate(RANKS).run(run)
    for grad, _, _ in results:
        torch.testing.assert_close(grad, x.grad)
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in results]), up.grad)
    torch.testing.assert_close(torch.cat([grad for _, _, grad in results], 1), down.grad)


def test_checkpoint_draws_the_same_dropout_again_on_each_rank():
    def run():
        comm = group()
        torch.manual_seed(current_rank())
        x = torch.ones(64, requires_grad=True)
        seen = []

        def block(x):
            comm.barrier()
            out = torch.nn.functional.dropout(ReduceBackward.apply(x, comm), 0.5)
            seen.append(out.detach().clone())
            comm.barrier()
            return out

        checkpoint(block, x, use_reentrant=False).sum().backward()
        # The gradient is that of the second draw: equal to the first, or the test fails below.
        return seen[0], x.grad

    results = simulate(3).run(run)
    total = sum(mask for mask, _ in results)
    assert not torch.equal(results[0][0], results[1][0])
    for _, grad in results:
        torch.testing.assert_close(grad, total)


@raises_in_backward
def test_an_error_in_one_ranks_backward_releases_the_others():
    def run():
        comm = group()
        x = torch.ones(2, requires_grad=True)
        y = ReduceBackward.apply(x, comm)
        if current_rank() == 1:
            y.register_hook(fail)
        y.sum().backward()

    def fail(grad):
        raise ValueError("in backward")

    with pytest.raises(ValueError, match="in backward") as caught:
        simulate(3).run(run)
    assert caught.value.__notes__ == ["on rank 1 of 3"]


def test_backward_runs_on_the_ranks_own_thread():
    def run():
        seen = []
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda grad: seen.append(current_rank()))
        x.sum().backward()
        return seen

    assert simulate(3).run(run) == [[0], [1], [2]]
