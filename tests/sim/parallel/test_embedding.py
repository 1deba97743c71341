# SPDX-License-Identifier: Apache-2.0
"""An Embedding under ColwiseParallel and RowwiseParallel equals the dense one, gradients too."""

import copy
import itertools

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    PlanError,
    Replicate,
    RowwiseParallel,
    Shard,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from support.dense import assert_same, cut, cut_cotangent, join, spread
from support.device import DEVICE, DTYPE

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
TABLE_DIM = {"colwise": 1, "rowwise": 0}
GIVEN = [Replicate(), Shard(-1), Shard(0), Partial()]
WANTED = [Replicate(), Shard(-1), Shard(0), Shard(1), Partial()]


def compare(kind, style, mesh, *, ids, vocab=7, width=6, arrival="plain", **options):
    """Run one table dense and parallel, on this rank; give the local output and the dense one."""
    rank, size = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(0)
    dense = nn.Embedding(vocab, width, dtype=DTYPE, **options)
    table = style.apply(copy.deepcopy(dense), mesh)
    y = dense(ids)
    grad = torch.randn_like(y)
    y.backward(grad)
    declared = style.input_layouts[0]
    given = spread(ids, declared, rank, size)
    if arrival == "declared":
        given = DTensor.from_local(given, mesh, [declared], shape=ids.shape)
    elif arrival == "elsewhere":
        given = DTensor.from_local(cut(ids, 0, rank, size), mesh, [Shard(0)], shape=ids.shape)
    out = table(given)
    wanted = style.output_layouts[0]
    if not style.use_local_output:
        assert out.shape == y.shape
        out = out.to_local()
    out.backward(cut_cotangent(grad, wanted, rank, size))
    want = cut(dense.weight.grad, TABLE_DIM[kind], rank, size)
    assert_same(table.weight.grad.to_local(), want, "table")
    return out.detach(), y.detach()


def compare_all(tp, cases):
    def run():
        mesh = init_device_mesh(DEVICE, (tp,))
        return [compare(kind, style, mesh, **options) for kind, style, options in cases]

    for (_, style, _), *ranks in zip(cases, *simulate(tp).run(run), strict=True):
        got = join([local for local, _ in ranks], style.output_layouts[0])
        assert_same(got, ranks[0][1], f"output of {style}")


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", STYLES)
def test_every_pair_of_layouts_equals_dense(kind, tp):
    ids = torch.tensor([[0, 3, 6, 4, 6], [6, 6, 1, 2, 5], [1, 1, 0, 3, 2]])
    compare_all(
        tp,
        [
            (
                kind,
                STYLES[kind](input_layouts=given, output_layouts=wanted, use_local_output=local),
                {"ids": ids, "arrival": arrival},
            )
            for given, wanted, local in itertools.product(GIVEN, WANTED, (True, False))
            for arrival in ("plain", "declared", "elsewhere")
        ],
    )


@pytest.mark.parametrize(("vocab", "width"), [(1, 1), (3, 2), (2, 9), (9, 2), (5, 5)])
@pytest.mark.parametrize("kind", STYLES)
def test_more_ranks_than_rows_or_columns_equals_dense(kind, vocab, width):
    ids = torch.arange(6).reshape(2, 3) % vocab
    styles = [STYLES[kind](input_layouts=Replicate(), output_layouts=p) for p in WANTED]
    sizes = {"ids": ids, "vocab": vocab, "width": width}
    compare_all(4, [(kind, style, sizes) for style in styles])


@pytest.mark.parametrize("padding", [0, 3, 6, -1])
@pytest.mark.parametrize("kind", STYLES)
def test_the_padding_row_gets_no_gradient(kind, padding):
    ids = torch.tensor([[0, 3, 6, 4], [6, 3, 0, 2]])
    style = STYLES[kind](input_layouts=Replicate(), output_layouts=Replicate())
    compare_all(3, [(kind, style, {"ids": ids, "padding_idx": padding})])


def test_a_column_cut_table_may_scale_gradients_by_frequency():
    ids = torch.tensor([[0, 3, 3, 3], [6, 3, 0, 2]])
    options = {"ids": ids, "scale_grad_by_freq": True}
    compare_all(2, [("colwise", ColwiseParallel(output_layouts=Replicate()), options)])


