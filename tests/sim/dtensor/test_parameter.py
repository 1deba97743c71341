# SPDX-License-Identifier: Apache-2.0
"""A DTensor as a parameter: what a plain parameter does, it does, and gradients are right."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from hyper_parallel.core import Packed, StridedShard
from hyper_parallel.errors import LayoutError
from support.device import DEVICE, DTYPE
from support.dtensors import laid, line, parameter, same, seeded

PLACEMENTS = [Shard(0), Shard(1), Replicate()]
every_placement = pytest.mark.parametrize("placement", PLACEMENTS, ids=str)


def made(placement, seed=0):
    """Give a parameter of shape (5, 6), its plain twin, and the mesh."""
    mesh = line(2)
    whole = seeded(5, 6, seed=seed)
    return parameter(whole, mesh, placement), nn.Parameter(whole.clone()), mesh


def sharded_linear(dtype=DTYPE):
    """Give a Linear of a sharded weight and a replicated bias, its plain twin, and an input."""
    mesh = line(2)
    torch.manual_seed(0)
    plain = nn.Linear(6, 4).to(dtype)
    ours = copy.deepcopy(plain)
    ours.weight = distribute_tensor(ours.weight, mesh, [Shard(0)])
    ours.bias = distribute_tensor(ours.bias, mesh, [Replicate()])
    x = seeded(3, 6, dtype=dtype)
    return ours, plain, laid(x, mesh, Replicate()), x


@every_placement
def test_parameter_is_a_parameter(placement):
    @simulate(2)
    def run():
        p, _, mesh = made(placement)
        assert isinstance(p, nn.Parameter)
        assert isinstance(p, DTensor)
        assert p.is_leaf
        assert p.requires_grad
        assert p.placements == (placement,)
        assert "Parameter" in repr(p)
        assert isinstance(distribute_tensor(nn.Parameter(seeded(4)), mesh), nn.Parameter)
        assert not isinstance(laid(seeded(4), mesh, Replicate()), nn.Parameter)

    run()


@simulate(2)
def test_parameters_keep_their_order_and_names():
    ours, plain, _, _ = sharded_linear()
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [tuple(p.shape) for p in ours.parameters()] == [(4, 6), (4,)]
    assert sum(p.numel() for p in ours.parameters()) == 28


@every_placement
def test_backward_into_named_inputs(placement):
    @simulate(2)
    def run():
        p, plain, mesh = made(placement)
        q = parameter(seeded(5, 6, seed=1), mesh, Replicate())
        for loss in ((p * q).sum(), (p * q).sum().full_tensor()):
            p.grad = q.grad = None
            loss.backward(inputs=[p], retain_graph=True)
            assert q.grad is None
            same(p.grad, q.detach().full_tensor())
            torch.autograd.backward(loss, inputs=q)
            same(q.grad, plain)

    run()


@simulate(2)
def test_backward_into_a_tensor_that_is_no_leaf():
    p, plain, _ = made(Shard(0))
    middle = p * 2
    (middle * middle).sum().backward(inputs=[middle])
    same(middle.grad, 4 * plain)
    assert p.grad is None


@every_placement
def test_grad_of_parameters_and_plain_tensors(placement):
    @simulate(2)
    def run():
        p, plain, _ = made(placement)
        unused, _, _ = made(placement, seed=1)
        x = torch.ones(3, requires_grad=True)
        loss = (p * p).sum().full_tensor() + (x * x).sum()
        of_p, of_unused, of_x = torch.autograd.grad(
            loss, [p, unused, x], allow_unused=True, retain_graph=True
        )
        same(of_p, 2 * plain)
        assert of_unused is None
        assert type(of_x) is torch.Tensor
        assert of_x.tolist() == [2.0] * 3
        assert p.grad is None
        zeros = torch.autograd.grad(loss, [unused], materialize_grads=True, retain_graph=True)
        same(zeros[0], torch.zeros(5, 6).to(DTYPE))
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(loss, [unused])

    run()


@every_placement
def test_hook_sees_a_dtensor_and_may_replace_it(placement):
    @simulate(2)
    def run():
        p, plain, _ = made(placement)
        seen = []

        def hook(grad):
            seen.append((type(grad), grad.layout == p.layout, tuple(grad.shape)))
            return grad * 3

        handle = p.register_hook(hook)
        (p * p).sum().backward()
        assert seen == [(DTensor, True, (5, 6))]
        same(p.grad, 6 * plain)
        handle.remove()
        (p * p).sum().backward()
        same(p.grad, 8 * plain)

    run()


@every_placement
def test_post_accumulate_hook_sees_the_parameter(placement):
    @simulate(2)
    def run():
        p, plain, _ = made(placement)
        grads = []

        def hook(param):
            assert param is p
            grads.append(param.grad)
            param.grad = None

        p.register_post_accumulate_grad_hook(hook)
        for _ in range(2):
            (p * p).sum().backward()
        assert p.grad is None
        for grad in grads:
            same(grad, 2 * plain)

    run()


@simulate(2)
def test_requires_grad_off_and_on():
    p, plain, mesh = made(Shard(0))
    q = parameter(seeded(5, 6, seed=1), mesh, Shard(0))
    assert p.requires_grad_(False) is p
    (p * q).sum().backward()
    assert p.grad is None
    p.requires_grad = True
    (p * q).sum().backward()
    same(p.grad, q.detach().full_tensor())
    same(q.grad, 2 * plain)


@simulate(2)
def test_module_to_dtype_then_train():
    ours, plain, x, whole_x = sharded_linear()
    weight = ours.weight
    for model, given in ((ours, x), (plain, whole_x)):
        model(given).sum().backward()
        model.to(torch.float32)
        model(given.float()).sum().backward()
    assert ours.weight is weight
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        same(p, q)
        same(p.grad, q.grad)


@every_placement
def test_data_is_read_and_assigned(placement):
    @simulate(2)
    def run():
        p, plain, mesh = made(placement)
        alias = p.data
        assert not alias.requires_grad
        alias.zero_()
        same(p, torch.zeros(5, 6).to(DTYPE))
        p.data = laid(plain.detach() * 2, mesh, placement)
        same(alias, torch.zeros(5, 6).to(DTYPE))
        (p * p).sum().backward()
        same(p.grad, 4 * plain)
        assert isinstance(p, nn.Parameter)

    run()


@simulate(2)
def test_data_refuses_a_plain_tensor():
    p, plain, _ = made(Shard(0))
    with pytest.raises(LayoutError, match=r"DTensor.data: the new data must be a DTensor"):
        p.data = plain.data


@every_placement
def test_deepcopy_is_independent(placement):
    @simulate(2)
    def run():
        p, plain, _ = made(placement)
        (p * p).sum().backward()
        twin = copy.deepcopy(p)
        assert isinstance(twin, nn.Parameter)
        same(twin.grad, 2 * plain)
        (twin * twin).sum().backward()
        with torch.no_grad():
            twin.sub_(twin.grad)
        same(p, plain)
        same(p.grad, 2 * plain)
        same(twin, -3 * plain)

    run()


@simulate(2)
def test_deepcopy_keeps_ties_and_refuses_what_is_no_leaf():
    p, _, _ = made(Shard(0))
    model = nn.ParameterList([p, p])
    twin = copy.deepcopy(model)
    assert twin[0] is twin[1]
    assert twin[0] is not p
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(p * 2)


@simulate(2)
def test_state_dict_round_trip():
    ours, plain, _, _ = sharded_linear()
    state = copy.deepcopy(ours.state_dict())
    assert all(isinstance(value, DTensor) for value in state.values())
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    ours.load_state_dict(state)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        same(p, q)
    ours.load_state_dict(state, assign=True)
    assert isinstance(ours.weight, nn.Parameter)
    same(ours.weight, plain.weight)


@simulate(3)
def test_whole_plain_tensors_load_into_sharded_parameters():
    mesh = line(3)
    whole = nn.Linear(5, 4).to(DTYPE)
    whole.weight.data.copy_(seeded(4, 5))
    whole.bias.data.copy_(seeded(4))
    ours = nn.Linear(5, 4).to(DTYPE)
    ours.weight = distribute_tensor(ours.weight, mesh, [Shard(0)])
    ours.bias = distribute_tensor(ours.bias, mesh, [Replicate()])
    ours.load_state_dict(whole.state_dict())
    same(ours.weight, whole.weight)
    same(ours.bias, whole.bias)


@simulate(2)
def test_load_refuses_a_local_part():
    ours, plain, _, _ = sharded_linear()
    state = {"weight": plain.weight[:2], "bias": plain.bias}
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        ours.load_state_dict(state)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        return p * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class TripleLocal(torch.autograd.Function):
    """Takes a parameter, works on plain tensors, and gives a plain local gradient."""

    @staticmethod
    def forward(ctx, p):
        return p.to_local() * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


@every_placement
def test_user_function_alone_and_beside_another_use(placement):
    @simulate(2)
    def run():
        p, plain, _ = made(placement)
        Triple.apply(p).sum().backward()
        same(p.grad, torch.full((5, 6), 3.0).to(DTYPE))
        (Triple.apply(p).sum() + (p * p).sum()).backward()
        same(p.grad, 6 + 2 * plain)
        p.grad.zero_()
        TripleLocal.apply(p).sum().backward()
        same(p.grad, torch.full((5, 6), 3.0).to(DTYPE))
        p.grad = None
        (TripleLocal.apply(p).sum() + (p * p).sum().full_tensor()).backward()
        same(p.grad, 3 + 2 * plain)

    run()


class PendingGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x)
        return F.linear(x, p)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, grad.t() @ x  # rows are cut: a pending sum


@simulate(2)
def test_user_function_may_give_a_pending_sum():
    p, _, mesh = made(Replicate())
    x = seeded(4, 6, seed=3)
    rows = laid(x, mesh, Shard(0))
    for _ in range(2):
        PendingGradient.apply(rows, p).sum().backward()
    same(p.grad, 2 * x.sum(0).expand(5, 6))
    assert p.grad.placements == (Replicate(),)
    (PendingGradient.apply(rows, p).sum() + p.sum()).backward()
    same(p.grad, 3 * x.sum(0).expand(5, 6) + 1)


class MovedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        return p * 3

    @staticmethod
    def backward(ctx, grad):
        return grad.redistribute(grad.device_mesh, [Shard(1)])


@simulate(2)
def test_user_function_that_gives_another_cut_is_refused():
    p, _, _ = made(Shard(0))
    with pytest.raises(RuntimeError, match="MovedGradientBackward returned an invalid gradient"):
        MovedGradient.apply(p).sum().backward()


@every_placement
def test_gradients_accumulate(placement):
    @simulate(2)
    def run():
        p, plain, mesh = made(placement)
        x = laid(seeded(4, 6, seed=2), mesh, Shard(0))  # a pending sum for a replicated p
        for model, given in ((p, x), (plain, seeded(4, 6, seed=2))):
            for _ in range(3):
                F.linear(given, model).square().sum().backward()
        same(p.grad, plain.grad)
        assert p.grad.layout == p.layout

    run()


@simulate(2)
def test_zero_grad():
    ours, plain, x, _ = sharded_linear()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(x).sum().backward()
    grad = ours.weight.grad
    optimizer.zero_grad(set_to_none=False)
    assert ours.weight.grad is grad
    same(ours.weight.grad, torch.zeros_like(plain.weight))
    ours(x).sum().backward()
    optimizer.zero_grad(set_to_none=True)
    assert ours.weight.grad is None
    ours(x).sum().backward()
    ours.zero_grad()
    assert ours.weight.grad is None


@every_placement
def test_pickle_and_torch_save(placement):
    @simulate(2)
    def run():
        p, plain, _ = made(placement)
        buffer = io.BytesIO()
        torch.save({"p": p}, buffer)
        buffer.seek(0)
        for loaded in (
            torch.load(buffer, weights_only=False)["p"],
            pickle.loads(pickle.dumps(p)),
        ):
            assert isinstance(loaded, nn.Parameter)
            assert loaded.layout == p.layout
            same(loaded, plain)
            (loaded * p).sum().backward()
            same(loaded.grad, plain)

    run()


@every_placement
def test_grad_is_one_object_and_in_place_changes_reach_the_optimizer(placement):
    @simulate(2)
    def run():
        p, plain, _ = made(placement)
        (p * p).sum().backward()
        assert p.grad is p.grad
        p.grad.mul_(0.5)
        p.grad += 1
        with torch.no_grad():
            p.grad.data.mul_(2)
        torch.optim.SGD([p], lr=1.0).step()
        same(p, plain - (2 * plain + 2))

    run()


@simulate(2)
def test_grad_is_assigned_in_any_layout():
    p, plain, mesh = made(Shard(0))
    p.grad = laid(seeded(5, 6), mesh, Shard(1))
    assert p.grad.placements == (Shard(0),)
    same(p.grad, seeded(5, 6))
    (p * p).sum().backward()
    same(p.grad, seeded(5, 6) + 2 * plain)
    del p.grad
    assert p.grad is None


@simulate(2)
def test_grad_refuses_a_plain_tensor_and_another_shape():
    p, plain, mesh = made(Shard(0))
    with pytest.raises(LayoutError, match=r"DTensor.grad: the gradient must be a DTensor of glob"):
        p.grad = plain.data
    with pytest.raises(LayoutError, match=r"of global shape \(5, 6\), but got grad='DTensor'"):
        p.grad = laid(seeded(5, 5), mesh, Shard(0))


@simulate(2)
def test_two_leaves_do_not_share_one_gradient():
    p, _, mesh = made(Shard(0))
    q = parameter(seeded(5, 6, seed=1), mesh, Shard(0))
    (p + q).sum().backward()
    p.grad.zero_()
    same(q.grad, torch.ones(5, 6).to(DTYPE))


class Double(nn.Module):
    def forward(self, x):
        return x * 2


@simulate(2)
def test_parametrization_of_a_sharded_parameter():
    ours, plain, x, whole_x = sharded_linear()
    for model, given in ((ours, x), (plain, whole_x)):
        nn.utils.parametrize.register_parametrization(model, "weight", Double())
        model(given).square().sum().backward()
    same(ours.weight, plain.weight)
    same(ours.parametrizations.weight.original.grad, plain.parametrizations.weight.original.grad)
    nn.utils.parametrize.remove_parametrizations(ours, "weight")
    same(ours.weight, plain.weight)


def test_unpickling_finds_the_mesh_and_does_not_make_one():
    def run():
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
        data = pickle.dumps(distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]))
        found = pickle.loads(data) if mesh.get_rank() == 0 else None  # on one rank: no collective
        return found is None or found.device_mesh is mesh["tp"]

    assert all(simulate(4).run(run))


def test_unpickling_without_an_equal_mesh_is_refused():
    def save():
        mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("gone",))
        return pickle.dumps(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))

    data = simulate(2).run(save)[0]

    def load():
        with pytest.raises(LayoutError, match="Make the mesh first, with init_device_mesh"):
            pickle.loads(data)

    simulate(2).run(load)


@pytest.mark.parametrize("src_data_rank", [0, None])
@simulate(2)
def test_meta_device_then_to_empty_then_init(src_data_rank):
    mesh = line(2)
    with torch.device("meta"):
        ours = nn.Linear(6, 5)
    for name, placement in (("weight", Shard(0)), ("bias", Replicate())):
        param = getattr(ours, name)
        laid_out = distribute_tensor(param, mesh, [placement], src_data_rank=src_data_rank)
        setattr(ours, name, laid_out)
    assert ours.weight.is_meta
    assert ours.weight.to_local().shape == ours.weight.layout.local_shape(mesh.get_rank())
    ours.to_empty(device=DEVICE)
    torch.manual_seed(0)
    ours.reset_parameters()
    plain = nn.Linear(6, 5)
    torch.manual_seed(0)
    plain.reset_parameters()
    same(ours.weight, plain.weight)
    same(ours.bias, plain.bias)
    assert isinstance(ours.weight, nn.Parameter)


@simulate(2)
def test_tied_parameters_stay_one_and_get_both_gradients():
    mesh = line(2)

    def build():
        table, head = nn.Embedding(7, 4).double(), nn.Linear(4, 7, bias=False).double()
        table.weight.data = seeded(7, 4)
        head.weight = table.weight
        return nn.ModuleList([table, head])

    plain, ours = build(), build()
    ours[0].weight = ours[1].weight = distribute_tensor(ours[0].weight, mesh, [Shard(0)])
    ids = torch.tensor([1, 6, 3])
    for model, given in ((ours, laid(ids, mesh, Replicate())), (plain, ids)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model[1](model[0](given)).square().sum().backward()
            optimizer.step()
    assert len(list(ours.parameters())) == 1
    same(ours[0].weight, plain[0].weight)


@pytest.mark.parametrize("placement", [Packed(0, (4, 4)), StridedShard(0, 2), Shard(1)], ids=str)
def test_state_goes_from_whole_plain_tensors_and_back(placement):
    @simulate(2)
    def run():
        mesh = line(2)
        whole, ours, again = (nn.Linear(6, 8, dtype=DTYPE) for _ in range(3))
        whole.weight.data = seeded(8, 6)
        ours.weight = distribute_tensor(ours.weight, mesh, [placement])
        ours.load_state_dict(whole.state_dict())
        same(ours.weight, whole.weight)
        back = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in ours.state_dict().items()
        }
        again.load_state_dict(back)
        assert torch.equal(back["weight"], whole.weight)

    run()


class Identity(torch.autograd.Function):
    """Gives its input as it is, and a gradient that lies elsewhere."""

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.gradient = gradient
        return x

    @staticmethod
    def backward(ctx, grad):
        assert isinstance(grad, DTensor)
        return ctx.gradient, None


LYING = {
    "alike": ([Shard(0), Shard(1)], [Shard(0), Shard(1)]),
    "the other cut of the same local shape": ([Shard(0), Shard(1)], [Shard(1), Shard(0)]),
    "pending": ([Replicate(), Shard(1)], [Partial(), Shard(1)]),
}


@pytest.mark.parametrize("kind", LYING)
def test_user_function_may_give_an_activation_a_gradient_that_lies_elsewhere(kind):
    @simulate(4)
    def run():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        placements, lies = LYING[kind]
        x = laid(seeded(4, 4), mesh, *placements, requires_grad=True)
        gradient = laid(seeded(4, 4, seed=1), mesh, *lies)
        y = x * 2
        z = Identity.apply(y, gradient)
        assert isinstance(z, DTensor)
        ((z * 1).sum() + (y * 3).sum() + (Identity.apply(y, gradient) * 1).sum()).backward()
        same(x.grad, 2 * (2 * seeded(4, 4, seed=1) + 3))

    run()


@simulate(2)
def test_results_of_ops_may_be_changed_in_place_and_used_on():
    x, plain, _ = made(Shard(0))
    for value in (x, plain):
        y = value * 2
        with torch.no_grad():
            y.add_(1)
        (y * 3).sum().backward()
    same(x.grad, plain.grad)
    y = x * 2
    z = (y * y).sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


@simulate(2)
def test_gradient_edges_and_multi_grad_hooks_of_results():
    x, plain, _ = made(Shard(0))
    seen = []
    y = x.exp()
    handle = torch.autograd.graph.register_multi_grad_hook([y], lambda grads: seen.append(grads))
    (y * y).sum().backward()
    handle.remove()
    assert len(seen) == 1
    x.grad = None
    edge = torch.autograd.graph.get_gradient_edge(x.exp())
    assert edge.node is not None
    y = x.exp()
    (grad,) = torch.autograd.grad((y * y).sum(), [y])
    same(grad, 2 * plain.exp())
