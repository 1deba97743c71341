# SPDX-License-Identifier: Apache-2.0
"""Time to plan a redistribution, cold and cached, against torch's private planner.

Planning is what each call does between the placements it is given and the steps to run. Ours:
Layout.of and plan. Torch's: a DTensorSpec, _gen_transform_infos, _optimize_transform_infos, of
which only the second is cached. Cold: the caches are emptied before each call. On several axes
torch's default is greedy and ours searches for the cheapest plan.

    python benchmarks/planner_time.py

Bursts are interleaved, in CPU time with the garbage collector off; microseconds, and ratios of the
minima.
"""

import argparse
import math
import warnings

import torch
from _harness import Candidate, fake_rank, measure
from torch.distributed import tensor as torch_api
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _redistribute as planner
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hyper_parallel import core
from hyper_parallel.core.search import cheapest_way

SHAPE = (4096, 4096)
PAIRS = {
    1: [("0", "R"), ("R", "0"), ("0", "1"), ("P", "R"), ("P", "0")],
    2: [("01", "R0"), ("PP", "RR"), ("00", "1R"), ("R1", "PR"), ("P0", "1R"), ("RR", "01")],
    3: [("010", "RRR"), ("PPR", "0R1"), ("001", "R10")],
}
MESHES = ((8,), (2, 4), (2, 2, 2), (1024,), (8, 128), (2, 4, 128))


def placements(api, names: str) -> tuple:
    """Write placements of either library."""
    made = {"R": api.Replicate(), "P": api.Partial()}
    return tuple(made.get(name) or api.Shard(int(name)) for name in names)


def our_calls(mesh_shape: tuple[int, ...], src: str, dst: str):
    mesh = core.AbstractMesh("cpu", mesh_shape)
    begin = core.Layout(mesh, placements(core, src), SHAPE)
    target = placements(core, dst)

    def cached():
        return core.plan(begin, core.Layout.of(mesh, target, SHAPE))

    def cold():
        mesh.plans.clear()
        mesh.layouts.clear()
        cheapest_way.cache_clear()
        return cached()

    return cold, cached


def torch_calls(mesh_shape: tuple[int, ...], src: str, dst: str):
    mesh = init_device_mesh("cpu", mesh_shape)
    meta = TensorMeta(torch.Size(SHAPE), (SHAPE[1], 1), torch.float32)
    begin, target = DTensorSpec(mesh, placements(torch_api, src), meta), placements(torch_api, dst)

    def cached():
        end = DTensorSpec(mesh, target, tensor_meta=meta)
        infos = planner._gen_transform_infos(begin, end, None)
        return planner._optimize_transform_infos(infos, mesh, begin.placements, target)

    def cold():
        planner._gen_transform_infos.cache_clear()
        return cached()

    return cold, cached


def main() -> None:
    """Time every pair on every mesh and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=30, help="bursts per variant (30)")
    parser.add_argument("--mesh", help="one mesh shape, such as 2,4")
    options = parser.parse_args()
    meshes = [tuple(map(int, options.mesh.split(",")))] if options.mesh else MESHES
    warnings.simplefilter("ignore")
    print("mesh          move          when    ours: min median   torch: min median  ours/torch")
    with fake_rank(max(map(math.prod, meshes))):
        for mesh_shape in meshes:
            for src, dst in PAIRS[len(mesh_shape)]:
                compare(mesh_shape, src, dst, options.repeats)


def compare(mesh_shape: tuple[int, ...], src: str, dst: str, repeats: int) -> None:
    """Time one pair and print two lines."""
    ours, theirs = (make(mesh_shape, src, dst) for make in (our_calls, torch_calls))
    for when, mine, its in zip(("cold", "cached"), ours, theirs, strict=True):
        two = [Candidate("ours", mine), Candidate("torch", its)]
        a, b = measure(two, num_repeats=repeats, burst_seconds=0.003, baseline="torch")
        print(
            f"{mesh_shape!s:13} {src + ' -> ' + dst:13} {when:7}"
            f" {a.min_us:8.1f} {a.median_us:8.1f}   {b.min_us:8.1f} {b.median_us:8.1f}"
            f"   {a.ratio_of_mins:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
