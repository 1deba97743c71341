# SPDX-License-Identifier: Apache-2.0
"""NumPy's lock step against the executor on simulated ranks: the same arrays, bit for bit."""

import numpy as np
import pytest
import torch

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Layout,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    plan,
    simulate,
)
from hyper_parallel.backends._torch.ops import TorchOps
from hyper_parallel.backends.numpy import NumpyOps, execute
from hyper_parallel.core import AbstractMesh, Packed, StridedShard
from hyper_parallel.errors import BackendError
from hyper_parallel.runtime import execute as execute_here
from support.device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="NumPy reads CPU memory only")

R, S, P = Replicate(), Shard, Partial
MOVES = [
    ((2, 3), (S(0), S(1)), (S(1), S(0)), (5, 7)),
    ((2, 3), (P(), S(0)), (S(1), R), (6, 4)),
    ((2, 3), (P(), P()), (S(0), S(0)), (7, 2)),
    ((2, 3), (P("avg"), R), (P(), S(0)), (4, 3)),
    ((2, 3), (R, S(0)), (P("max"), P("max")), (5, 2)),
    ((2, 3), (P("product"), S(1)), (R, P("product")), (3, 6)),
    ((2, 2, 2), (S(0), R, S(0)), (R, S(1), S(0)), (9, 4)),
    ((6,), (StridedShard(0, 2),), (Packed(1, (4, 9)),), (13, 13)),
    ((6,), (P("min"),), (S(0),), (4, 2)),
]


def terms(layout, dtype):
    """Make each rank's array: replicas and contributions may differ, as after a bug."""
    rng = np.random.default_rng(0)
    whole = {"bool": lambda x: x > 0, "float16": lambda x: x / 7}.get(dtype, lambda x: x)
    return {
        rank: np.asarray(whole(rng.integers(-9, 10, layout.local_shape(rank)))).astype(dtype)
        for rank in layout.mesh.ranks
    }


def nested(mesh, held, axes=()):
    if len(axes) == mesh.ndim:
        return held[mesh.rank_at(axes)]
    return [nested(mesh, held, (*axes, i)) for i in range(mesh.shape[len(axes)])]


def has_reductions(dtype, src, dst):
    ops = {p.reduce_op for p in (*src, *dst) if p.is_partial()}
    return not ops & {"int": {"avg"}, "boo": {"avg"}, "com": {"max", "min"}}.get(dtype[:3], set())


@pytest.mark.parametrize(
    "dtype, sizes, src, dst, shape",
    [
        (dtype, *move)
        for dtype in ("float64", "float16", "int32", "bool", "complex64")
        for move in MOVES
        if has_reductions(dtype, *move[1:3])
    ],
    ids=str,
)
def test_every_rank_holds_what_the_executor_gives_it(dtype, sizes, src, dst, shape):
    mesh = AbstractMesh("numpy", sizes)
    ends = Layout(mesh, src, shape), Layout(mesh, dst, shape)
    held = terms(ends[0], dtype)
    moved = execute(plan(*ends), nested(mesh, held))

    @simulate(mesh.size())
    def on_ranks():
        attached = init_device_mesh("cpu", sizes)
        layouts = Layout(attached, src, shape), Layout(attached, dst, shape)
        own = torch.from_numpy(held[attached.get_rank()].copy())
        return execute_here(plan(*layouts), own, attached).numpy()

    for rank, expected in enumerate(on_ranks()):
        own = moved
        for place in mesh.coordinate(rank):
            own = own[place]
        assert own.dtype == expected.dtype and np.array_equal(own, expected)


def test_a_numpy_mesh_takes_no_tensors():
    mesh = init_device_mesh("numpy", (2,))
    for call in (
        lambda: distribute_tensor(torch.zeros(4), mesh, [Shard(0)]),
        lambda: DTensor.from_local(torch.zeros(4), mesh, [Shard(0)]),
        lambda: parallelize_module(torch.nn.Linear(2, 2), mesh, {"": ColwiseParallel()}),
    ):
        with pytest.raises(BackendError, match="numpy: this process must be one rank of the mesh"):
            call()


@pytest.mark.parametrize(
    "call",
    [lambda ops, x: ops.scale(x, 2, divide=True), lambda ops, x: ops.identity((), "none", x)],
)
def test_refusals_read_as_those_of_torch(call):
    texts = []
    for ops, x in ((NumpyOps(), np.ones(2, np.int64)), (TorchOps(), torch.ones(2).long())):
        with pytest.raises(BackendError) as raised:
            call(ops, x)
        texts.append(str(raised.value))
    assert texts[0].replace("dtype('int64')", "torch.int64") == texts[1]
