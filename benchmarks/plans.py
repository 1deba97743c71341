# SPDX-License-Identifier: Apache-2.0
"""Plans of redistributions: ours against torch's, against every other plan, and the lower bound.

Every pair of layouts (R, P, S(d) per axis, in every order of the axes that cut one dim) on meshes
of 8 ranks is planned by both. A plan's bill has the number of launches and, for each mesh axis, the
launches that span it and the bytes of those it is the slowest axis of, which is the first. Bytes
are what the busiest rank receives (an all_to_all: or sends); torch's uneven pieces are padded, as
it pads them. A plan is dominated if another has no more in every entry, and less in one.

Columns: `pairs` (those in default order, all); `by torch`: ours that torch's plan dominates;
`slower`: ours whose modelled time is above torch's; `we`: torch's that ours dominates;
`time/torch`: geometric mean of the modelled times. Second figures are against torch with all groups
flattened, which lets it fuse. `by any`: ours that some plan of our own step set dominates, of those
searched through (every --search-th pair). `at bound`: of the pairs with nothing pending, those that
receive no more than what some rank needs and does not hold. `rest` says what the others save
against the plan with the fewest bytes: so many launches, hops (a launch spans fewer axes), or bytes
over the slow axis, the first.
Times are those of our default link model.

    python benchmarks/plans.py
    python benchmarks/plans.py --mesh 2,2,2 --ndim 2 --every 11 --search 100

On three axes there are many pairs: 8,372 of a tensor of 2 dims, 30,800 of 3, 5 to 40 ms each.
"""

import argparse
import itertools
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from _harness import fake_rank
from _torch_plans import TorchPlanner

from hyper_parallel import core
from hyper_parallel.core.collective import COMMUNICATING
from hyper_parallel.core.cost import Link, LinkModel
from hyper_parallel.core.estimate import Estimate
from hyper_parallel.core.plan import problem_of
from hyper_parallel.core.search import cheapest_way
from hyper_parallel.core.space import Move, Space

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
SHAPES = {
    "64 KiB": ((128, 128), (127, 129), (16384,), (32, 16, 32)),
    "4 MiB": ((1024, 1024), (1023, 1025), (1048576,), (128, 64, 128)),
    "256 MiB": ((8192, 8192), (8191, 8193), (67108864,), (512, 256, 512)),
}
ITEMSIZE = 4
MODEL = LinkModel()
# Only bytes cost, and on every axis alike.
BYTES_ONLY = LinkModel(launch=1e-9, links=(Link(0.0, 1e9),) * 3)


@dataclass(frozen=True)
class Bill:
    """What a plan costs: launches, launches and bytes by axis, and seconds."""

    launches: int
    spans: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: float

    def dominates(self, other: "Bill") -> bool:
        mine, its = ((b.launches, *b.spans, *b.sizes) for b in (self, other))
        return mine != its and fits(mine, its)


def fits(entries: Sequence[int], limits: Sequence[int]) -> bool:
    return all(a <= b for a, b in zip(entries, limits, strict=True))


def bill(facts: Sequence[tuple[tuple[int, ...], int]], mesh_shape: tuple[int, ...]) -> Bill:
    """Add up (axes, bytes) of communicating steps."""
    spans, sizes, seconds = [0] * len(mesh_shape), [0] * len(mesh_shape), 0.0
    for axes, size in facts:
        for axis in axes:
            spans[axis] += 1
        sizes[min(axes)] += size
        seconds += MODEL.seconds(mesh_shape, axes, size=size)
    return Bill(len(facts), tuple(spans), tuple(sizes), seconds)


def our_bill(moved: Estimate) -> Bill:
    facts = [(one.step.axes, max(one.sent, one.received)) for one in moved.steps]
    return bill([fact for fact in facts if fact[1]], moved.src.mesh.shape)


def estimate(plan: core.Plan) -> Estimate:
    return Estimate.of(plan.src, plan.dst, plan.steps, itemsize=ITEMSIZE, model=MODEL)


def is_dominated(src: core.Layout, dst: core.Layout) -> bool:
    """Search all plans of our step set for one that dominates ours, by the planner's own bytes."""
    space = Space(problem_of(src, dst, ITEMSIZE, MODEL))
    ndim = src.mesh.ndim

    def entries(move: Move) -> tuple[int, ...]:
        if move.kind not in COMMUNICATING:
            return (0,) * (1 + 2 * ndim)
        spans = (int(axis in move.axes) for axis in range(ndim))
        return (1, *spans, *(move.size * (axis == min(move.axes)) for axis in range(ndim)))

    edges: dict[int, list[tuple[int, tuple[int, ...], Move]]] = {}

    def edges_of(state: int):
        if state not in edges:
            edges[state] = [(m.target, entries(m), m) for m in space.moves(state, math.inf)]
        return edges[state]

    limit, state = (0,) * (1 + 2 * ndim), 0
    for leg in cheapest_way(space.problem).legs:
        fitting = [
            edge
            for edge in edges_of(state)
            if edge[2].kind == leg.kind
            and tuple(sorted(edge[2].axes)) == leg.axes
            and space.state(edge[0]) == leg.state
        ]
        state, own, _ = min(fitting, key=lambda edge: edge[2].cost)
        limit = tuple(map(sum, zip(limit, own, strict=True)))
    labels: dict[int, list[tuple[int, ...]]] = {0: [(0,) * len(limit)]}
    queue = [(0, (0,) * len(limit))]
    while queue:
        state, spent = queue.pop()
        if spent not in labels[state]:
            continue
        for target, own, _ in edges_of(state):
            reached = tuple(map(sum, zip(spent, own, strict=True)))
            known = labels.setdefault(target, [])
            if not fits(reached, limit) or any(fits(other, reached) for other in known):
                continue
            labels[target] = [other for other in known if not fits(reached, other)] + [reached]
            queue.append((target, reached))
    return any(label != limit for label in labels[space.end])


