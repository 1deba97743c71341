# SPDX-License-Identifier: Apache-2.0
"""The tables of the conformance suite in docs/verified.md: backends side by side.

`make conformance` runs the suite on every backend that a machine without accelerators has, and
prints them; COLUMNS="cpu npu" chooses. `npu` is simulated where torch_npu is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hyper_parallel.conformance import EMULATED, REFUSED, Report, run_conformance, table

__all__ = ["COLUMNS", "documented", "install", "markdown", "run"]

ROOT = Path(__file__).parents[2]


class Column(NamedTuple):
    """One column: where the suite runs."""

    heading: str
    backend: str
    world: str | None


COLUMNS = {
    "cpu": Column("`cpu`, gloo", "cpu", "processes"),
    "simulated": Column("simulated ranks", "cpu", "simulated"),
    "numpy": Column("`numpy`", "numpy", None),
    "npu": Column("`npu`, simulated NPU", "npu", "processes"),
    "hub": Column("`examples/hub_backend.py`", "hub", "processes"),
}
OPS = ("sum", "avg", "product", "max", "min")


def install(folder: Path, name: str, target: str) -> None:
    """Leave in a folder what the installation of a package with an entry point leaves."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hyper_parallel.backends]\n{name} = {target}\n")


def run(name: str) -> Report:
    """Run the suite for one column, on two ranks."""
    return run_conformance(COLUMNS[name].backend, world=COLUMNS[name].world, ranks=2)


def markdown(reports: dict[str, Report]) -> list[str]:
    """Give the lines of both tables: the numbers of checks, and what is not a plain pass."""
    _, *counts = table(list(reports.values()))
    headings = [COLUMNS[name].heading for name in reports]
    lines = [*_lines(("checks", *headings), counts), ""]
    notes = [
        (heading, _reductions(report, EMULATED), _moves(report), _reductions(report, REFUSED))
        for heading, report in zip(headings, reports.values(), strict=True)
    ]
    names = ("backend", "reductions emulated", "moves emulated", "reductions refused by design")
    return [*lines, *_lines(names, notes)]


def documented(name: str, text: str | None = None) -> dict[str, str]:
    """Read one column of the first table, of docs/verified.md unless another text is given."""
    text = (ROOT / "docs" / "verified.md").read_text() if text is None else text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    (start,) = (i for i, row in enumerate(rows) if row[0] == "checks")
    place = rows[start].index(COLUMNS[name].heading)
    found: dict[str, str] = {}
    for row in rows[start + 2 :]:
        if row[0] == "backend":
            break
        found[row[0]] = row[place]
    return found


def _lines(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    ruled = [heading, ["---"] * len(heading), *rows]
    return ["| " + " | ".join(row) + " |" for row in ruled]


def _reductions(report: Report, status: str) -> str:
    """Name the ops and dtypes of all-reduces with a status."""
    ops: dict[str, list[str]] = {}
    for one in report.results:
        if one.group == "all_reduce" and one.status == status:
            op, dtype = one.case.split(" ")
            ops.setdefault(dtype, []).append(op)
    dtypes: dict[str, list[str]] = {}
    for dtype, found in ops.items():
        every = sorted(found) == sorted(OPS)
        dtypes.setdefault("all ops" if every else ", ".join(found), []).append(dtype)
    return "; ".join(f"{which} of {', '.join(of)}" for which, of in dtypes.items()) or "-"


def _moves(report: Report) -> str:
    """Name the dtypes that are moved as others, and say whether uneven pieces are padded."""
    emulated = [(one.group, one.case) for one in report.results if one.status == EMULATED]
    dtypes = [case for group, case in emulated if group == "all_to_all"]
    padded = any(group == "uneven all_gather" for group, _ in emulated)
    return ", ".join([*dtypes, *["uneven pieces"] * padded]) or "-"


def _make_findable(folder: Path) -> None:
    """Let this process and those it starts find the example and the simulated NPU."""
    install(folder, "hub", "hub_backend:HubBackend")
    paths = [str(folder), str(ROOT / "examples")]
    if importlib.util.find_spec("torch_npu") is None:
        paths.append(str(ROOT / "tests" / "support" / "npu"))
    sys.path += paths
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([old] if old else [])])


def main(names: Sequence[str]) -> int:
    """Print the tables; say whether every backend conforms."""
    with tempfile.TemporaryDirectory() as folder:
        _make_findable(Path(folder))
        reports = {name: run(name) for name in names or COLUMNS}
    print("\n".join(markdown(reports)))
    failures = [(name, one) for name in reports for one in reports[name].failures]
    for name, one in failures:
        print(f"FAIL {name}: {one.group}[{one.case}]: {one.detail}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
