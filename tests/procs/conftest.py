# SPDX-License-Identifier: Apache-2.0
"""Process pools that the tests of this folder share; they start at the first test that asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.procs import ProcessPool

_POOLS = {size: ProcessPool(size) for size in (2, 4)}


@pytest.fixture(scope="session")
def procs2() -> ProcessPool:
    """Two processes in one gloo world."""
    return _POOLS[2]


@pytest.fixture(scope="session")
def procs4() -> ProcessPool:
    """Four processes in one gloo world."""
    return _POOLS[4]


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the processes after the folder's last test: idle ones still take part of a core."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        for pool in _POOLS.values():
            pool.close()
