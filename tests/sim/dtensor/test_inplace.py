# SPDX-License-Identifier: Apache-2.0
"""In-place ops and list ops: the write arrives, or the call is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Partial, Replicate, Shard, simulate, strict_rules
from hyper_parallel.core import Layout
from hyper_parallel.dtensor import lists
from hyper_parallel.errors import LayoutError, RuleError
from support.device import DEVICE, DTYPE
from support.dtensors import laid, line, parameter, same, seeded

gathers = pytest.mark.filterwarnings("ignore:DTensor op .* has no sharding rule")
every_cut = pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)


def made(placement, seed=0):
    mesh = line(2)
    whole = seeded(5, 6, seed=seed)
    return laid(whole, mesh, placement), whole, mesh


@every_cut
def test_in_place_ops_equal_the_plain_ones(placement):
    @simulate(2)
    def run():
        x, whole, mesh = made(placement)
        for other_placement in (Shard(0), Shard(1), Replicate(), Partial()):
            other = seeded(5, 6, seed=1)
            for target, y in ((x, laid(other, mesh, other_placement)), (whole, other)):
                target.add_(y, alpha=2).mul_(0.5).sub_(1)
                target.addcmul_(y, y, value=0.1).lerp_(y, 0.3).clamp_(-1, 1)
                target.addcdiv_(y, y * y + 1).masked_fill_(y > 1, 0.5)
                target += y
                target -= 1
                target *= y
                target /= 2
                target **= 2
                target %= 0.7
                target //= 0.1
                torch.exp_(target).neg_().copy_(target + y)
            same(x, whole)
            assert x.placements == (placement,)
        x.zero_()
        same(x, torch.zeros_like(whole))
        assert x.fill_(2.0) is x
        same(x, torch.full_like(whole, 2.0))

    run()


@simulate(2)
def test_out_is_written_in_its_own_layout():
    x, whole, mesh = made(Shard(0))
    out = laid(torch.zeros(5, 6).to(DTYPE), mesh, Shard(1))
    assert torch.maximum(x, x * 2, out=out) is out
    assert out.placements == (Shard(1),)
    same(out, torch.maximum(whole, whole * 2))
    torch.add(out, x, alpha=2, out=out)
    same(out, torch.maximum(whole, whole * 2) + 2 * whole)
    for placement in (Replicate(), Shard(1)):
        product = laid(torch.zeros(5, 5).to(DTYPE), mesh, placement)
        assert torch.matmul(x, x.t(), out=product) is product
        same(product, whole @ whole.t())
        assert product.placements == (placement,)
    values = laid(torch.zeros(5, 6).to(DTYPE), mesh, Shard(0))
    positions = laid(torch.zeros(5, 6).long(), mesh, Replicate())
    torch.sort(x, dim=0, out=(values, positions))
    same(values, whole.sort(0).values)
    same(positions, whole.sort(0).indices)
    with pytest.raises(LayoutError, match=r"must have the result's shape torch.Size\(\[5, 5\]\)"):
        torch.matmul(x, x.t(), out=laid(torch.zeros(1, 5).to(DTYPE), mesh, Replicate()))
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
        torch.matmul(x, x.t(), out=laid(torch.zeros(5, 5).long(), mesh, Replicate()))


@simulate(2)
def test_in_place_operands_that_broadcast():
    x, whole, mesh = made(Replicate())
    row = seeded(6, seed=3)
    x.add_(laid(row, mesh, Shard(0)))
    same(x, whole + row)
    y, _, _ = made(Shard(0))
    for scalar in (laid(row, mesh, Shard(0)).sum(), laid(row.sum(), mesh, Replicate()), row.sum()):
        y.copy_(laid(whole, mesh, Shard(0)))
        y.mul_(scalar)
        same(y, whole * row.sum())
    for placement in (Replicate(), Shard(0)):
        y.copy_(laid(whole, mesh, Shard(0)))
        same(y.add_(laid(row, mesh, placement)), whole + row)
        same(y.copy_(laid(row, mesh, placement)), row.expand(5, 6))
    with pytest.raises(RuntimeError, match="broadcast a dimension of length 5"):
        y.add_(laid(torch.ones(5).to(DTYPE), mesh, Replicate()))


@simulate(2)
def test_init_functions():
    p = parameter(seeded(5, 6), line(2), Shard(0))
    nn.init.zeros_(p)
    same(p, torch.zeros(5, 6).to(DTYPE))
    nn.init.constant_(p, 2.0)
    same(p, torch.full((5, 6), 2.0).to(DTYPE))
    nn.init.ones_(p)
    same(p, torch.ones(5, 6).to(DTYPE))
    tall = parameter(seeded(6, 5), line(2), Shard(0))
    nn.init.orthogonal_(tall)
    same(tall.data.t() @ tall.data, torch.eye(5).to(DTYPE))
    nn.init.eye_(p)
    same(p, torch.eye(5, 6).to(DTYPE))


WRITES = {
    "cumsum": lambda x, i, y: x.cumsum_(0),
    "tril": lambda x, i, y: x.tril_(),
    "index_add": lambda x, i, y: x.index_add_(0, i, y, alpha=2),
    "index_copy": lambda x, i, y: x.index_copy_(0, i, y),
    "index_fill": lambda x, i, y: x.index_fill_(1, i, 3.0),
    "index_put": lambda x, i, y: x.index_put_((i,), y, accumulate=True),
    "scatter": lambda x, i, y: x.scatter_(0, i[:, None].expand(3, 6), 2.0),
    "scatter_add": lambda x, i, y: x.scatter_add_(0, i[:, None].expand(3, 6), y),
    "renorm": lambda x, i, y: x.renorm_(2, 0, 1.0),
    "softmax": lambda x, i, y: torch.softmax(x, 0, out=x),
    "clip": lambda x, i, y: x.clip_(y.min(), max=0.5),
    "row": lambda x, i, y: x.__setitem__(1, y[0]),
    "rows": lambda x, i, y: x.__setitem__(slice(1, 3), y[:2]),
    "column": lambda x, i, y: x.__setitem__((slice(None), 2), 7.0),
    "broadcast": lambda x, i, y: x.__setitem__((..., slice(0, 6)), y[:1]),
    "everything": lambda x, i, y: x.__setitem__(..., 1),
    "positions": lambda x, i, y: x.__setitem__(i, y),
    "mask": lambda x, i, y: x.__setitem__(x > 0, 0.0),
    "rows by mask": lambda x, i, y: x.__setitem__(x[:, 0] > 0, y[0]),
}


ALIASED = {
    "itself": lambda x: x.mul_(3),
    "a view": lambda x: x.view(12).mul_(3),
    "a transpose": lambda x: x.t().mul_(3),
    "the local part": lambda x: x.to_local().mul_(3),
    "a move of nothing": lambda x: x.redistribute(x.device_mesh, x.placements).mul_(3),
}


@pytest.mark.parametrize("case", ALIASED)
@simulate(2)
def test_recorded_writes_through_aliases_renew_what_ops_were_lent(case):
    weight = laid(seeded(4, 4), line(2), Shard(1))
    leaf = laid(seeded(3, 4), line(2), Replicate(), requires_grad=True)
    x = leaf * 2
    rows = x[:2]
    for tensor in (x, rows):
        torch.matmul(tensor, weight)  # lends a part, whose gradient is a pending sum
    ALIASED[case](x)
    ((x @ weight).sum() + (rows @ weight).sum()).backward()
    plain = seeded(3, 4).requires_grad_()
    y = plain * 2
    y = y * 3
    ((y @ seeded(4, 4)).sum() + (y[:2] @ seeded(4, 4)).sum()).backward()
    same(leaf.grad, plain.grad)


@simulate(2)
def test_a_move_without_steps_is_an_alias_that_autograd_knows_of():
    for mesh, src, dst in ((line(1), Replicate(), Shard(0)), (line(2), Shard(0), Shard(0))):
        leaf = laid(seeded(4), mesh, src, requires_grad=True)
        if mesh.get_coordinate() is None:
            continue
        x = leaf * 2
        x.redistribute(mesh, [dst]).mul_(3)
        x.sum().backward()
        same(x, seeded(4) * 6)
        same(leaf.grad, torch.full((4,), 6.0, dtype=DTYPE))


@simulate(2)
def test_list_ops_refuse_operands_of_another_mesh():
    one, other = (
        laid(seeded(4), DeviceMesh(DEVICE, ranks), Shard(0)) for ranks in ([0, 1], [1, 0])
    )
    for op in (torch._foreach_add, torch._foreach_copy_):
        with pytest.raises(LayoutError, match="all operands must be on one mesh"):
            op([one], [other])


@gathers
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize("name", WRITES)
def test_writes_that_are_not_element_by_element(name, placement):
    @simulate(2)
    def run():
        x, whole, mesh = made(placement)
        rows, positions = seeded(3, 6, seed=4), torch.tensor([4, 0, 2])
        with torch.no_grad():
            WRITES[name](x, laid(positions, mesh, Replicate()), laid(rows, mesh, Shard(1)))
            WRITES[name](whole, positions, rows)
        same(x, whole)
        assert x.placements == (placement,)

    run()


VIEWS = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, -1),
    "swapaxes_": lambda x: x.swapaxes_(axis0=1, axis1=0),
    "swapdims_": lambda x: x.swapdims_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
    "squeeze_ of dims": lambda x: x.unsqueeze_(-1).squeeze_((0, 2)),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()])
@pytest.mark.parametrize("change", VIEWS.values(), ids=VIEWS)
def test_views_are_made_in_place(change, placement):
    @simulate(2)
    def run():
        x, whole, _ = made(placement)
        alias = x[:]
        assert change(x) is x
        same(x, change(whole.clone()))
        x.mul_(2)
        same(alias, whole * 2)

    run()


@simulate(2)
def test_a_view_in_place_that_had_to_be_gathered_takes_no_writes():
    row = laid(seeded(1, 6), line(2), Shard(0))
    same(row.squeeze_(), seeded(1, 6)[0])
    with pytest.raises(LayoutError, match="must not be a view that was gathered"):
        row.zero_()


@pytest.mark.parametrize("write", [lambda x: x.resize_(2), lambda x: x.as_strided_((2,), (1,))])
@simulate(2)
def test_writes_that_change_the_shape_are_refused(write):
    x, whole, _ = made(Shard(0))
    must = "an in-place op on a DTensor must keep its shape, and exist not in-place"
    with pytest.raises(RuleError, match=must):
        write(x)
    same(x, whole)


@gathers
@every_cut
@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[:2],
        lambda w: w[1],
        lambda w: w.view(-1),
        lambda w: w.reshape(3, -1),
        lambda w: w.view(2, -1),
        lambda w: w.flatten(),
        lambda w: w.ravel(),
        lambda w: w.t(),
        lambda w: w.T,
        lambda w: w.mT,
        lambda w: w.transpose(0, 1),
        lambda w: w.t().unsqueeze(0),
        lambda w: w.unbind(0)[1],
        lambda w: w.unbind(1)[1],
        lambda w: w.chunk(2)[0],
        lambda w: w.split(4, 1)[1],
        lambda w: w.narrow(0, 1, 2),
        lambda w: w.select(1, 0),
        lambda w: w.diagonal(),
        lambda w: w.unflatten(1, (2, 3)),
        lambda w: w.permute(1, 0),
        lambda w: w.movedim(0, 1),
        lambda w: w[:2].view(-1),
        lambda w: w[:2].detach(),
        lambda w: w[:2].data,
        lambda w: w[:2].t()[1],
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: list(w)[2],
        lambda w: w.unfold(0, 2, 1),
    ],
)
def test_writes_through_views_arrive_or_are_refused(view, placement):
    @simulate(2)
    def run():
        for whole in (seeded(5, 6), seeded(4, 6)):
            x = laid(whole, line(2), placement)
            try:
                view(x).mul_(2)
            except LayoutError as error:
                assert "must not be a view that was gathered" in str(error)
                assert not placement.is_replicate()
                same(x, whole)
            else:
                view(whole).mul_(2)
                same(x, whole)

    run()


@gathers
@simulate(2)
def test_writes_into_gathered_views_are_refused_in_every_way():
    x, whole, _ = made(Shard(0))
    for write in (
        lambda: x[:2].zero_(),
        lambda: torch._foreach_zero_([x[:2]]),
        lambda: x[:2].copy_(x[:2]),
        lambda: x[0].fill_(1),
    ):
        with pytest.raises(LayoutError, match=r"must not be a view that was gathered.*clone\(\)"):
            write()
    with pytest.raises(RuleError, match="'__setitem__'"), strict_rules():
        x[0] = 1
    with pytest.raises(LayoutError, match="view that was gathered"):
        x[:2] += 1
    same(x, whole)
    x[:2].clone().zero_()
    x[[0, 1]].zero_()  # torch copies, too
    (x[:2] * 1).zero_()
    same(x, whole)


@simulate(2)
def test_view_of_a_strided_part_does_not_lose_writes():
    part = seeded(6, 4).t()
    x = DTensor.from_local(part, line(2), [Replicate()])
    with pytest.raises(LayoutError, match="view that was gathered"):
        x.view(24).zero_()


@simulate(2)
def test_copy_takes_whole_plain_tensors_and_other_ops_do_not():
    x, _, _ = made(Shard(0))
    x.copy_(torch.ones(5, 6))
    same(x, torch.ones(5, 6).to(DTYPE))
    with pytest.raises(LayoutError, match=r"'add_': every tensor operand must be a DTensor"):
        x.add_(torch.ones(5, 6).to(DTYPE))
    with pytest.raises(LayoutError, match="must have the target's global shape"):
        x.copy_(torch.ones(3, 6).to(DTYPE))


@simulate(2)
def test_plain_targets_and_gradients_are_refused():
    x, _, mesh = made(Shard(0))
    plain = torch.ones(5, 6).to(DTYPE)
    for write in (lambda: plain.add_(x), lambda: torch.add(x, x, out=plain)):
        with pytest.raises(LayoutError, match=r"that is written to must be a DTensor.*target='Ten"):
            write()
    p = parameter(seeded(5, 6), mesh, Shard(0))
    for write in (
        lambda: p.add_(1),
        lambda: x.add_(p),
        lambda: x.add_(other=p),
        lambda: torch._foreach_add_([x], [p]),
        lambda: torch._foreach_mul_([p], 2.0),
        lambda: torch._foreach_mul([p], 2.0),
        lambda: torch._foreach_add([x], [p * 1]),
    ):
        with pytest.raises(LayoutError, match=r"in-place op or a list op .* must not need a grad"):
            write()
    same(x, seeded(5, 6))


RECORDED = {
    "add": lambda x, y: x.add_(y, alpha=2),
    "iadd": lambda x, y: x.__iadd__(y),
    "add to itself": lambda x, y: x.add_(x),
    "divide by a number": lambda x, y: x.div_(torch.tensor(2.0)),
    "bias": lambda x, y: x.add_(y[0]),
    "column": lambda x, y: x.mul_(y[:, :1]),
    "number that needs a gradient": lambda x, y: x.mul_(y.sum()),
    "plain number that needs one": lambda x, y: x.mul_(torch.ones((), requires_grad=True)),
    "masked_fill": lambda x, y: x.masked_fill_(y[:1] > 0, 0.5),
    "addcmul": lambda x, y: x.addcmul_(y, y, value=0.3),
    "copy": lambda x, y: x.copy_(y),
    "zero": lambda x, y: x.zero_(),
    "relu": lambda x, y: F.relu(x, inplace=True),
    "silu": lambda x, y: F.silu(x, inplace=True),
    "leaky_relu": lambda x, y: nn.LeakyReLU(0.2, inplace=True)(x),
    "twice": lambda x, y: x.neg_().mul_(y),
    "through a view": lambda x, y: x.t().mul_(3).t(),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@every_cut
@pytest.mark.parametrize("write", RECORDED.values(), ids=RECORDED)
def test_element_wise_writes_into_results_are_recorded(write, placement):
    @simulate(2)
    def run():
        mesh = line(2)
        whole, other = seeded(5, 6).requires_grad_(), seeded(5, 6, seed=1).requires_grad_()
        losses = []
        for at in (Shard(0), Shard(1), Replicate()):
            x = laid(whole, mesh, placement, requires_grad=True)
            y = laid(other, mesh, at, requires_grad=True)
            whole.grad = other.grad = None
            for a, b in ((x, y), (whole, other)):
                made, before = a * 3, a * 2
                view, total = made.t(), made.sum(0)
                assert write(made, b * 1).shape == made.shape
                loss = (made * made).sum() + view.sin().sum() + (total * before).sum()
                loss.backward()
                losses.append(loss)
            same(*losses[-2:])
            same(x.grad, whole.grad)
            assert (y.grad is None) is (other.grad is None)
            if y.grad is not None:
                same(y.grad, other.grad)

    run()


@simulate(2)
def test_torch_finds_recorded_writes_into_what_was_saved_and_hooks_see_their_gradient():
    x = laid(seeded(5, 6), line(2), Shard(0), requires_grad=True)
    saved = x * 3
    square = saved * saved
    saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
    y, seen = x * 3, []
    y.register_hook(lambda g: seen.append(g.full_tensor()[0, 0].item()))
    part = y.to_local()
    y.mul_(2)
    y.register_hook(lambda g: seen.append(g.full_tensor()[0, 0].item()))
    assert torch.equal(part, y.to_local())
    y.sum().backward()
    assert seen == [1, 2]  # as of plain tensors
    x.grad = None
    moved = x.redistribute(line(2), [Shard(1)])
    moved.mul_(2)
    (moved * moved).sum().backward()
    same(x, seeded(5, 6))
    same(x.grad, 8 * seeded(5, 6))
    with pytest.raises(LayoutError, match="element-wise in-place ops on results of ops"):
        x.redistribute(line(2), [Shard(0)]).mul_(2)
    empty_on_some = laid(seeded(1, 6), line(2), Shard(0), requires_grad=True) * 2
    with pytest.raises(LayoutError, match="must not need a gradient"):
        empty_on_some.mul_(2)
    with pytest.raises(LayoutError, match="inplace is not supported on DTensors"):
        F.dropout(y, inplace=True)


@gathers
@simulate(3)
def test_recorded_writes_on_a_rank_outside_the_mesh():
    mesh = DeviceMesh("cpu", [0, 2])
    x = laid(seeded(5, 6), mesh, Shard(0), requires_grad=True)
    y = x * 2
    y.add_(x).relu_()
    y.sum().backward()
    if mesh.get_coordinate() is not None:
        same(x.grad, 3 * (seeded(5, 6) > 0).to(DTYPE))


@simulate(2)
def test_functions_in_place_without_gradients():
    for placement in (Shard(1), Partial()):
        x, whole, _ = made(placement)
        assert F.elu(x, 0.5, inplace=True) is x
        same(x, F.elu(whole, 0.5))
        assert x.placements == (placement,)


@simulate(2)
def test_a_pending_sum_takes_what_is_linear_as_it_is():
    mesh = line(2)
    x = laid(torch.ones(4), mesh, Partial())
    x.mul_(3).div_(torch.tensor(2.0)).neg_()
    same(x, torch.full((4,), -1.5))
    x.add_(x)
    x.sub_(laid(torch.ones(4), mesh, Partial()))
    same(x, torch.full((4,), -4.0))
    x.copy_(laid(torch.ones(4), mesh, Partial()))
    same(x, torch.ones(4))
    same(x.zero_(), torch.zeros(4))


@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.add_(1),
        lambda x, y: x.exp_(),
        lambda x, y: x.mul_(x),
        lambda x, y: x.add_(y),
        lambda x, y: x.fill_(1),
        lambda x, y: x.copy_(torch.ones(4)),
        lambda x, y: x.clamp_(max=0.5),
        lambda x, y: x.cumsum_(0),
        lambda x, y: torch.nn.functional.relu_(x),
        lambda x, y: x.__ipow__(2),
    ],
)
@simulate(2)
def test_other_writes_into_a_pending_sum_add_up_to_the_result(write):
    mesh, whole, other = line(2), torch.tensor([-1.0, 2, 0, 3]), torch.ones(4)
    part = 3 * whole if mesh.get_local_rank() else -2 * whole
    x = DTensor.from_local(part, mesh, [Partial()])
    same(x, whole)
    write(x, laid(other, mesh, Replicate()))
    write(whole, other)
    same(x, whole)
    assert x.placements == (Partial(),)


@simulate(2)
def test_list_ops_on_mixed_lists():
    mesh = line(2)
    wholes = [seeded(5, 6), seeded(4), seeded(3)]
    ours = [laid(wholes[0], mesh, Shard(0)), laid(wholes[1], mesh, Replicate()), wholes[2].clone()]
    others = [laid(wholes[0], mesh, Shard(1)), laid(wholes[1], mesh, Shard(0)), wholes[2].clone()]
    torch._foreach_add_(ours, others, alpha=2)
    torch._foreach_mul_(ours, 0.5)
    torch._foreach_addcdiv_(ours, others, [1.0 + x * x for x in others], [1.0, 2.0, 3.0])
    torch._foreach_mul_(ours, torch.tensor(2.0))
    roots = torch._foreach_sqrt([x * x for x in ours])
    for i, (x, root, whole) in enumerate(zip(ours, roots, wholes, strict=True)):
        expected = (whole * 1.5 + (i + 1.0) * whole / (1 + whole * whole)) * 2
        if i < 2:
            same(x, expected)
            same(root, expected.abs())
            assert root.placements == x.placements
        else:
            torch.testing.assert_close(x, expected)
            torch.testing.assert_close(root, expected.abs())
    for row in (seeded(6, seed=7), seeded(5, 1, seed=7)):  # broadcast
        copied = ours[0].clone()
        torch._foreach_add_([copied], [laid(row, mesh, Shard(0))])
        same(copied, ours[0].full_tensor() + row)
    torch._foreach_mul_(ours[:1], ours[0].sum())  # a pending scalar is reduced
    scale = expected = (wholes[0] * 1.5 + wholes[0] / (1 + wholes[0] ** 2)) * 2
    same(ours[0], expected * scale.sum())


@simulate(2)
def test_list_ops_refuse_what_they_cannot_do():
    x, whole, mesh = made(Shard(0))
    pending = laid(torch.ones(4), mesh, Partial())
    for norm in torch._foreach_norm([x, x], 1):
        same(norm, torch.linalg.vector_norm(whole, 1))
    with pytest.raises(RuleError, match=r"'_foreach_cumsum': a list op .*clip_grad_norm_"):
        lists.list_op(DTensor, None, "_foreach_cumsum", ([x],), {})
    with pytest.raises(RuleError, match="'_foreach_mul_': operands must not be pending reductions"):
        torch._foreach_mul_([pending], 2.0)
    for first, other in (([x], [whole[:3]]), ([whole], [x]), ([x], [x.sum(1)])):
        with pytest.raises(LayoutError, match="tensors at the same place of all lists must be DT"):
            torch._foreach_add_(first, other)
    same(x, whole)


@simulate(2)
def test_infinite_gradient_on_one_rank_is_found_on_all():
    mesh = line(2)
    grads = [laid(torch.tensor([1.0, float("inf")]), mesh, Shard(0)), torch.ones(2)]
    found, scale = torch.zeros(1), torch.tensor([0.5])
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
    assert found.item() == 1.0
    same(grads[0], torch.tensor([0.5, float("inf")]))


@simulate(4)
def test_a_target_whose_axes_nest_in_another_order():
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    whole = seeded(8)
    plain = laid(whole, mesh, Shard(0), Shard(0))
    swapped = Layout(mesh, (Shard(0), Shard(0)), (8,), (1, 0))
    part = whole[swapped.slices(mesh.get_rank())]
    for change in (torch.Tensor.copy_, torch.Tensor.add_):
        target = DTensor(torch.zeros_like(part), swapped)
        change(target, plain)
        assert torch.equal(target.to_local(), part)


@simulate(4)
def test_operands_on_a_mesh_of_other_axes_are_refused():
    x = laid(seeded(8), DeviceMesh("cpu", [[0, 1], [2, 3]]), Shard(0), Replicate())
    y = laid(seeded(8), line(4), Shard(0))
    with pytest.raises(LayoutError, match=r"DTensor op 'add_'.*operands must be on one mesh"):
        x.add_(y)
