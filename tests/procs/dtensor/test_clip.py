# SPDX-License-Identifier: Apache-2.0
"""Norms and clipping over FSDP2 parameters, our DTensors and plain tensors, mixed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor,
    HyperParallelError,
    LayoutError,
    Partial,
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    fully_shard,
    get_total_norm,
    init_device_mesh,
)
from support.device import DEVICE, DTYPE, TOLERANCE


def whole_gradients(dtype=DTYPE):
    shapes = [(5, 3), (3, 5), (5,), (1, 3), (4, 2), (6,), (7,)]
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(s, generator=generator, dtype=DTYPE, device="cpu") for s in shapes]
    return [x.to(DEVICE, dtype) for x in drawn]


def mixed_parameters(gradients, joint):
    """One parameter of each kind for each gradient: FSDP2 on two axes and on one, ours, plain."""
    tp, dp = joint["tp"], joint["dp"]
    params = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    fsdp = nn.ParameterList(
        [
            nn.Parameter(distribute_tensor(params[0].data, tp, [Shard(0)])),
            nn.Parameter(distribute_tensor(params[1].data, tp, [Shard(1)])),
            nn.Parameter(distribute_tensor(params[2].data, tp, [Replicate()])),
            params[3],
        ]
    )
    for index, param in enumerate(fsdp):
        holder = nn.Module()
        holder.p = param
        fully_shard(holder, mesh=dp)
        params[index] = holder.p
        params[index].grad = torch_gradient(holder.p, gradients[index])
    for index, mesh, placements in (
        (4, joint, [Shard(1), Shard(0)]),
        (5, tp, [Replicate()]),
    ):
        params[index] = nn.Parameter(distribute_tensor(params[index].data, mesh, placements))
        params[index].grad = distribute_tensor(gradients[index], mesh, placements)
    params[6].grad = gradients[6].clone()
    return params


def torch_gradient(param, gradient):
    """Lay a whole gradient out as an FSDP2 parameter is: by the tensor-parallel axis first."""
    mesh = param.device_mesh
    local = gradient
    for axis in reversed(range(mesh.ndim)):
        placement = param.placements[axis]
        if not placement.is_replicate():
            size, n = local.shape[placement.dim], mesh.size(axis)
            chunk = -(-size // n)
            start = min(mesh.get_local_rank(axis) * chunk, size)
            local = local.narrow(placement.dim, start, min(chunk, size - start))
    grad = param.detach().clone()
    grad.to_local().copy_(local)
    return grad


def joint_mesh():
    return init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))


def clip_mixed(norm_type, foreach):
    wanted = [nn.Parameter(g.clone()) for g in whole_gradients()]
    for param in wanted:
        param.grad = param.data.clone()
    ours = mixed_parameters(whole_gradients(), joint_mesh())
    total = torch.nn.utils.clip_grad_norm_(wanted, 0.7, norm_type)
    grads = [p.grad for p in ours]
    alone = get_total_norm(iter(grads), norm_type, foreach=foreach)
    found = clip_grad_norm_(iter(ours), 0.7, norm_type, foreach=foreach)
    differences = [abs(alone - total).item(), abs(found - total).item()]
    for param, dense in zip(ours, wanted, strict=True):
        grad = param.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        differences.append((grad - dense.grad).abs().max().item())
    kinds = [type(p).__module__ for p in ours]
    return max(differences), type(found) is torch.Tensor and found.dim() == 0, kinds


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [2, 1, 3.5, math.inf, "inf", -math.inf, -2.0])
def test_clipping_mixed_parameters_equals_one_process(procs4, norm_type, foreach):
    for difference, plain, kinds in procs4.run(clip_mixed, norm_type, foreach):
        assert difference < TOLERANCE[DTYPE]
        assert plain
        assert kinds[:4] == ["torch.distributed.tensor"] * 4
        assert kinds[4:] == ["hyper_parallel.dtensor.tensor"] * 2 + ["torch.nn.parameter"]


def empty_here(norm_type):
    """A gradient of one row, which is empty on all ranks but one of each axis."""
    mesh = joint_mesh()
    row = torch.tensor([[3.0, -4.0]], dtype=DTYPE)
    found = get_total_norm([distribute_tensor(row, mesh, [Shard(0), Shard(0)])], norm_type)
    return (found - torch.nn.utils.get_total_norm([row], norm_type)).abs().item()


@pytest.mark.parametrize("norm_type", [2, 1, math.inf, -math.inf])
def test_empty_shards_count_nothing(procs4, norm_type):
    assert max(procs4.run(empty_here, norm_type)) < TOLERANCE[DTYPE]


def half_precision(dtype):
    whole = torch.full((64, 32), 8.0).to(dtype)
    cut = distribute_tensor(whole, joint_mesh(), [Shard(0), Shard(1)])
    found = get_total_norm([cut])
    return found.item(), found.dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_do_not_overflow_in_half_precision(procs4, dtype):
    for found, kind in procs4.run(half_precision, dtype):
        assert found == pytest.approx(8.0 * math.sqrt(64 * 32), rel=1e-2)
        assert kind == dtype


def not_finite(value):
    gradients = whole_gradients()
    gradients[0][4, 0] = value  # on one rank only
    ours = mixed_parameters(gradients, joint_mesh())
    before = ours[0].grad.full_tensor()
    with pytest.raises(HyperParallelError, match=r"get_total_norm: .* must be finite.*(nan|inf)"):
        clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError):
        get_total_norm([p.grad for p in ours], error_if_nonfinite=True)
    same = torch.equal(ours[0].grad.full_tensor().nan_to_num(7), before.nan_to_num(7))
    return same, clip_grad_norm_(ours, 1.0).item()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite(procs4, value):
    for same, total in procs4.run(not_finite, value):
        assert same
        assert math.isnan(total) if math.isnan(value) else total == value


def special():
    mesh = joint_mesh()
    whole = torch.arange(4.0)
    cut = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    pending = DTensor.from_local(whole, mesh["tp"], [Partial()])
    with pytest.raises(LayoutError, match="norm_type must not be 0 for sharded tensors"):
        get_total_norm([cut], 0)
    param = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    return (
        get_total_norm([]).item(),
        clip_grad_norm_([param], 1.0).item(),
        get_total_norm(pending).item(),
        get_total_norm([cut, cut.redistribute(mesh["tp"], [Replicate()])]).item(),
    )


def test_nothing_pending_sums_and_copies(procs4):
    once = math.sqrt(14)
    for found in procs4.run(special):
        assert found == pytest.approx((0.0, 0.0, 2 * once, math.sqrt(2) * once))
