# SPDX-License-Identifier: Apache-2.0
"""Losses over a cut vocabulary, its head tied or not, under fully_shard: as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    linear_cross_entropy,
    loss_parallel,
    parallelize_module,
    vocab_parallel_cross_entropy,
)
from hyper_parallel.dtensor.interop import to_torch
from support.device import DEVICE, DTYPE, TOLERANCE

VOCAB = 11  # uneven over two ranks
OPTIONS = {"label_smoothing": 0.1}


class LanguageModel(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(VOCAB, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, target, kind, mesh):
        h = self.embed(tokens)
        h = (h + self.down(torch.relu(self.up(h)))).flatten(0, 1)
        target = target.flatten()
        if kind == "linear_cross_entropy":
            head = self.head
            return linear_cross_entropy(
                h, head.weight, target, linear_bias=head.bias, chunk_size=3, **OPTIONS
            )
        logits = self.head(h)
        if kind == "vocab_parallel_cross_entropy":
            return vocab_parallel_cross_entropy(logits, target, device_mesh=mesh, **OPTIONS)
        if kind == "loss_parallel":
            with loss_parallel():
                return F.cross_entropy(logits, target, **OPTIONS)
        return F.cross_entropy(logits, target, **OPTIONS)


def worst_gradients(tied):
    """Accumulate two batches, three steps long, for each loss; the worst relative difference."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for kind in ("loss_parallel", "vocab_parallel_cross_entropy", "linear_cross_entropy"):
        torch.manual_seed(0)
        whole = LanguageModel(tied).to(DTYPE)
        ours = copy.deepcopy(whole)
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
            "head": ColwiseParallel(use_local_output=kind != "loss_parallel"),
        }
        parallelize_module(ours, mesh["tp"], plan)
        fully_shard(ours, mesh=mesh["dp"])
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (whole, ours)]
        worst = 0.0
        for _ in range(3):
            for _ in range(2):
                batch = torch.randint(VOCAB, (2, 4, 5))
                whole(*batch, "dense", None).backward()
                own = batch.chunk(2, 1)[mesh["dp"].get_local_rank()]
                ours(*own, kind, mesh["tp"]).backward()
            pairs = zip(ours.parameters(), whole.parameters(), strict=True)
            worst = max(worst, *((p.grad.full_tensor() - q.grad).abs().max() for p, q in pairs))
            norms = [
                clip(m.parameters(), 1.0)
                for clip, m in ((clip_grad_norm_, ours), (nn.utils.clip_grad_norm_, whole))
            ]
            worst = max(worst, abs(norms[0] - norms[1]))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found[kind] = float(worst)
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_loss_trains_as_in_one_process(procs4, tied):
    for found in procs4.run(worst_gradients, tied):
        assert len(found) == 3
        assert max(found.values()) < 10 * TOLERANCE[DTYPE], found


def head_of_torch():
    """The head is torch's DTensor, and another axis of its mesh cuts the batch."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, dtype=DTYPE), torch.randn(VOCAB, 6, dtype=DTYPE)
    target = torch.randint(VOCAB, (4,))
    head = to_torch(distribute_tensor(w, mesh, [Replicate(), Shard(0)])).requires_grad_()
    rows = [Shard(0), Replicate()]
    given = distribute_tensor(x, mesh, rows).requires_grad_()
    linear_cross_entropy(given, head, distribute_tensor(target, mesh, rows)).backward()
    dense = [t.clone().requires_grad_() for t in (x, w)]
    F.cross_entropy(F.linear(*dense), target).backward()
    close = TOLERANCE[DTYPE]
    for ours, theirs in zip((given, head), dense, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=close, atol=close)
    return [p.is_replicate() for p in head.grad.placements]


def test_a_head_that_is_torchs_gets_the_gradient_of_the_whole_batch(procs4):
    for placements in procs4.run(head_of_torch):
        assert placements == [True, False]
