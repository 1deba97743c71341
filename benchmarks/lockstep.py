# SPDX-License-Identifier: Apache-2.0
"""What it takes to move an array between layouts on the NumPy backend, for a thousand ranks.

Each case runs in a process of its own: the first time with cold caches, so that planning counts,
then warm. A move is `redistribute` alone; the array is float32, distributed before, which caches
the cuts of the source. Uneven shards come and go as lists, which is part of the time. Seconds are
CPU time.

    python benchmarks/lockstep.py
    python benchmarks/lockstep.py --repeats 20
"""

import argparse
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from hyper_parallel.backends.numpy import distribute, gather, redistribute
from hyper_parallel.core import AbstractMesh, Layout, Packed, Partial, Replicate, Shard, plan

R, S, P = Replicate(), Shard, Partial
EVEN, UNEVEN = (1024, 1024), (1000, 1030)
CASES = [
    ((32, 32), (S(0), S(1)), (S(1), S(0)), EVEN),
    ((32, 32), (S(0), S(1)), (S(1), S(0)), UNEVEN),
    ((32, 32), (P(), S(0)), (S(1), S(0)), EVEN),
    ((32, 32), (P(), S(0)), (S(1), S(0)), UNEVEN),
    ((32, 32), (S(0), S(1)), (R, Packed(1, (512, 256, 256))), EVEN),
    ((8, 8, 16), (S(0), R, S(1)), (R, S(1), S(0)), EVEN),
    ((8, 8, 16), (S(0), R, S(1)), (R, S(1), S(0)), UNEVEN),
    ((8, 8, 16), (P("max"), S(0), S(0)), (S(0), S(1), S(1)), EVEN),
    ((1024,), (S(0),), (S(1),), EVEN),
    ((1024,), (S(0),), (S(1),), UNEVEN),
    ((1024,), (S(0),), (R,), EVEN),
]


def measure(number: int, repeats: int) -> tuple[float, float, list[float]]:
    """Give the seconds of the first plan, of the first move without it, and of later moves."""
    sizes, src, dst, shape = CASES[number]
    mesh = AbstractMesh("numpy", sizes)
    ends = Layout(mesh, src, shape), Layout(mesh, dst, shape)
    whole = np.random.default_rng(0).integers(0, 100, shape).astype(np.float32)
    held = distribute(whole, ends[0])
    start = time.process_time()
    plan(*ends)
    planned = time.process_time()
    moved = redistribute(held, *ends)
    first = time.process_time() - planned
    assert np.array_equal(gather(moved, ends[1]), whole)
    later = []
    for _ in range(repeats):
        begun = time.process_time()
        redistribute(held, *ends)
        later.append(time.process_time() - begun)
    return planned - start, first, later


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="warm moves of each case")
    repeats = parser.parse_args().repeats
    print("| mesh | from | to | shape | plan, cold | move, cold | warm, min | warm, median |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for number, case in enumerate(CASES):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            planned, first, later = pool.submit(measure, number, repeats).result()
        figures = (planned, first, min(later), statistics.median(later))
        print("|", " | ".join([*map(str, case), *(f"{seconds:.3f}" for seconds in figures)]), "|")


if __name__ == "__main__":
    main()