@pytest.mark.parametrize("shape", [(), (4,), (0,), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("kind", STYLES)
def test_ids_of_any_number_of_dims(kind, shape):
    ids = torch.randint(7, shape)
    style = STYLES[kind](input_layouts=Replicate(), output_layouts=Replicate())
    compare_all(2, [(kind, style, {"ids": ids})])


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("vocab", [1, 7])
@pytest.mark.parametrize("wrong", [7, -1])
@pytest.mark.parametrize("kind", STYLES)
def test_an_unknown_id_raises_on_every_rank_as_dense_does(kind, wrong, vocab, width):
    def run():
        mesh = init_device_mesh(DEVICE, (3,))
        style = STYLES[kind](input_layouts=Replicate(), output_layouts=Replicate())
        return style.apply(nn.Embedding(vocab, width), mesh)(torch.tensor([[0, wrong]]))

    with pytest.raises(IndexError) as dense:
        nn.Embedding(vocab, width)(torch.tensor([[0, wrong]]))
    for rank, outcome in enumerate(simulate(3).outcomes(run)):
        if kind == "colwise" and cut(torch.empty(1, width), 1, rank, 3).numel() == 0:
            # Torch has another text where it looks up rows of no columns.
            assert isinstance(outcome, RuntimeError)
            assert f"out of DATA bounds, id={wrong}" in str(outcome)
        else:
            assert isinstance(outcome, IndexError)
            assert str(outcome).startswith(str(dense.value))


@pytest.mark.parametrize("parallel", ["e1 and e2", "hidden"])
def test_two_tables_of_one_height(parallel):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.e1, self.e2 = nn.Embedding(7, 4), nn.Embedding(7, 6)
            self.out = nn.Linear(4, 6)

        def forward(self, ids):
            return self.out(self.e1(ids)) + self.e2(ids)

    def run():
        mesh = init_device_mesh(DEVICE, (2,))
        torch.manual_seed(0)
        dense = Net().to(DTYPE)
        if parallel == "hidden":
            style = ColwiseParallel(output_layouts=Replicate())
        else:
            style = RowwiseParallel(input_layouts=Replicate())
        net = parallelize_module(copy.deepcopy(dense), mesh, {"e1": style, "e2": style})
        ids = torch.tensor([[0, 3, 6, 4], [6, 6, 1, 2]])
        for model in (dense, net):
            model(ids).square().sum().backward()
        assert_same(net(ids), dense(ids))
        for name in ("e1", "e2"):
            got, want = getattr(net, name).weight.grad, getattr(dense, name).weight.grad
            assert_same(got.full_tensor(), want, name)
        with pytest.raises(IndexError):
            net.e1(torch.tensor([[7]]))

    simulate(2).run(run)


@pytest.mark.parametrize(
    ("style", "option", "value"),
    [
        (RowwiseParallel, "max_norm", 1.0),
        (ColwiseParallel, "max_norm", 1.0),
        (RowwiseParallel, "sparse", True),
        (ColwiseParallel, "sparse", True),
        (RowwiseParallel, "scale_grad_by_freq", True),
    ],
)
@simulate(2)
def test_an_option_that_needs_the_whole_table_is_refused(style, option, value):
    table = nn.Embedding(7, 4, **{option: value})
    before = table.weight
    with pytest.raises(PlanError, match=f"must not use {option}, but got {option}={value}"):
        style().apply(table, init_device_mesh(DEVICE, (2,)))
    assert table.weight is before


@simulate(2)
def test_a_frozen_table_and_no_grad():
    mesh = init_device_mesh(DEVICE, (2,))
    table = nn.Embedding(7, 4).requires_grad_(False)
    want = table(torch.tensor([1, 6]))
    RowwiseParallel(input_layouts=Replicate()).apply(table, mesh)
    assert not table.weight.requires_grad
    assert_same(table(torch.tensor([1, 6])), want)
    with torch.no_grad():
        assert_same(table(torch.tensor([1, 6])), want)


@simulate(2)
def test_a_deep_copy_of_a_table_trains_apart_from_its_original():
    table = RowwiseParallel(input_layouts=Replicate()).apply(
        nn.Embedding(7, 4), init_device_mesh(DEVICE, (2,))
    )
    copied = copy.deepcopy(table)
    copied(torch.tensor([1, 6])).sum().backward()
    assert table.weight.grad is None
    assert copied.weight.grad.full_tensor().sum() == 8


@simulate(2)
def test_a_plain_table_assigned_later_is_refused():
    style = RowwiseParallel(input_layouts=Replicate())
    table = style.apply(nn.Embedding(7, 4), init_device_mesh(DEVICE, (2,)))
    table.weight = nn.Parameter(torch.ones(7, 4))
    with pytest.raises(PlanError, match="the parameters must stay the DTensors"):
        table(torch.tensor([1]))