def saved(plan: core.Plan) -> str:
    """Say what a plan that receives more than it must saves against one that does not."""
    least = core.plan(plan.src, plan.dst, itemsize=ITEMSIZE, model=BYTES_ONLY)
    ours, its = our_bill(estimate(plan)), our_bill(estimate(least))
    if ours.launches < its.launches:
        return f"{its.launches - ours.launches} fewer"
    if sum(ours.spans) < sum(its.spans):
        return "hops"
    if ours.sizes[0] < its.sizes[0]:
        return "slow"
    return "other"


def layouts_of(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> list[core.Layout]:
    """List the layouts of a tensor, in every order of the axes that cut one dim."""
    mesh = core.AbstractMesh("cpu", mesh_shape)
    options = [core.Replicate(), core.Partial(), *map(core.Shard, range(len(shape)))]
    every = (
        core.Layout(mesh, placements, shape, order)
        for placements in itertools.product(options, repeat=mesh.ndim)
        for order in itertools.permutations(range(mesh.ndim))
    )
    return list(dict.fromkeys(every))


def pairs_of(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], every: int
) -> Iterator[tuple[core.Layout, core.Layout]]:
    pairs = itertools.permutations(layouts_of(mesh_shape, shape), 2)
    return itertools.islice(pairs, 0, None, every)


def compare(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], every: int, search: int
) -> tuple[Counter, Counter]:
    """Count how our plans and torch's compare over the pairs on one mesh; and launches saved."""
    found: Counter = Counter()
    rest: Counter = Counter()
    torchs = TorchPlanner(mesh_shape, ITEMSIZE)
    for number, (src, dst) in enumerate(pairs_of(mesh_shape, shape, every)):
        plan = core.plan(src, dst, itemsize=ITEMSIZE, model=MODEL)
        moved = estimate(plan)
        ours = our_bill(moved)
        found["pairs"] += 1
        found["default"] += not src.order and not dst.order
        if number % search == 0:
            found["searched"] += 1
            found["by any"] += is_dominated(src, dst)
        if not src.has_partial and not dst.has_partial:
            found["bounded"] += 1
            if moved.received <= moved.needed:
                found["at bound"] += 1
            else:
                rest[saved(plan)] += 1
        try:
            theirs = torchs.plans(src, dst)
        except RuntimeError:
            found["torch cannot"] += 1
            continue
        for name, facts in zip(("", " fused"), theirs, strict=True):
            its = bill(facts, mesh_shape)
            found["by torch" + name] += its.dominates(ours)
            found["we" + name] += ours.dominates(its)
            found["slower" + name] += ours.seconds > its.seconds * (1 + 1e-9)
            if its.seconds:
                found["ratio" + name] += math.log(max(ours.seconds, 1e-6) / its.seconds)
                found["priced" + name] += 1
    return found, rest


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


HEAD = (
    f"{'mesh':9} {'size':7} {'tensor':15} {'pairs':>11}  {'by torch':>8}  {'slower':>8}  {'we':>11}"
    f"  time/torch  {'by any':>6}  at bound   rest"
)


def row(mesh_shape: tuple[int, ...], size: str, shape: tuple[int, ...], every: int, search: int):
    n, rest = compare(mesh_shape, shape, every, search)
    ratios = [math.exp(n["ratio" + w] / max(n["priced" + w], 1)) for w in ("", " fused")]
    saved = ", ".join(f"{k}: {v}" for k, v in sorted(rest.items()))
    mesh, tensor = ("x".join(map(str, numbers)) for numbers in (mesh_shape, shape))
    print(
        f"{mesh:9} {size:7} {tensor:15} {n['default']:5}/{n['pairs']:5}"
        f"  {n['by torch']:3}, {n['by torch fused']:3}  {n['slower']:3}, {n['slower fused']:3}"
        f"  {n['we']:5},{n['we fused']:5}  {ratios[0]:.2f}, {ratios[1]:.2f}"
        f"  {n['by any']:2}/{n['searched']:3}  {n['at bound']}/{n['bounded']}  {{{saved}}}",
        flush=True,
    )
    if n["torch cannot"]:
        print(f"{'':33} {n['torch cannot']:11}  of which torch refuses", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", help="one mesh shape, such as 2,4")
    parser.add_argument("--size", choices=SHAPES, help="one size")
    parser.add_argument("--ndim", type=int, choices=(1, 2, 3), help="tensors of so many dims only")
    parser.add_argument("--every", type=int, default=1, help="compare each n-th pair only")
    parser.add_argument("--search", type=int, default=20, help="search through each n-th of these")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    meshes = [tuple(map(int, args.mesh.split(",")))] if args.mesh else MESHES
    sizes = {args.size: SHAPES[args.size]} if args.size else SHAPES
    with fake_rank(8):
        print(HEAD)
        for mesh_shape, (size, shapes) in itertools.product(meshes, sizes.items()):
            for shape in shapes:
                if args.ndim in (None, len(shape)):
                    row(mesh_shape, size, shape, args.every, args.search)
        for mesh_shape in meshes:
            times = planning_times(mesh_shape, (1024, 1023), args.every)
            print(
                f"cold plan on {mesh_shape}: median {times[len(times) // 2]:.0f} us,"
                f" 95% {times[len(times) * 95 // 100]:.0f} us"
            )


if __name__ == "__main__":
    main()
