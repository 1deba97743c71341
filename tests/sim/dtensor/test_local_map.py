# SPDX-License-Identifier: Apache-2.0
"""local_map, and the factories empty, zeros, ones and full."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from hyper_parallel import LayoutError, Partial, Replicate, Shard, local_map, simulate
from hyper_parallel.dtensor import empty, full, ones, rand, randn, zeros
from hyper_parallel.runtime import DeviceMesh, init_device_mesh
from support.dtensors import laid, line, parameter, same, seeded


def product(x, w):
    assert type(x) is type(w) is torch.Tensor
    return x @ w


@pytest.mark.parametrize("inner", [6, 5], ids=["even", "uneven"])
def test_a_row_wise_product_and_its_gradients(inner):
    @simulate(2)
    def run():
        mesh = line(2)
        wholes = seeded(4, inner), seeded(inner, 3, seed=1)
        x, w = (
            laid(wholes[0], mesh, Replicate(), requires_grad=True),
            parameter(wholes[1], mesh, Shard(0)),
        )
        mapped = local_map(product, [Partial()], ([Shard(1)], [Shard(0)]), redistribute_inputs=True)
        plain = [whole.clone().requires_grad_() for whole in wholes]
        for _ in range(2):
            y = mapped(x, w)
            assert y.placements == (Partial(),)
            same(y, product(*plain))
            y.redistribute(mesh, [Replicate()]).square().sum().backward()
            product(*plain).square().sum().backward()
        for ours, wanted in zip((x, w), plain, strict=True):
            same(ours.grad, wanted.grad)

    run()


@simulate(3)
def test_gradients_that_are_shares_are_added_up():
    mesh = line(3)
    whole, rows = seeded(5), seeded(7, 5, seed=1)
    scale = laid(whole, mesh, Replicate(), requires_grad=True)
    mapped = local_map(
        torch.mul,
        out_placements=[Shard(0)],
        in_grad_placements=([Shard(0)], [Partial()]),
    )
    same(mapped(laid(rows, mesh, Shard(0)), scale), rows * whole)
    mapped(laid(rows, mesh, Shard(0)), scale).sum().backward()
    same(scale.grad, rows.sum(0))


@simulate(2)
def test_several_results_plain_arguments_and_the_decorator():
    mesh = line(2)

    @local_map(out_placements=([Shard(0)], None, [Replicate()]), in_placements=([Shard(0)], None))
    def pieces(rows, factor):
        """Scale rows."""
        return rows * factor, rows.shape[0], torch.ones(2)

    assert pieces.__doc__ == "Scale rows."
    x = laid(seeded(5, 3), mesh, Shard(0))
    scaled, count, other = pieces(x, 2.0)
    same(scaled, seeded(5, 3) * 2)
    assert count == x.to_local().shape[0]
    same(other, torch.ones(2))
    rows, count, other = pieces(seeded(4, 3), 1.0)  # no DTensor: the function as it is
    assert type(rows) is type(other) is torch.Tensor
    assert count == 4


@simulate(4)
def test_results_on_a_mesh_of_two_axes_add_up_from_the_inner_one():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = laid(seeded(5, 3), mesh, Shard(0), Shard(0))
    same(local_map(torch.neg, [Shard(0), Shard(0)])(x), -seeded(5, 3))
    same(local_map(torch.t, [Shard(1), Shard(1)])(x), seeded(5, 3).t())


def test_misuse_is_refused_on_every_rank():
    def run():
        mesh = line(2)
        x = laid(seeded(4, 6), mesh, Shard(0))
        rows = [Shard(0)]
        for mapped, args, kwargs, text in (
            (local_map(torch.neg, rows, ([Shard(1)],)), (x,), {}, r"argument 0 must have the pl"),
            (local_map(torch.neg, rows, (None,)), (x,), {}, "argument 0, a DTensor, must have"),
            (local_map(torch.neg, rows, (rows, rows)), (x,), {}, r"in_placements must have one"),
            (
                local_map(torch.mul, rows, (rows, rows)),
                (x, 2.0),
                {},
                "argument 1, which is no tensor",
            ),
            (local_map(torch.neg), (x,), {}, "the placements of result 0 must be given"),
            (local_map(len, rows), (x,), {}, "the placements of result 0 must be given"),
            (local_map(torch.neg, (rows, rows)), (x,), {}, "one entry per result"),
            (local_map(torch.neg, rows), (), {"input": x}, "must be passed by position"),
        ):
            with pytest.raises(LayoutError, match=f"^local_map: .*{text}"):
                mapped(*args, **kwargs)
        alone = DeviceMesh("cpu", [1])
        elsewhere = laid(seeded(4), alone, Replicate())
        if alone.get_coordinate() is None:
            with pytest.raises(LayoutError, match="only a rank of the mesh may run"):
                local_map(torch.neg, [Replicate()])(elsewhere)

    simulate(2).run(run)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial("max")], ids=str)
def test_factories_make_what_torch_makes(placement):
    @simulate(2)
    def run():
        mesh = line(2)
        on = {"device_mesh": mesh, "placements": [placement]}
        same(zeros(5, 3, **on), torch.zeros(5, 3))
        same(ones((5, 3), dtype=torch.bfloat16, **on), torch.ones(5, 3).bfloat16())
        same(full(torch.Size((5, 3)), 2, **on), torch.full((5, 3), 2))
        same(full([5, 3], math.inf, **on), torch.full((5, 3), math.inf))
        assert empty(5, 3, **on).shape == (5, 3)
        with mesh:
            leaf = ones(5, 3, requires_grad=True)
        assert leaf.is_leaf
        assert leaf.requires_grad
        assert leaf.placements == (Replicate(),)

    run()


@simulate(2)
def test_factories_of_pending_sums_and_refusals():
    mesh = line(2)
    on = {"device_mesh": mesh, "placements": [Partial()]}
    same(ones(3, **on), torch.ones(3))
    same(full((3,), 2.5, **on), torch.full((3,), 2.5))
    with pytest.raises(LayoutError, match="ones: layout must be"):
        ones(3, layout=torch.sparse_coo, device_mesh=mesh)
    with pytest.raises(LayoutError, match=r"needs a floating point tensor"):
        ones(3, dtype=torch.int64, device_mesh=mesh, placements=[Partial("avg")])
    with pytest.raises(LayoutError, match="zeros: device_mesh must be a DeviceMesh"):
        zeros(3)


FACTORIES = {f.__name__: f for f in (empty, zeros, ones, full, rand, randn)}


def test_signatures_are_torchs():
    import torch.distributed.tensor as theirs
    from torch.distributed.tensor import experimental

    for name, ours in FACTORIES.items():
        wanted = inspect.signature(getattr(theirs, name)).parameters
        got = inspect.signature(ours).parameters
        assert [*got] == [*wanted]
        assert [p.kind for p in got.values()] == [p.kind for p in wanted.values()]
        assert [p.default for p in got.values()] == [p.default for p in wanted.values()]
    wanted = inspect.signature(experimental.local_map).parameters
    got = inspect.signature(local_map).parameters
    assert [(p.name, p.kind, p.default) for p in got.values()] == [
        (p.name, p.kind, p.default) for p in wanted.values()
    ]
