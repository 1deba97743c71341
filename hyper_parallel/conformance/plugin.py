# SPDX-License-Identifier: Apache-2.0
"""Options of the suite for pytest: -p hyper_parallel.conformance.plugin --backend NAME."""

from __future__ import annotations

from typing import Any

from hyper_parallel.conformance.worlds import WORLDS

__all__ = ["pytest_addoption"]


def pytest_addoption(parser: Any) -> None:
    """Add --backend, --ranks and --world."""
    group = parser.getgroup("hyper_parallel conformance")
    group.addoption("--backend", default="cpu", help="device type to certify (cpu)")
    group.addoption("--ranks", type=int, default=None, help="number of ranks (2)")
    group.addoption("--world", choices=WORLDS, default=None, help="where the ranks are")
