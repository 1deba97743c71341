# SPDX-License-Identifier: Apache-2.0
"""Plans of redistributions, ours against torch's: launches and bytes per mesh axis, and time.

Every pair of layouts in default order (R, P, S(d) per axis) on meshes of 8 ranks is planned by
both. Torch's steps come from its private planner, once as it is and once with a flattened mesh for
every group of axes, which lets it fuse. Bytes are what the busiest rank receives (an all_to_all: or
sends); torch's uneven pieces are padded, as it pads them. A fused step counts on its slowest axis.
A plan is dominated if another has no more launches and no more bytes on every axis, and fewer on
one. "At bound" counts the pairs with nothing pending that receive no more than what a rank needs
and does not hold. Times are those of our default link model.

    python benchmarks/plans.py
    python benchmarks/plans.py --mesh 2,2,2 --every 5
"""

import argparse
import itertools
import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as planner
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyper_parallel import core
from hyper_parallel.core.collective import Step
from hyper_parallel.core.cost import LinkModel, elements_moved
from hyper_parallel.core.exchange import group_ranks, region_shape, transfers
from hyper_parallel.core.interval import count, intersect
from hyper_parallel.core.search import cheapest_way

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
SHAPES = {
    "64 KiB": ((128, 128), (127, 129), (16384,), (32, 16, 32)),
    "4 MiB": ((1024, 1024), (1023, 1025), (1048576,), (128, 64, 128)),
    "256 MiB": ((8192, 8192), (8191, 8193), (67108864,), (512, 256, 512)),
}
ITEMSIZE = 4
MODEL = LinkModel()


@dataclass(frozen=True)
class Bill:
    """What a plan costs: launches and bytes by axis, and seconds."""

    launches: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: float

    def dominates(self, other: "Bill") -> bool:
        mine, its = (*self.launches, *self.sizes), (*other.launches, *other.sizes)
        return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def bill(steps: Sequence[tuple[str, tuple[int, ...], int]], mesh_shape: tuple[int, ...]) -> Bill:
    """Add up (kind, axes, bytes) of communicating steps."""
    launches, sizes, seconds = [0] * len(mesh_shape), [0] * len(mesh_shape), 0.0
    for _, axes, size in steps:
        launches[min(axes)] += 1
        sizes[min(axes)] += size
        seconds += MODEL.seconds(mesh_shape, axes, size=size)
    return Bill(tuple(launches), tuple(sizes), seconds)


def our_size(step: Step) -> int:
    """Give the bytes of our step on its busiest rank, exactly for an all_to_all."""
    mesh = step.src.mesh
    if step.kind != "all_to_all":
        num_ranks = math.prod(mesh.shape[axis] for axis in step.axes)
        before, after = (math.prod(at.largest_shape) for at in (step.src, step.dst))
        return ITEMSIZE * elements_moved(step.kind, num_ranks, before, after)
    most = 0
    for rank in mesh.ranks:
        table, group = transfers(step, rank), group_ranks(step, rank)
        for regions in (table.send, table.receive):
            parts = zip(group, regions, strict=True)
            most = max(most, sum(math.prod(region_shape(p)) for o, p in parts if o != rank))
    return ITEMSIZE * most


def our_bill(src: core.Layout, dst: core.Layout) -> Bill:
    steps = core.plan(src, dst, itemsize=ITEMSIZE).steps
    facts = [(step.kind, step.axes, our_size(step)) for step in steps if step.communicates]
    return bill(facts, src.mesh.shape)


def to_torch(placement: core.Placement):
    if isinstance(placement, core.Shard):
        return Shard(placement.dim)
    return Partial() if placement.is_partial() else Replicate()


def from_torch(placement) -> core.Placement:
    if placement.is_shard():
        return core.Shard(placement.dim)
    return core.Partial() if placement.is_partial() else core.Replicate()


def torch_bill(src: core.Layout, dst: core.Layout, meshes: Sequence) -> list[Bill]:
    """Price torch's plan on each of its meshes (without and with flattened groups)."""
    meta = TensorMeta(torch.Size(src.shape), tuple(range(len(src.shape))), torch.float32)
    bills = []
    for mesh in meshes:
        ends = [DTensorSpec(mesh, tuple(map(to_torch, at.placements)), meta) for at in (src, dst)]
        infos = planner._gen_transform_infos_non_cached(*ends)
        infos = planner._optimize_transform_infos(infos, mesh, *(end.placements for end in ends))
        here, facts = src, []
        for info in infos:
            axes = getattr(info, "original_mesh_dims", (info.mesh_dim,))
            new = from_torch(info.src_dst_placements[1])
            there = here.with_placements(
                [new if axis in axes else p for axis, p in enumerate(here.placements)]
            )
            kind = info._comm_type_key()
            if kind is not None:
                facts.append((kind, tuple(axes), torch_size(kind, axes, here, there)))
            here = there
        assert here.placements == dst.placements
        bills.append(bill(facts, src.mesh.shape))
    return bills


