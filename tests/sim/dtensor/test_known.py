# SPDX-License-Identifier: Apache-2.0
"""Decisions are kept by all that changes them: calls that look alike are decided apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
    rules,
    simulate,
    strict_rules,
)
from hyper_parallel.core.rule import parse_rule
from hyper_parallel.errors import LayoutError, RuleError
from support.device import DTYPE
from support.dtensors import laid, line, same, seeded

gathers = pytest.mark.filterwarnings("ignore:DTensor op .* has no sharding rule")

ALIKE = {
    "a bool, an int": [
        lambda x: x.var(0),
        lambda x: x.var(False),
        lambda x: x.var(1),
        lambda x: x.var(True),
        lambda x: x.sum((0, 1)),
        lambda x: x.sum(0),
    ],
    "keyword names": [
        lambda x: x.sum(0, keepdim=True),
        lambda x: x.sum(0, dtype=torch.float32),
        lambda x: x.sum(dim=0),
        lambda x: x.sum(dim=1),
        lambda x: torch.add(x, x, alpha=2),
        lambda x: torch.add(x, x),
    ],
    "None and absent": [
        lambda x: x.sum(None),
        lambda x: x.sum(),
        lambda x: x.clamp(None, 0.1),
        lambda x: x.clamp(0.1, None),
        lambda x: x.clamp(0.1),
        lambda x: F.layer_norm(x, (6,), None, x[0]),
        lambda x: F.layer_norm(x, (6,), x[0], None),
        lambda x: F.layer_norm(x, (6,)),
    ],
    "scalars on either side": [
        lambda x: 2 - x,
        lambda x: x - 2,
        lambda x: 2 ** x.detach(),
        lambda x: x**2,
        lambda x: x**2.0,
        lambda x: x / 2,
        lambda x: 2 / x,
        lambda x: torch.where(x.detach() > 0, x, 1.0),
        lambda x: torch.where(x.detach() > 0, 1.0, x),
        lambda x: x * torch.tensor(2.0),
        lambda x: x * torch.tensor(2.0, dtype=torch.float64),
        lambda x: x * float("nan"),
    ],
    "shapes": [
        lambda x: x.view(4, 6),
        lambda x: x.view((4, 2, 3)),
        lambda x: x.view([4, 3, 2]),
        lambda x: x.view(-1, 6),
        lambda x: x.reshape(4, -1),
        lambda x: x.flatten(),
        lambda x: x.flatten(0),
        lambda x: x.unflatten(1, (2, 3)),
        lambda x: x.unflatten(1, (3, 2)),
    ],
    "indices": [
        lambda x: x[1:3],
        lambda x: x[1:4],
        lambda x: x[1::2],
        lambda x: x[:, 1:3],
        lambda x: x[..., 1],
        lambda x: x[1],
        lambda x: x[1, ...],
        lambda x: x[None],
        lambda x: x[[1, 2]],
        lambda x: x[:, [1, 2]],
    ],
    "dims": [
        lambda x: x.transpose(0, 1),
        lambda x: x.transpose(0, 0),
        lambda x: x.flip(0),
        lambda x: x.flip(1),
        lambda x: x.softmax(0),
        lambda x: x.softmax(-1),
        lambda x: x.softmax(-1, dtype=torch.float32),
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.cat([x, x, x], dim=1),
        lambda x: torch.stack((x, x)),
        lambda x: x.split(2)[0],
        lambda x: x.split([1, 3])[0],
        lambda x: x.chunk(2, 1)[1],
    ],
}


@gathers
@pytest.mark.parametrize("kind", ALIKE)
def test_calls_that_look_alike_are_decided_apart(kind):
    @simulate(2)
    def run():
        mesh = line(2)
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            x = laid(seeded(4, 6), mesh, placement, requires_grad=True)
            plain = seeded(4, 6).requires_grad_()
            for calls in (ALIKE[kind], ALIKE[kind][::-1], ALIKE[kind]):
                for call in calls:
                    ours, wanted = call(x), call(plain)
                    torch.testing.assert_close(
                        ours.detach().full_tensor(), wanted.detach(), equal_nan=True
                    )
                    assert ours.dtype == wanted.dtype
                    if wanted.requires_grad and not wanted.isnan().any():
                        seed = seeded(*wanted.shape, dtype=wanted.dtype)
                        for leaf, out in ((x, ours), (plain, wanted)):
                            leaf.grad = None
                            grad = laid(seed, mesh, Replicate()) if leaf is x else seed
                            out.backward(grad)
                        same(x.grad, plain.grad)

    run()


@simulate(2)
def test_dtypes_layouts_meshes_and_grad_mode_are_told_apart():
    for mesh in (line(2), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))):
        for dtype in (torch.float64, torch.float32, torch.int64):
            for shape in ((4, 6), (6, 4), (5, 3)):
                for placement in (Shard(0), Shard(1), Replicate()):
                    whole = (10 * seeded(*shape)).to(dtype)
                    x = laid(whole, mesh, placement)
                    for _ in range(2):
                        same(x * x, whole * whole)
                        same(x.t(), whole.t())
                        assert (x * x).device_mesh is mesh
    x = laid(seeded(4, 6), mesh, Shard(0), requires_grad=True)
    for _ in range(2):
        assert (x * x).requires_grad
        with torch.no_grad():
            assert not (x * x).requires_grad
        with torch.inference_mode():
            assert not (x * x).requires_grad
        assert not (x.detach() * x.detach()).requires_grad


@simulate(2)
def test_which_operand_needs_a_gradient_may_change():
    mesh = line(2)
    wholes = seeded(4, 6), seeded(8, 6, seed=1)
    for needs in ((True, False), (False, True), (True, True), (False, False), (True, False)):
        x, w = (
            laid(whole, mesh, p, requires_grad=need)
            for whole, p, need in zip(wholes, (Replicate(), Shard(0)), needs, strict=True)
        )
        plain = [whole.clone().requires_grad_(n) for whole, n in zip(wholes, needs, strict=True)]
        if any(needs):
            F.linear(x, w).sum().backward()
            F.linear(*plain).sum().backward()
        for ours, wanted in zip((x, w), plain, strict=True):
            assert (ours.grad is None) == (wanted.grad is None)
            if wanted.grad is not None:
                same(ours.grad, wanted.grad)


@simulate(2)
def test_a_scalar_that_starts_to_need_a_gradient_gets_it():
    mesh = line(2)
    x = laid(seeded(4, 6), mesh, Shard(0))
    scale = torch.tensor(2.0, dtype=DTYPE)
    same(x * scale, seeded(4, 6) * 2)
    scale.requires_grad_()
    (x * scale).sum().backward()
    torch.testing.assert_close(scale.grad, seeded(4, 6).sum())


@gathers
def test_a_rule_that_is_replaced_is_used_and_strict_is_asked_each_time(monkeypatch):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))

    @simulate(2)
    def placed():
        x = laid(seeded(4, 6), line(2), Shard(0))
        return torch.sinc(x).placements, torch.tanh(x).placements

    rules.register("sinc", parse_rule("... -> ..."), replace=True)
    assert placed() == [((Shard(0),), (Shard(0),))] * 2
    rules.register("sinc", parse_rule("... _ -> ... _"), replace=True)
    rules.register("tanh", parse_rule("_ ... -> _ ..."), replace=True)
    assert placed() == [((Shard(0),), (Shard(1),))] * 2

    @simulate(2)
    def strict():
        x = laid(seeded(4, 6), line(2), Shard(0))
        for _ in range(2):
            same(torch.linalg.vander(x), torch.linalg.vander(seeded(4, 6)))
            with pytest.raises(RuleError, match="'linalg_vander'"), strict_rules():
                torch.linalg.vander(x)

    strict()


@simulate(2)
def test_plain_tensors_count_as_replicated_within_the_block_only():
    mesh = line(2)
    x = laid(seeded(4, 6), mesh, Shard(0), requires_grad=True)
    whole = seeded(4, 6).requires_grad_()
    other = seeded(6, seed=1).requires_grad_()
    plain = seeded(6, seed=1).requires_grad_()
    with implicit_replication():
        with implicit_replication():
            same(torch.cat([x, seeded(2, 6)]), torch.cat([whole, seeded(2, 6)]))
        (x * other).sum().backward()  # still within the outer block
    (whole * plain).sum().backward()
    same(x.grad, whole.grad)
    torch.testing.assert_close(other.grad, plain.grad)
    with torch.no_grad(), implicit_replication():
        x.mul_(seeded(4, 6, seed=2)).add_(seeded(4, 6, seed=3))
        torch._foreach_add_([x], [seeded(4, 6, seed=4)])
        expected = whole * seeded(4, 6, seed=2) + seeded(4, 6, seed=3) + seeded(4, 6, seed=4)
        same(x, expected)
        with pytest.raises(LayoutError, match="that is written to must be a DTensor"):
            seeded(4, 6).add_(x)
    with pytest.raises(ZeroDivisionError), implicit_replication():
        raise ZeroDivisionError
    refused = r"'mul': every tensor operand must be a DTensor, but got argument=1, shape=\(6,\)\..*"
    with pytest.raises(LayoutError, match=refused + "with implicit_replication"):
        x * other
    with pytest.raises(LayoutError, match=r"'mul_': every tensor operand.*implicit_replication"):
        x.detach().mul_(seeded(4, 6))


@simulate(2)
def test_calls_are_known_again_whatever_made_their_tensors():
    mesh = line(2)
    x, mask = laid(seeded(4, 6), mesh, Shard(0)), torch.ones(4, 6, dtype=torch.float64)
    leaf = seeded(4, 6).requires_grad_()
    counts = []
    for _ in range(2):
        with implicit_replication():
            x * mask
        F.dropout(x, 0.5) + distribute_tensor(leaf * 2, mesh, [Shard(0)])
        DTensor.from_local(leaf * 2, mesh, [Shard(1)]).sin()
        counts.append(len(mesh.decisions))
    assert counts[0] == counts[1]


@simulate(2)
def test_numbers_without_dims_always_count_as_replicated():
    mesh = line(2)
    x = laid(seeded(4, 6), mesh, Shard(0))
    half = torch.tensor(0.5, dtype=torch.float64)
    same(half * x + half, 0.5 * seeded(4, 6) + 0.5)
    same(torch.maximum(x, half), torch.maximum(seeded(4, 6), half))
    x.mul_(half).sub_(half, alpha=2)
    same(x, seeded(4, 6) * 0.5 - 1)
    torch._foreach_mul_([x], half)
    same(x, seeded(4, 6) * 0.25 - 0.5)


@simulate(2)
def test_ops_that_are_not_linear_reduce_a_pending_sum_first():
    mesh = line(2)
    parts = distribute_tensor(seeded(2, 4, 6), mesh, [Shard(0)]).to_local()[0]
    pending = DTensor.from_local(parts, mesh, [Partial()])
    whole = seeded(2, 4, 6).sum(0)
    for op in (torch.exp, torch.relu, torch.abs, lambda t: t * t, lambda t: t > 0, F.gelu):
        for _ in range(2):
            same(op(pending), op(whole))
    for op in (torch.neg, lambda t: t * 3, lambda t: t.sum(0), lambda t: t.t(), lambda t: t / 2):
        for _ in range(2):
            assert op(pending).placements == (Partial(),)
            same(op(pending), op(whole))


@simulate(2)
def test_a_pending_sum_known_by_heart():
    mesh, parts = line(2), ([-1.0, 3, 4], [2.0, -5, -4])

    def pending():
        return DTensor.from_local(torch.tensor(parts[mesh.get_local_rank()]), mesh, [Partial()])

    def values(x):
        return [round(value, 5) for value in x.full_tensor().flatten().tolist()]

    for _ in range(2):
        p = pending()
        assert values(abs(p)) == [1, 2, 0]
        assert values(F.relu(p)) == [1, 0, 0]
        assert values(p.max()) == [1]
        assert values(p.norm()) == values(torch.linalg.vector_norm(p)) == [2.23607]
        assert values(p == 0) == [False, False, True]
        assert values(p.exp()) == [2.71828, 0.13534, 1]
        assert values(p.softmax(0)) == [0.70538, 0.03512, 0.2595]
        assert values(p.clamp_(max=0.5)) == [0.5, -2, 0]
        assert values(p.abs_()) == [0.5, 2, 0] and p.placements == (Partial(),)
    rows = laid(torch.ones(8, 8), mesh, Shard(0))
    with pytest.raises(LayoutError, match="a view that was gathered"):
        torch.nn.init.zeros_(rows[:2])
    assert rows.sum().item() == 64
    whole = laid(torch.ones(8, 8), mesh, Replicate())
    torch.nn.init.zeros_(whole[:2])
    assert whole.sum().item() == 48


TWICE = {
    "linear": lambda x: F.linear(weight=x, input=x),
    "matmul": lambda x: torch.matmul(other=x, input=x),
    "addmm": lambda x: torch.addmm(x, mat2=x, mat1=x),
    "linear in order": lambda x: F.linear(x, weight=x),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
def test_one_tensor_may_be_named_twice_in_any_order(placement):
    @simulate(2)
    def run():
        x = laid(seeded(4, 4), line(2), placement, requires_grad=True)
        whole = seeded(4, 4).requires_grad_()
        for call in TWICE.values():
            for _ in range(2):
                ours, wanted = call(x), call(whole)
                same(ours, wanted)
                ours.sum().backward()
                wanted.sum().backward()
        same(x.grad, whole.grad)

    run()
