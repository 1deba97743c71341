# SPDX-License-Identifier: Apache-2.0
"""Every op with a rule, through dispatch: values and gradients equal the plain op's.

Operands take every placement of one axis in turn. A pending operand is given as different
contributions on every rank, so that an op that is not linear must reduce it first.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import DTensor, Partial, Replicate, Shard, simulate
from hyper_parallel.rules import names
from hyper_parallel.runtime import current_rank
from support.dtensors import laid, line, same, seeded


@dataclass
class Case:
    """One call: the op on whole operands, their shapes, and how the operands are drawn."""

    op: Any
    shapes: tuple[tuple[int, ...], ...]
    kind: str = "float"

    def operands(self):
        return [self._operand(i, shape) for i, shape in enumerate(self.shapes)]

    def _operand(self, i, shape):
        x = seeded(*shape, seed=i)
        if self.kind == "positive" or (self.kind == "positive other" and i):
            return x.abs() + 0.5
        if self.kind == "bool" or (self.kind == "mask" and i == 0):
            return x > 0
        if self.kind == "mask last" and i:
            return x > 0
        if self.kind == "ids" and i == 0:
            return (x.abs() * 100).to(torch.int64) % 5
        if self.kind == "ids last" and i:
            return (x.abs() * 100).to(torch.int64) % 5
        return x


S = (5, 6)


def unary(op, kind="float"):
    return [Case(op, (S,), kind)]


def binary(op, kind="float"):
    return [Case(op, (S, S), kind), Case(op, ((6,), (5, 1)), kind)]


def method(name, *args, **kwargs):
    return lambda x, *rest: getattr(x, name)(*rest, *args, **kwargs)


CASES: dict[str, list[Case]] = {
    **{
        name: unary(getattr(torch, name), "positive")
        for name in (
            "abs exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal square sin cos erf sign floor"
            " ceil round sigmoid tanh relu isnan isinf isfinite nan_to_num ones_like neg clone"
            " detach positive zeros_like"
        ).split()
    },
    **{
        name: unary(getattr(F, name))
        for name in "relu6 gelu silu elu leaky_relu softplus hardtanh logsigmoid".split()
    },
    "clamp": unary(lambda x: x.clamp(-0.5, max=0.5)) + unary(lambda x: torch.clamp(x, min=0.1)),
    "logical_not": unary(torch.logical_not, "bool"),
    "bitwise_not": unary(lambda x: ~x, "bool"),
    "full_like": unary(lambda x: torch.full_like(x, 3.0)),
    "contiguous": unary(lambda x: x.contiguous()),
    "alias": unary(lambda x: torch.ops.aten.alias(x) if type(x) is torch.Tensor else x * 1),
    "empty_like": unary(lambda x: torch.zeros_like(torch.empty_like(x))),
    "to": unary(lambda x: x.to(torch.float32))
    + unary(lambda x: x.to(dtype=torch.int32))
    + unary(lambda x: x.float())
    + unary(lambda x: x.long())
    + unary(lambda x: x.bool())
    + unary(lambda x: x.type(torch.float32))
    + unary(lambda x: x.type(torch.int64))
    + unary(lambda x: x.type("torch.LongTensor"))
    + unary(lambda x: x.to("cpu"))
    + unary(lambda x: x.to(x))
    + unary(lambda x: x.type_as(x.float())),
    **{
        name: binary(getattr(torch, name), "positive")
        for name in "pow maximum minimum atan2 eq ne lt le gt ge".split()
    },
    "fmod": [Case(lambda x: torch.fmod(x, 0.7), (S,))],
    "remainder": [Case(lambda x: x % 0.7, (S,)), Case(lambda x: x.detach() % x.detach(), (S,))],
    "floor_divide": [
        Case(lambda x: x.detach() // 0.7, (S,)),
        Case(lambda x: 3 // x.detach(), (S,), "positive"),
    ],
    **{
        name: binary(getattr(torch, name), "bool")
        for name in "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor".split()
    },
    "masked_fill": [
        Case(lambda x, mask: x.masked_fill(mask, 2.0), (S, S), "mask last"),
        Case(lambda x, mask: x.masked_fill(mask, value=torch.tensor(3.0)), (S, S), "mask last"),
    ],
    "add": [
        *binary(torch.add),
        Case(lambda x: x + 1, (S,)),
        Case(lambda x: 1 + x, (S,)),
        Case(lambda x: torch.add(input=x, other=x, alpha=3), (S,)),
        Case(lambda x: x + torch.tensor(2.0), (S,)),
        Case(lambda x: torch.tensor(2.0) + x, (S,)),
    ],
    "sub": [
        *binary(torch.sub),
        Case(lambda x: 1 - x, (S,)),
        Case(lambda x: torch.rsub(x, 1, alpha=2), (S,)),
        Case(lambda x, y: torch.sub(other=y, input=x), (S, S)),
        Case(lambda x: torch.tensor(2.0) - x, (S,)),
    ],
    "mul": [*binary(torch.mul), Case(lambda x: 2 * x * 3.0, (S,)), Case(lambda x: -x, (S,))],
    "div": [
        *binary(torch.div, "positive other"),
        Case(lambda x: x / 2, (S,)),
        Case(lambda x: 2 / x, (S,), "positive"),
        Case(lambda x: torch.div(x, 0.7, rounding_mode="floor"), (S,)),
        Case(lambda x, y: torch.div(x, y, rounding_mode="trunc"), (S, S), "positive"),
    ],
    "where": [
        Case(torch.where, (S, S, S), "mask"),
        Case(lambda c, x: torch.where(c, x, 0.0), (S, (6,)), "mask"),
    ],
    "lerp": [Case(torch.lerp, (S, S, S)), Case(lambda x, y: torch.lerp(x, y, 0.3), (S, S))],
    "addcmul": [Case(lambda x, y, z: torch.addcmul(x, y, z, value=2), (S, S, (6,)))],
    "addcdiv": [Case(torch.addcdiv, (S, S, S), "positive")],
    "dropout": unary(lambda x: F.dropout(x, 0.5, training=False))
    + unary(lambda x: F.dropout(x, 0)),
    "linear": [
        Case(F.linear, ((3, 5, 6), (4, 6))),
        Case(F.linear, (S, (4, 6), (4,))),
        Case(lambda x, w: F.linear(weight=w, input=x), (S, (4, 6))),
    ],
    "matmul": [
        Case(torch.matmul, (S, (6, 4))),
        Case(lambda x, y: x @ y, ((3, 5, 6), (6, 4))),
        Case(torch.matmul, ((3, 5, 6), (3, 6, 4))),
        Case(torch.matmul, ((6,), (6, 4))),
        Case(torch.matmul, (S, (6,))),
        Case(torch.matmul, ((6,), (6,))),
        Case(lambda x, y: torch.matmul(other=y, input=x), (S, (6, 4))),
    ],
    "mm": [Case(torch.mm, (S, (6, 4)))],
    "bmm": [Case(torch.bmm, ((3, 5, 6), (3, 6, 4)))],
    "mv": [Case(torch.mv, (S, (6,)))],
    "dot": [Case(torch.dot, ((6,), (6,)))],
    "outer": [Case(torch.outer, ((5,), (6,)))],
    "addmm": [
        Case(torch.addmm, ((4,), S, (6, 4))),
        Case(lambda b, x, y: torch.addmm(b, x, y, beta=2, alpha=3), ((5, 4), S, (6, 4))),
    ],
    "baddbmm": [Case(torch.baddbmm, ((3, 5, 4), (3, 5, 6), (3, 6, 4)))],
    "layer_norm": [
        Case(lambda x: F.layer_norm(x, (6,)), (S,)),
        Case(lambda x, w, b: F.layer_norm(x, (6,), w, b), ((3, 5, 6), (6,), (6,))),
        Case(lambda x, w: F.layer_norm(x, normalized_shape=(5, 6), weight=w), ((3, 5, 6), S)),
    ],
    "rms_norm": [Case(lambda x, w: F.rms_norm(x, (6,), w, 1e-6), ((3, 5, 6), (6,)))],
    "softmax": unary(lambda x: x.softmax(0))
    + unary(lambda x: F.softmax(x, dim=-1, dtype=torch.float32)),
    "log_softmax": unary(lambda x: torch.log_softmax(x, 1)) + unary(lambda x: x.log_softmax(dim=0)),
    "scaled_dot_product_attention": [
        Case(F.scaled_dot_product_attention, ((2, 4, 5, 6), (2, 4, 3, 6), (2, 4, 3, 4))),
        Case(
            lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5),
            ((2, 4, 5, 6),),
        ),
    ],
    "cross_entropy": [
        Case(partial(F.cross_entropy, reduction=r), ((4, 6), (4,)), "ids last")
        for r in ("mean", "sum", "none")
    ]
    + [
        Case(
            lambda x, y: F.cross_entropy(x, y, ignore_index=1, label_smoothing=0.1),
            ((4, 6), (4,)),
            "ids last",
        )
    ],
    "nll_loss": [Case(lambda x, y: F.nll_loss(x, y, reduction="sum"), ((4, 6), (4,)), "ids last")],
    **{
        name: [
            Case(method(name), (S,), "positive"),
            Case(method(name, 0), (S,), "positive"),
            Case(method(name, 1, True), (S,), "positive"),
            Case(method(name, dim=-1, keepdim=True), ((3, 5, 6),), "positive"),
            Case(method(name, axis=0), (S,), "positive"),
        ]
        for name in ("sum", "mean", "amax", "amin", "prod", "var", "std")
    },
    "logsumexp": [Case(lambda x: x.logsumexp(0), (S,)), Case(lambda x: x.logsumexp((0, 1)), (S,))],
    "vector_norm": [
        Case(torch.linalg.vector_norm, (S,)),
        Case(lambda x: torch.linalg.vector_norm(x, 3, 0), (S,)),
        Case(lambda x: torch.linalg.vector_norm(x, ord=1, dim=1, keepdim=True), (S,)),
    ],
    "argmax": [Case(lambda x: x.argmax(), (S,)), Case(lambda x: x.argmax(1), (S,))],
    "argmin": [Case(lambda x: x.argmin(0, keepdim=True), (S,))],
    "cumsum": [Case(lambda x: x.cumsum(0), (S,)), Case(lambda x: torch.cumsum(x, dim=1), (S,))],
    "cumprod": [Case(lambda x: x.cumprod(1), (S,))],
    "topk": [Case(lambda x: x.topk(2), (S,)), Case(lambda x: x.topk(2, 0, largest=False), (S,))],
    "sort": [Case(lambda x: x.sort(0), (S,)), Case(lambda x: x.sort(descending=True), (S,))],
    "argsort": [Case(lambda x: x.argsort(0), (S,)), Case(lambda x: x.argsort(), (S,))],
    "reshape": [
        Case(lambda x: x.reshape(4, -1), ((4, 6),)),
        Case(lambda x: x.reshape((2, 2, 6)), ((4, 6),)),
        Case(lambda x: x.reshape(30), (S,)),
        Case(lambda x: x.ravel(), (S,)),
        Case(lambda x, y: x.reshape_as(y), ((4, 6), (8, 3))),
    ],
    "view": [
        Case(lambda x: x.view(4, 3, 2), ((4, 6),)),
        Case(lambda x: x.view((4, 3, 2)), ((4, 6),)),
        Case(lambda x: x.view(torch.Size([24])), ((4, 6),)),
        Case(lambda x: x.view(-1), (S,)),
        Case(lambda x: x.view(5, 2, -1), (S,)),
        Case(lambda x, y: x.view_as(y), ((4, 6), (8, 3))),
    ],
    "flatten": [Case(lambda x: x.flatten(), (S,)), Case(lambda x: x.flatten(1), ((3, 5, 6),))],
    "unflatten": [
        Case(lambda x: x.unflatten(1, (2, 3)), (S,)),
        Case(lambda x: x.unflatten(0, (-1, 2)), ((4, 6),)),
    ],
    "permute": [
        Case(lambda x: x.permute(2, 0, 1), ((3, 5, 6),)),
        Case(lambda x: x.permute((1, -1, 0)), ((3, 5, 6),)),
    ],
    "transpose": [
        Case(lambda x: x.transpose(0, 1), (S,)),
        Case(lambda x: torch.transpose(x, dim0=-1, dim1=0), ((3, 5, 6),)),
        Case(lambda x: x.mT, ((3, 5, 6),)),
        Case(lambda x: x.swapaxes(0, 1), (S,)),
    ],
    "t": [Case(lambda x: x.t(), (S,)), Case(lambda x: x.T, (S,))],
    "unsqueeze": [Case(lambda x: x.unsqueeze(0), (S,)), Case(lambda x: x.unsqueeze(dim=-1), (S,))],
    "squeeze": [
        Case(lambda x: x.squeeze(), ((5, 1, 6),)),
        Case(lambda x: x.squeeze(1), ((2, 1, 2),)),
        Case(lambda x: x.squeeze(0), ((2, 3),)),
        Case(lambda x: x.squeeze((0, 2)), ((1, 2, 1),)),
    ],
    "expand": [
        Case(lambda x: x.expand(3, 5, 6), (S,)),
        Case(lambda x: x.expand(5, 4), ((5, 1),)),
        Case(lambda x: x.expand((-1, 4)), ((5, 1),)),
        Case(lambda x: torch.broadcast_to(x, (2, 5, 6)), (S,)),
        Case(lambda x, y: x.expand_as(y), ((1, 6), S)),
    ],
    "cat": [
        Case(lambda x, y: torch.cat([x, y]), (S, (3, 6))),
        Case(lambda x, y: torch.cat((x, y), dim=1), (S, (5, 2))),
        Case(lambda x, y: torch.concat([x, y], axis=-1), (S, (5, 2))),
    ],
    "stack": [
        Case(lambda x, y: torch.stack([x, y]), (S, S)),
        Case(lambda x, y: torch.stack((x, y), -1), (S, S)),
    ],
    "split": [
        Case(lambda x: x.split(2), (S,)),
        Case(lambda x: torch.split(x, [1, 5], dim=1), (S,)),
        Case(lambda x: x.split((2, 3), 0), (S,)),
    ],
    "chunk": [Case(lambda x: x.chunk(2), (S,)), Case(lambda x: torch.chunk(x, 4, dim=1), (S,))],
    "unbind": [Case(lambda x: x.unbind(), (S,)), Case(lambda x: x.unbind(1), (S,))],
    "narrow": [Case(lambda x: x.narrow(0, 1, 2), (S,)), Case(lambda x: x.narrow(1, 2, 3), (S,))],
    "select": [Case(lambda x: x.select(0, 1), (S,)), Case(lambda x: x.select(-1, 1), (S,))],
    "flip": [
        Case(lambda x: x.flip(0), (S,)),
        Case(lambda x: x.flip(1), (S,)),
        Case(lambda x: torch.flip(x, dims=(1,)), (S,)),
    ],
    "roll": [Case(lambda x: x.roll(1, 0), (S,)), Case(lambda x: x.roll(2, dims=1), (S,))],
    "tril": [Case(lambda x: x.tril(), ((3, 5, 6),))],
    "triu": [Case(lambda x: torch.triu(x, diagonal=1), ((3, 5, 6),))],
    "embedding": [
        Case(F.embedding, ((3, 4), (5, 6)), "ids"),
        Case(lambda i, w: F.embedding(i, w, padding_idx=-1), ((7,), (5, 2)), "ids"),
    ],
    "index_select": [
        Case(lambda x, i: x.index_select(0, i), (S, (4,)), "ids last"),
        Case(lambda x, i: torch.index_select(x, 1, i), (S, (4,)), "ids last"),
    ],
    "gather": [
        Case(lambda x, i: x.gather(0, i), (S, (3, 6)), "ids last"),
        Case(lambda x, i: torch.gather(x, 1, index=i), (S, (5, 2)), "ids last"),
    ],
}
NOT_IN_TORCH = {"slice"}  # x[a:b] is __getitem__
RANDOM = set(  # compared in test_random.py
    "alpha_dropout dropout1d dropout2d dropout3d rand_like randn_like randint_like bernoulli"
    " poisson".split()
)


def test_every_rule_has_a_case():
    assert set(CASES) | NOT_IN_TORCH | RANDOM >= set(names())


def options(x):
    placements = [Replicate(), *(Shard(dim) for dim in range(x.ndim))]
    if x.dtype.is_floating_point:
        placements += [Partial("sum"), Partial("avg"), Partial("max")]
    return placements


def contribution(whole, placement, size, seed):
    """Give this rank's part: for a pending reduction, something different on every rank."""
    rank = current_rank()
    if not placement.is_partial():
        return None
    noise = torch.stack([seeded(*whole.shape, seed=100 * seed + r) for r in range(size)])
    if placement.is_partial("max"):
        noise = whole - noise.abs()
        noise[0] = whole
        return noise[rank]
    parts = noise - noise.mean(0) + whole / size
    return parts[rank] * (size if placement.is_partial("avg") else 1)


