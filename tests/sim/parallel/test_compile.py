# SPDX-License-Identifier: Apache-2.0
"""torch.compile around parallel modules: they run as they are, outside of the compiled graphs."""

import copy

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from support.device import DEVICE, DTYPE

PLAIN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


class Block(nn.Module):
    """A residual block."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def parallel(plan):
    torch.manual_seed(0)
    block = Block().to(DTYPE)
    ours = parallelize_module(
        copy.deepcopy(block), init_device_mesh(DEVICE, (1,), mesh_dim_names=("tp",)), plan
    )
    return block, ours, torch.randn(2, 4, 6, dtype=DTYPE)


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own code
@pytest.mark.parametrize("plan", [PLAIN, SEQUENCE], ids=["plain", "sequence"])
def test_a_compiled_block_has_the_values_and_gradients_of_the_plain_one(plan):
    def run():
        block, ours, x = parallel(plan)
        block(x).square().sum().backward()
        y = torch.compile(ours, backend="aot_eager")(x)
        y.square().sum().backward()
        torch.testing.assert_close(y, block(x))
        for p, q in zip(ours.parameters(), block.parameters(), strict=True):
            whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(whole, q.grad)

    simulate(1).run(run)
