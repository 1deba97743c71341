# SPDX-License-Identifier: Apache-2.0
"""What happens to a call that is not the plain case: no rule, odd arguments, refusals, reads."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import DTensor, Partial, Replicate, Shard, rules, simulate, strict_rules
from hyper_parallel.core.rule import parse_rule
from hyper_parallel.dtensor import decisions
from hyper_parallel.errors import HyperParallelError, LayoutError, RuleError
from hyper_parallel.runtime import DeviceMesh, current_rank
from support.device import DEVICE, DTYPE
from support.dtensors import laid, line, same, seeded

gathers = pytest.mark.filterwarnings("ignore:DTensor op .* has no sharding rule")


def made(placement=None, *shape, requires_grad=False):
    mesh = line(2)
    whole = seeded(*(shape or (4, 6)))
    return laid(whole, mesh, placement or Shard(0), requires_grad=requires_grad), whole


def test_op_without_a_rule_gathers_and_warns_once_at_the_users_line():
    @simulate(2)
    def run():
        x, whole = made(requires_grad=True)
        for _ in range(2):
            result = torch.linalg.vander(x)
        same(result, torch.linalg.vander(whole))
        assert result.placements == (Replicate(),)
        result.sum().backward()
        plain = whole.requires_grad_()
        torch.linalg.vander(plain).sum().backward()
        same(x.grad, plain.grad)

    decisions._warned.discard("linalg_vander")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert len(caught) == 1
    assert str(caught[0].message) == (
        "DTensor op 'linalg_vander' has no sharding rule: its operands are gathered on every rank."
        " Teach it with register_op_rule('linalg_vander', '... -> ...')."
    )
    assert caught[0].filename == __file__


def test_call_that_its_rule_does_not_describe_says_so():
    @simulate(2)
    def run():
        x, whole = made()
        same(x.view(torch.int64), whole.view(torch.int64))

    decisions._warned.discard("view")
    with pytest.warns(UserWarning, match="'view' has no sharding rule for this call: .* Move them"):
        run()


@gathers
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.repeat(2, 1),
        lambda x: x.movedim(0, 1),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: x.max(1).values,
        lambda x: x.max(),
        lambda x: x.norm(),
        lambda x: x.diagonal(),
        lambda x: x.clamp(x.detach() - 1, x.detach() + 1),
        lambda x: x.flip(0, 1),
        lambda x: x.roll(1),
        lambda x: F.pad(x, (1, 1)),
        lambda x: F.mse_loss(x, x * 2),
        lambda x: x[1],
        lambda x: x[:, 1:],
        lambda x: x[-1, ..., None],
        lambda x: x[[0, 2]],
        lambda x: x[x > 0],
        lambda x: x.var(False),
        lambda x: x.sum(dim=[]),
        lambda x: F.cross_entropy(x, x.argmax(1), reduce=False),
        lambda x: x.view(torch.int64),
        lambda x: torch.atleast_3d(x),
    ],
)
def test_unusual_calls_give_the_plain_values(op):
    @simulate(2)
    def run():
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            x, whole = made(placement, requires_grad=True)
            whole.requires_grad_()
            ours, plain = op(x), op(whole)
            same(ours, plain)
            if plain.requires_grad:
                ours.backward(torch.ones_like(ours).detach())
                plain.backward(torch.ones_like(plain))
                same(x.grad, whole.grad)

    run()


@simulate(2)
def test_keywords_that_change_the_meaning_are_honoured():
    whole = torch.full((4, 3), 0.6)
    mesh = line(2)
    pending = DTensor.from_local(whole / 2, mesh, [Partial()])
    assert pending.sum(dtype=torch.int64).item() == 0  # 0.6 each, not 0.3 twice
    ones = DTensor.from_local(torch.full((3,), 0.6), mesh, [Partial()])
    assert ones.sum(dtype=torch.int64).item() == 3
    assert ones.cumsum(0, dtype=torch.int32).full_tensor().tolist() == [1, 2, 3]
    x, wide = made(Shard(1))
    same(x.sum(1, dtype=torch.float32), wide.sum(1, dtype=torch.float32))
    same(x.mean((0, 1), keepdim=True), wide.mean((0, 1), keepdim=True))
    same(x.sum(axis=1, keepdims=True), wide.sum(1, True))
    same(torch.sum(input=x, dim=0), wide.sum(0))


@simulate(2)
def test_factories_need_no_communication():
    x, whole = made()
    for name, args in {
        "new_zeros": ((2, 3),),
        "new_ones": (2, 3),
        "new_full": ((2,), 3.0),
        "new_tensor": ([1.0, 2.0],),
    }.items():
        ours = getattr(x, name)(*args)
        same(ours, getattr(whole, name)(*args))
        assert ours.placements == (Replicate(),)
    assert x.new_empty(2, 5).shape == (2, 5)
    assert x.new_zeros(2, requires_grad=True).requires_grad
    for like in (torch.zeros_like, torch.ones_like, torch.empty_like):
        ours = like(x, dtype=torch.float32, requires_grad=True)
        assert ours.placements == x.placements
        assert ours.dtype == torch.float32
        assert ours.requires_grad
        assert ours.is_leaf


@pytest.mark.skipif(DEVICE != "cpu", reason="NumPy reads CPU memory only")
@simulate(2)
def test_reads_by_numpy():
    x, whole = made()
    assert np.array_equal(x.numpy(), whole.numpy())
    assert np.array_equal(np.asarray(x), whole.numpy())


@simulate(2)
def test_reads():
    x, whole = made()
    total = x.sum()
    assert total.item() == pytest.approx(whole.sum().item())
    assert float(total) == pytest.approx(float(whole.sum()))
    assert int(total * 10) == int(whole.sum() * 10)
    assert f"{total:.3f}" == f"{whole.sum():.3f}"
    assert bool((x == x).sum() == 24)
    assert x.tolist() == whole.tolist()
    assert torch.equal(x, laid(whole, line(2), Shard(1)))
    assert not torch.equal(x, x + 1)
    assert torch.allclose(x, x + 1e-12)
    assert [row.tolist() for row in x] == whole.tolist()
    assert list(range(6))[x.argmax(1)[0]] == int(whole.argmax(1)[0])
    assert torch.is_tensor(x)
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        x.item()
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(x)
    needs_grad = laid(whole, line(2), Shard(0), requires_grad=True)
    assert needs_grad.sum().item() == pytest.approx(whole.sum().item())


@simulate(2)
def test_data_dependent_ops_are_refused():
    x, _ = made()
    for op in (torch.nonzero, torch.unique, lambda t: t.masked_select(t > 0), torch.argwhere):
        with pytest.raises(RuleError, match=r"must have a rule for this call, but got layouts="):
            op(x)


@simulate(2)
def test_data_dependent_ops_run_on_what_every_rank_holds():
    x, whole = made(Replicate())
    for op in (torch.nonzero, torch.unique, lambda t: t.masked_select(t > 0), torch.argwhere):
        same(op(x), op(whole))


@simulate(2)
def test_strict_rules_makes_a_gather_an_error_and_ends_with_the_block():
    x, whole = made()
    refused = pytest.raises(RuleError, match=r"'linalg_vander': .* register_op_rule\(")
    with refused, strict_rules():
        with strict_rules():
            same(x + 1, whole + 1)
            assert torch.equal(x, x) and f"{x.sum():.3f}" == f"{whole.sum():.3f}"
            assert x.sum().item() == pytest.approx(whole.sum().item())
        torch.linalg.vander(x)
    assert not getattr(decisions._strict, "on", False)


@simulate(2)
def test_plain_tensors_mixed_in_are_refused():
    x, _ = made()
    plain = torch.ones(4, 6).to(DTYPE)
    for op, argument in (
        (lambda: x + plain, 1),
        (lambda: plain * x, 0),
        (lambda: torch.cat([x, plain]), 1),
        (lambda: F.linear(plain, x), 0),
        (lambda: F.linear(x, x, bias=plain[:, 0]), 2),
    ):
        with pytest.raises(
            LayoutError,
            match=rf"DTensor op '\w+': every tensor operand must be a DTensor, but got "
            rf"argument={argument}, shape=.*\. Say where the plain tensor is",
        ):
            op()
    same(x * torch.tensor(2.0), x.full_tensor() * 2)
    with pytest.raises(LayoutError, match=r"'cross_entropy': .*inside `with loss_parallel\(\):`"):
        F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long))


@simulate(2)
def test_two_meshes_are_refused():
    x, whole = made()
    other = laid(whole, DeviceMesh(DEVICE, [1, 0]), Shard(0))
    with pytest.raises(LayoutError, match=r"DTensor op 'add': all operands must be on one mesh"):
        x + other
    with pytest.raises(LayoutError, match=r"DTensor op 'add_': all operands must be on one mesh"):
        x.add_(other)


@simulate(2)
def test_options_that_write_or_give_sparse_gradients_are_refused():
    x, _ = made()
    ids = laid(torch.tensor([0, 1]), line(2), Replicate())
    with pytest.raises(LayoutError, match="inplace is not supported on DTensors, but got inplace="):
        nn.Dropout(inplace=True)(x)
    with pytest.raises(LayoutError, match="max_norm is not supported"):
        F.embedding(ids, x, max_norm=1.0)
    with pytest.raises(LayoutError, match="sparse is not supported"):
        F.embedding(ids, x, sparse=True)


@gathers
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_embedding_gradient_scaled_by_frequency(placement):
    @simulate(2)
    def run():
        mesh = line(2)
        ids = torch.tensor([0, 3, 3, 1])
        whole = seeded(4, 6).requires_grad_()
        weight = laid(whole, mesh, placement, requires_grad=True)
        for i, w in ((laid(ids, mesh, Replicate()), weight), (ids, whole)):
            F.embedding(i, w, scale_grad_by_freq=True).sum().backward()
        same(weight.grad, whole.grad)

    run()


@simulate(2)
def test_embedding_over_a_cut_vocabulary_checks_its_ids():
    mesh = line(2)
    weight = laid(seeded(3, 2), mesh, Shard(0))
    for bad in (3, -1):
        with pytest.raises(IndexError):
            F.embedding(laid(torch.tensor([0, bad]), mesh, Replicate()), weight)


@simulate(2)
def test_calls_that_torch_refuses_fail_with_torchs_text():
    x, _ = made()
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        torch.mm(x, x)
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.sum(5)
    with pytest.raises(RuntimeError, match=r"shape '\[7\]' is invalid for input of size 24"):
        x.view(7)


@simulate(2)
def test_a_part_is_assigned_from_the_same_layout_only():
    x, whole = made()
    with pytest.raises(HyperParallelError, match=r"aten.copy_: torch must not run this op on the"):
        x.real = laid(2 * whole, x.device_mesh, Shard(1))
    same(x, whole)
    x.real = laid(2 * whole, x.device_mesh, Shard(0))
    same(x, 2 * whole)


@simulate(2)
def test_torch_may_not_reach_below():
    x, _ = made()
    refused = pytest.raises(HyperParallelError, match=r"aten.exp: torch must not run this op on")
    with refused, torch._C.DisableTorchFunctionSubclass():
        torch.exp(x)


@simulate(2)
def test_same_size_compares_global_shapes():
    x, whole = made()
    assert x.is_same_size(laid(whole, line(2), Shard(1)))
    assert not x.is_same_size(laid(seeded(2, 6), line(2), Replicate()))


@simulate(2)
def test_decisions_are_cached_per_rank_and_layout():
    mesh = line(2)
    whole = seeded(5, 6)
    for _ in range(2):
        for placement in (Shard(0), Shard(1)):
            x = laid(whole, mesh, placement)
            same(x.view(5, 2, 3), whole.view(5, 2, 3))
            same(x.expand(2, 5, 6), whole.expand(2, 5, 6))
    ids, table = torch.tensor([4, 0, 2]), seeded(5, 3)
    for _ in range(2):
        ours = F.embedding(laid(ids, mesh, Replicate()), laid(table, mesh, Shard(0)))
        same(ours, table[ids])
    assert current_rank() == mesh.get_rank()


@gathers
def test_rule_that_is_registered_later_is_used(monkeypatch):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))

    @simulate(2)
    def placed():
        x, whole = made()
        found = torch.linalg.vander(x)
        same(found, torch.linalg.vander(whole))
        return found.placements

    assert placed() == [(Replicate(),)] * 2
    rules.register("linalg_vander", parse_rule("... _ -> ... _ _"))
    assert placed() == [(Shard(0),)] * 2
