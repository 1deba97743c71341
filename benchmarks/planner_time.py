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
import logging
import math
import warnings

import torch
import torch.distributed as dist
from _harness import Candidate, measure, row_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as planner
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyper_parallel import core
from hyper_parallel.core.search import cheapest_way

SHAPE = (4096, 4096)
PAIRS = {
    1: [("0", "R"), ("R", "0"), ("0", "1"), ("P", "R"), ("P", "0")],
    2: [("01", "R0"), ("PP", "RR"), ("00", "1R"), ("R1", "PR"), ("P0", "1R"), ("RR", "01")],
    3: [("010", "RRR"), ("PPR", "0R1"), ("001", "R10")],
}
MESHES = ((8,), (2, 4), (2, 2, 2), (1024,), (8, 128), (2, 4, 128))


def our_placements(names: str) -> tuple[core.Placement, ...]:
    made = {"R": core.Replicate(), "P": core.Partial()}
    return tuple(made.get(name) or core.Shard(int(name)) for name in names)


def our_calls(mesh_shape: tuple[int, ...], src: str, dst: str):
    mesh = core.AbstractMesh("cpu", mesh_shape)
    begin = core.Layout(mesh, our_placements(src), SHAPE)
    target = our_placements(dst)

    def cached():
        return core.plan(begin, core.Layout.of(mesh, target, SHAPE))

    def cold():
        mesh.plans.clear()
        mesh.layouts.clear()
        cheapest_way.cache_clear()
        return cached()

    return cold, cached


def torch_placements(names: str) -> tuple:
    made = {"R": Replicate(), "P": Partial()}
    return tuple(made.get(name) or Shard(int(name)) for name in names)


def torch_calls(mesh_shape: tuple[int, ...], src: str, dst: str):
    mesh = init_device_mesh("cpu", mesh_shape)
    meta = TensorMeta(torch.Size(SHAPE), (SHAPE[1], 1), torch.float32)
    begin, target = DTensorSpec(mesh, torch_placements(src), meta), torch_placements(dst)

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
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # torch says where it would like a flattened mesh
    size = max(map(math.prod, meshes))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    print("mesh          move          when    ours: min median   torch: min median  ours/torch")
    for mesh_shape in meshes:
        for src, dst in PAIRS[len(mesh_shape)]:
            ours, theirs = (make(mesh_shape, src, dst) for make in (our_calls, torch_calls))
            for when, mine, its in zip(("cold", "cached"), ours, theirs, strict=True):
                two = [Candidate("ours", mine), Candidate("torch", its)]
                measure(two, num_repeats=options.repeats, burst_seconds=0.003)
                a, b = (row_of(candidate, two[1]) for candidate in two)
                print(
                    f"{mesh_shape!s:13} {src + ' -> ' + dst:13} {when:7}"
                    f" {a.min_us:8.1f} {a.median_us:8.1f}   {b.min_us:8.1f} {b.median_us:8.1f}"
                    f"   {a.ratio_of_mins:.3f}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
