# SPDX-License-Identifier: Apache-2.0
"""The command line: `hyper-parallel doctor`, or `python -m hyper_parallel doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from hyper_parallel.core.estimate import align
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.tools.doctor import (
    environment,
    examine,
    usual_backend,
    version,
    without_autoload,
)

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: what follows the program's name; default those of this process.

    Returns:
        The exit status: 0, or 1 where something that was asked for is not well.
    """
    options = _parser().parse_args(arguments)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hyper-parallel", description="Tools of hyper_parallel.")
    parser.add_argument(
        "--version", action="version", version=version("hyper-parallel") or "unknown"
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, which backends work here, and how fast",
        description="Say what is installed, which backends can be used here, why others cannot,"
        " and how fast collectives are among the ranks that run this (start with torchrun).",
    )
    doctor.add_argument(
        "--backend", action="append", help="device type; again for more (an accelerator, else cpu)"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument("--no-bandwidth", action="store_true", help="measure nothing")
    doctor.add_argument(
        "--conformance", action="store_true", help="run the suite that every backend must pass"
    )
    doctor.add_argument("--ranks", type=int, help="ranks of the suite, without torchrun (2)")
    doctor.add_argument("--world", choices=("simulated", "processes", "here"), help="of the suite")
    doctor.set_defaults(run=_doctor)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    is_first = os.environ.get("RANK", "0") == "0"
    found = examine()
    problems: list[str] = list(found["warnings"])
    names = options.backend or [usual_backend(found["backends"])]
    reports: list[Any] = []
    with without_autoload():
        usable = {one["name"] for one in found["backends"] if one["available"]}
        wanted = names if options.conformance else options.backend or ()
        lacking = [name for name in wanted if name not in usable]
        problems += [f"backend {name!r} cannot be used here" for name in lacking]
        try:
            if not options.no_bandwidth:
                found["bandwidth"] = [_bandwidth(name) for name in names if name in usable]
            if options.conformance:
                reports = [_conformance(name, options) for name in names if name in usable]
                found["conformance"] = [report.as_dict() for report in reports]
        except HyperParallelError as error:
            problems.append(str(error))
    _end_world()
    for report in reports:
        for one in report.failures:
            problems.append(f"{report.title}: {one.group}[{one.case}] failed: {one.detail}")
    found["problems"] = problems
    if is_first:
        print(json.dumps(found, indent=2)) if options.json else _show(found, reports)
    return int(bool(problems))


def _bandwidth(name: str) -> dict[str, Any]:
    """Measure in the world of torchrun, or in one of this process alone."""
    bandwidth: Any = importlib.import_module("hyper_parallel.tools.bandwidth")
    runtime: Any = importlib.import_module("hyper_parallel.runtime")
    if runtime.backend_for(name).capabilities.all_ranks:
        return {"backend": name, "ranks": None, "rows": []}  # nothing is sent
    with environment(**({} if "RANK" in os.environ else _alone())):
        ranks = int(os.environ["WORLD_SIZE"])
        mesh = runtime.init_device_mesh(name, (ranks,), check=False)
        rows = [dataclasses.asdict(row) for row in bandwidth.measure(mesh)]
    return {"backend": name, "ranks": ranks, "rows": rows}


def _alone() -> dict[str, str]:
    """Give torchrun's variables for a world of one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return {**here, "MASTER_PORT": str(port)}


def _conformance(name: str, options: argparse.Namespace) -> Any:
    suite: Any = importlib.import_module("hyper_parallel.conformance")
    return suite.run_conformance(name, world=options.world, ranks=options.ranks)


def _end_world() -> None:
    """Leave torch's process group, if there is one."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _show(found: dict[str, Any], reports: list[Any]) -> None:
    print(f"Python {found['python']}, {found['platform']}")
    packages = [(name, version or "not installed") for name, version in found["packages"].items()]
    show_table("Packages", [("package", "version"), *packages])
    if found["environment"]:
        show_table("Environment", [("variable", "value"), *found["environment"].items()])
    show_table("Backends", [("backend", "state", "devices", "what to do"), *_backends(found)])
    for bandwidth in found.get("bandwidth", ()):
        if bandwidth["rows"]:
            show_table(*_speeds(bandwidth))
    if reports:
        suite: Any = importlib.import_module("hyper_parallel.conformance")
        show_table("Conformance (numbers of checks)", suite.table(reports))
    for problem in found["problems"]:
        print(f"PROBLEM {problem}")


def show_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a heading and rows: by rich where it is installed, else as aligned text."""
    columns = zip(*rows, strict=True)
    sides = "".join(">" if all(map(_is_number, column[1:])) else "<" for column in columns)
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print(title, align(rows, sides), "", sep="\n")
        return
    console, table = Console(), Table(title=title, title_justify="left")
    for heading, side in zip(rows[0], sides, strict=True):
        table.add_column(heading, justify="right" if side == ">" else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(table)


def _is_number(text: str) -> bool:
    return text.replace(".", "").replace("-", "").isdigit() or not text


def _backends(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for one in found["backends"]:
        libraries = ", ".join(f"{name} {version}" for name, version in one["libraries"].items())
        state = f"available ({libraries})" if libraries else "available"
        state = state if one["available"] else f"unavailable: {one['reason']}"
        yield one["name"], state, "; ".join(one["devices"]), one["fix"] or ""


def _speeds(bandwidth: dict[str, Any]) -> tuple[str, list[tuple[str, ...]]]:
    ranks = bandwidth["ranks"]
    title = f"Bandwidth on {bandwidth['backend']}, {ranks} rank{'s' * (ranks > 1)}"
    if ranks == 1:
        title += " (start with torchrun to measure links)"
    rows = [
        (
            row["collective"],
            f"{row['bytes'] / 2**20:.3f}",
            f"{row['seconds'] * 1e6:.0f}",
            f"{row['gigabytes_per_second']:.3f}" if ranks > 1 else "-",
        )
        for row in bandwidth["rows"]
    ]
    return title, [("collective", "MiB", "us per call", "GB/s of the link"), *rows]