def place(whole, mesh, placement, seed):
    part = contribution(whole, placement, mesh.size(), seed)
    if part is None:
        placed = laid(whole, mesh, placement)
    else:
        placed = DTensor.from_local(part, mesh, [placement])
    return placed.requires_grad_(whole.dtype.is_floating_point)


def as_list(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def check(case, mesh):
    whole = [x.requires_grad_() if x.dtype.is_floating_point else x for x in case.operands()]
    expected = as_list(case.op(*whole))
    floating = [x for x in whole if x.requires_grad]
    outs = [r for r in expected if r.requires_grad]
    seeds = [seeded(*r.shape, seed=9).to(r.dtype) for r in outs]
    grads = torch.autograd.grad(outs, floating, seeds, allow_unused=True) if outs else []
    every = list(itertools.product(*(options(x) for x in whole)))
    for placements in every[:: max(1, len(every) // 9)]:  # spread over all, the same each time
        placed = [
            place(x, mesh, p, i) for i, (x, p) in enumerate(zip(whole, placements, strict=True))
        ]
        found = as_list(case.op(*placed))
        assert len(found) == len(expected)
        try:
            for ours, plain in zip(found, expected, strict=True):
                same(ours, plain)
                assert ours.requires_grad == plain.requires_grad
            if outs:
                ours = torch.autograd.grad(
                    [r for r in found if r.requires_grad],
                    [x for x in placed if x.requires_grad],
                    [laid(g, mesh, Replicate()) for g in seeds],
                    allow_unused=True,
                )
                for got, wanted in zip(ours, grads, strict=True):
                    assert (got is None) == (wanted is None)
                    if wanted is not None:
                        same(got, wanted)
        except AssertionError as error:
            raise AssertionError(f"{placements} {case.shapes}: {error}") from error


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:DTensor op .* has no sharding rule for this call")
@pytest.mark.filterwarnings("ignore:(var|std).*degrees of freedom")  # torch's, of an empty shard
def test_op_equals_the_plain_op(name, size):
    @simulate(size)
    def run():
        mesh = line(size)
        for case in CASES[name]:
            check(case, mesh)

    run()


def test_mean_over_a_cut_dim_divides_by_the_global_size():
    @simulate(4)
    def run():
        whole = seeded(5, 6).requires_grad_()
        x = laid(whole, line(4), Shard(0), requires_grad=True)
        same(x.mean(), whole.mean())
        x.mean(0).sum().backward()
        same(x.grad, torch.full((5, 6), 1 / 5).double())
        assert abs(x.mean().item() - whole.mean().item()) < 1e-12

    run()
