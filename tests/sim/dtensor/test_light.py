# SPDX-License-Identifier: Apache-2.0
"""The first ops on DTensors do not import torch's compiler, which would take a second."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import torch
import torch.nn.functional as F
from hyper_parallel import Replicate, Shard, clip_grad_norm_, distribute_tensor
from hyper_parallel import init_device_mesh, simulate


@simulate(2)
def train():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 4, requires_grad=True), mesh, [Shard(0)])
    w = distribute_tensor(torch.ones(4, 4, requires_grad=True), mesh, [Replicate()])
    y = F.layer_norm(F.gelu(F.linear(x, w)), (4,)).softmax(-1) + x
    y.view(2, 2, 4).transpose(0, 1).mean().backward()
    clip_grad_norm_([x, w], 1.0)
    with torch.no_grad():
        w -= 0.1 * w.grad


train()
print(*[name for name in ("torch._dynamo", "torch.distributed.tensor") if name in sys.modules])
"""


def test_common_ops_do_not_import_the_compiler():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
