# SPDX-License-Identifier: Apache-2.0
"""How much of torch's op database runs on DTensors, and how; values and gradients are compared.

    python benchmarks/op_coverage.py                      # some samples of every op
    python benchmarks/op_coverage.py --ops add,cat --samples 99 --ways 99
    python benchmarks/op_coverage.py --torch              # torch's own DTensor, on the same cases

Each case is exact by `rule`, by `default` (operands were gathered, with a warning), `refused` (by
a HyperParallelError, alike on every rank), or `wrong`. `cut` counts the cases by rule whose
operands were cut or pending and whose result still is: nothing was gathered.
"""

import argparse
import json
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from _op_cases import Case, cases_of, contribution, differs, infos
from rich.console import Console
from rich.table import Table

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
    strict_rules,
)
from hyper_parallel.errors import HyperParallelError, RuleError
from hyper_parallel.runtime import current_rank

KINDS = ("rule", "default", "refused", "wrong")
THEIRS = ("torch exact", "torch refused", "torch wrong")


@dataclass
class Row:
    """What came of the cases of one op."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def place(tensor: torch.Tensor, at: int | str | None, mesh: Any) -> DTensor:
    """Lay a whole tensor out."""
    if at == "sum":
        part = contribution(tensor, current_rank() or 0)
        placed = DTensor.from_local(part, mesh, [Partial()])
    else:
        placement = Replicate() if at is None else Shard(int(at))
        placed = distribute_tensor(tensor.detach().clone(), mesh, [placement])
    return placed.requires_grad_(tensor.requires_grad)


def run_case(case: Case) -> tuple[str, str]:
    """Run a case on this rank: what came of it, and a note."""
    mesh = init_device_mesh("cpu", (case.num_ranks,), mesh_dim_names=("tp",))
    sample = case.sample
    seeds = [distribute_tensor(seed, mesh, [Replicate()]) for seed in sample.seeds]

    def call() -> tuple[list[Any], list[Any]]:
        tensors = [place(t, at, mesh) for t, at in zip(sample.tensors, case.way, strict=True)]
        return sample.with_gradients(tensors, seeds)

    kind, note = "rule", ""
    try:
        try:
            with strict_rules():
                results, grads = call()
        except RuleError:
            kind = "default"
            results, grads = call()
    except HyperParallelError as error:
        return "refused", str(error)
    except Exception as error:  # any other error is a finding
        return "wrong", f"{type(error).__name__}: {error}"
    note = differs(sample, [_whole(r) for r in results], [_whole(g) for g in grads])
    if note:
        return "wrong", f"{kind}: {note}"
    if kind == "rule" and any(case.way):
        is_cut = any(isinstance(r, DTensor) and not r.layout.is_replicated for r in results)
        kind = "rule cut" if is_cut else kind
    return kind, note


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def judge(case: Case) -> tuple[str, str]:
    """Run a case on all ranks; they must agree."""
    outcomes = simulate(case.num_ranks).outcomes(run_case, case)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            return "wrong", f"{type(outcome).__name__}: {outcome}"
    if len({outcome[0] for outcome in outcomes}) > 1:  # type: ignore[index]
        return "wrong", f"ranks differ: {outcomes}"
    return outcomes[0]  # type: ignore[return-value]


def run_op(
    info: Any,
    num_samples: int,
    num_ways: int,
    num_ranks: int = 2,
    *,
    in_place: bool = False,
    with_torch: bool = False,
) -> Row:
    """Run the cases of one op."""
    name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
    row = Row(name + ("_" if in_place else ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases_of(info, num_samples, num_ways, num_ranks, in_place=in_place):
            kind, note = judge(case)
            row.counts[kind.partition(" ")[0]] += 1
            row.counts["cut"] += kind == "rule cut"
            shapes = [tuple(t.shape) for t in case.sample.tensors]
            if kind in ("wrong", "refused", "default"):
                row.notes.append(f"{kind} {case.way} {shapes}: {note}")
            if with_torch:
                from _torch_dtensor import judge as judge_torch

                theirs, note = judge_torch(case)
                row.counts[f"torch {theirs}"] += 1
                if theirs != "exact":
                    row.notes.append(f"torch {theirs} {case.way} {shapes}: {note}"[:300])
    return row


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", help="names from the op database, with commas between")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th op, from the I-th on")
    parser.add_argument("--samples", type=int, default=4, help="samples of each op (4)")
    parser.add_argument("--ways", type=int, default=8, help="layouts of each sample (8)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the mesh (2)")
    parser.add_argument("--in-place", action="store_true", help="the in-place form of the ops")
    parser.add_argument("--torch", action="store_true", help="torch's DTensor on the same cases")
    parser.add_argument("--notes", type=int, default=1, help="notes printed of each op (1)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    return parser.parse_args()


def main() -> None:
    """Run what was asked for, print the table and the sums."""
    options = _arguments()
    torch.set_num_threads(1)
    rows = []
    part, parts = map(int, options.part.split("/"))
    for info in infos(options.ops)[part - 1 :: parts]:
        row = run_op(
            info,
            options.samples,
            options.ways,
            options.ranks,
            in_place=options.in_place,
            with_torch=options.torch,
        )
        if sum(row.counts.values()):
            rows.append(row)
    report(rows, options)


def report(rows: list[Row], options: argparse.Namespace) -> None:
    """Print the table, notes, and sums."""
    console = Console(width=None if Console().is_terminal else 150)
    columns = [*KINDS, "cut", *(THEIRS if options.torch else ())]
    table = Table("op", *columns)
    for row in rows:
        table.add_row(row.name, *(str(row.counts[column] or "") for column in columns))
    console.print(table)
    for row in rows:
        for note in sorted(row.notes, key=lambda text: not text.startswith("wrong"))[
            : options.notes
        ]:
            console.print(f"{row.name}: {note}"[:400], markup=False, highlight=False)
    total = sum((row.counts for row in rows), Counter[str]())
    console.print("cases:", ", ".join(f"{total[column]} {column}" for column in columns))
    for kinds in (KINDS, THEIRS) if options.torch else (KINDS,):
        worst = Counter(next((k for k in reversed(kinds) if row.counts[k]), "") for row in rows)
        console.print("ops by their worst case:", ", ".join(f"{worst[k]} {k}" for k in kinds))
    defaulted = [row.name for row in rows if row.counts["default"]]
    console.print(f"gathered, some or all of their cases: {' '.join(defaulted)}", highlight=False)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([{"op": r.name, **r.counts, "notes": r.notes} for r in rows], file, indent=1)


if __name__ == "__main__":
    main()
