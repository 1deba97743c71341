# SPDX-License-Identifier: Apache-2.0
"""CommDebugMode on real processes: it counts what torch's mode of that name counts of ours."""

import importlib.util
import sys
import warnings
from collections import Counter
from pathlib import Path

from support.device import DEVICE

MODEL = Path(__file__).parents[3] / "examples" / "model.py"

# What torch sees of each of our methods on gloo.
AS_TORCH = {
    "all_reduce": "allreduce_",
    "all_gather": "_allgather_base_",
    "all_gather_ints": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
    "scatter": "scatter_",
    "broadcast": "broadcast_",
    "all_to_all_v": "alltoall_base_",
}


def demo_model():
    name = "hyper_parallel_example_model"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, MODEL)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def count_a_decoder():
    import torch
    from torch.distributed.tensor.debug import CommDebugMode as TorchMode

    from hyper_parallel import (
        CommDebugMode,
        Shard,
        distribute_tensor,
        init_device_mesh,
        parallelize_module,
    )

    # torch counts what checked mode exchanges, too.
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",), check=False)
    demo = demo_model()
    config = demo.Config(
        vocab=24, dim=16, layers=2, heads=4, kv_heads=2, mlp_multiple=4, max_seq=8, bias=True
    )
    torch.manual_seed(0)
    model = demo.Decoder(config)
    with CommDebugMode() as ours, TorchMode() as theirs, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook")  # that of torch's mode
        parallelize_module(model, mesh, demo.tp_plan(config, True))
        model(torch.randint(config.vocab, (2, 8))).sum().backward()
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        x.redistribute(mesh, [Shard(1)])
    counted = Counter()
    for op, count in ours.get_comm_counts().items():
        counted[AS_TORCH[op]] += count
    seen = {str(op).rpartition(".")[2]: n for op, n in theirs.get_comm_counts().items()}
    assert counted == seen
    assert ours.get_total_counts() == theirs.get_total_counts()
    backward = {one.module for one in ours.collectives if one.is_backward}
    assert backward <= {one.module for one in ours.collectives} | {"Decoder"}
    return sorted(seen), sorted(
        one.module for one in ours.collectives if one.op == "reduce_scatter"
    )


def test_it_counts_what_torchs_mode_counts(procs2):
    for ops, scattered in procs2.run(count_a_decoder):
        assert {"allreduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"} <= set(
            ops
        )
        assert len(scattered) > 4 and "Decoder.layers.0.attention.wo" in scattered