def torch_size(kind: str, axes: Sequence[int], before: core.Layout, after: core.Layout) -> int:
    """Give the bytes of torch's step on its busiest rank: every piece is padded to the largest."""
    num_ranks = math.prod(before.mesh.shape[axis] for axis in axes)
    sizes = [math.prod(at.largest_shape) for at in (before, after)]
    if kind == "all_to_all":  # padded on both dims
        dims = [at.placements[axes[0]].cut_dim for at in (before, after)]
        piece = list(before.largest_shape)
        piece[dims[1]] = after.largest_shape[dims[1]]
        return ITEMSIZE * (num_ranks - 1) * math.prod(piece)
    piece = sizes[0] if kind == "all_gather" else sizes[1]
    if kind == "all_reduce":
        return ITEMSIZE * elements_moved(kind, num_ranks, *sizes)
    return ITEMSIZE * (num_ranks - 1) * piece


def lacking(src: core.Layout, dst: core.Layout) -> int:
    """Give the bytes that some rank needs and does not hold; of layouts with nothing pending."""
    most = 0
    for rank in src.mesh.ranks:
        before, after = src.intervals(rank), dst.intervals(rank)
        both = math.prod(count(intersect(a, b)) for a, b in zip(before, after, strict=True))
        most = max(most, math.prod(map(count, after)) - both)
    return ITEMSIZE * most


def pairs_of(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], every: int
) -> Iterator[tuple[core.Layout, core.Layout]]:
    mesh = core.AbstractMesh("cpu", mesh_shape)
    options = [core.Replicate(), core.Partial(), *map(core.Shard, range(len(shape)))]
    layouts = [
        core.Layout(mesh, placements, shape)
        for placements in itertools.product(options, repeat=mesh.ndim)
    ]
    return itertools.islice(itertools.permutations(layouts, 2), 0, None, every)


def torch_meshes(mesh_shape: tuple[int, ...]) -> list:
    """Make torch's mesh as users make it, and one with every group of axes flattened."""
    names = tuple("xyz"[: len(mesh_shape)])
    meshes = [init_device_mesh("cpu", mesh_shape, mesh_dim_names=names) for _ in range(2)]
    for n in range(2, len(names) + 1):
        for group in itertools.combinations(names, n):
            meshes[1][group]._flatten("_".join(group))
    return meshes


def compare(mesh_shape: tuple[int, ...], shape: tuple[int, ...], every: int) -> Counter:
    """Count how our plans and torch's compare over all pairs on one mesh."""
    found: Counter = Counter()
    meshes = torch_meshes(mesh_shape)
    for src, dst in pairs_of(mesh_shape, shape, every):
        ours = our_bill(src, dst)
        found["pairs"] += 1
        bound = None if src.has_partial or dst.has_partial else lacking(src, dst)
        if bound is not None:
            found["bounded"] += 1
            found["at bound"] += sum(ours.sizes) <= bound
        for name, its in zip(("", " fused"), torch_bill(src, dst, meshes), strict=True):
            found["dominated" + name] += its.dominates(ours)
            found["we dominate" + name] += ours.dominates(its)
            found["slower" + name] += ours.seconds > its.seconds * (1 + 1e-9)
            if its.seconds:
                found["ratio" + name] += math.log(max(ours.seconds, 1e-6) / its.seconds)
                found["priced" + name] += 1
    return found


def planning_times(mesh_shape: tuple[int, ...], shape: tuple[int, ...], every: int) -> list[float]:
    """Time cold plans, in microseconds of CPU time."""
    times = []
    for src, dst in pairs_of(mesh_shape, shape, every):
        src.mesh.plans.clear()
        cheapest_way.cache_clear()
        start = time.process_time()
        core.plan(src, dst)
        times.append((time.process_time() - start) * 1e6)
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", help="one mesh shape, such as 2,4")
    parser.add_argument("--every", type=int, default=1, help="compare each n-th pair only")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # torch says where it would like a flattened mesh
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    meshes = [tuple(map(int, args.mesh.split(",")))] if args.mesh else MESHES
    print("mesh       size     tensor             pairs  dominated  slower  we dominate", end="")
    print("  time/torch  at bound   (second figures: torch with all groups flattened)")
    for mesh_shape, (size, shapes) in itertools.product(meshes, SHAPES.items()):
        for shape in shapes:
            n = compare(mesh_shape, shape, args.every)
            ratio, fused = (
                math.exp(n["ratio" + w] / max(n["priced" + w], 1)) for w in ("", " fused")
            )
            print(
                f"{mesh_shape!s:10} {size:8} {shape!s:18} {n['pairs']:5}"
                f"  {n['dominated']:4} {n['dominated fused']:4}"
                f"  {n['slower']:3} {n['slower fused']:3}"
                f"  {n['we dominate']:5} {n['we dominate fused']:5}"
                f"  {ratio:.2f} {fused:.2f}   {n['at bound']}/{n['bounded']}",
                flush=True,
            )
    for mesh_shape in meshes:
        times = planning_times(mesh_shape, (1024, 1023), args.every)
        print(
            f"cold plan on {mesh_shape}: median {times[len(times) // 2]:.0f} us,"
            f" 95% {times[len(times) * 95 // 100]:.0f} us"
        )


if __name__ == "__main__":
    main()
