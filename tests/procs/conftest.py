# SPDX-License-Identifier: Apache-2.0
"""Process pools that the tests of this folder share; they start at the first test that asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.procs import ProcessPool


@pytest.fixture(scope="session")
def procs2() -> Iterator[ProcessPool]:
    """Two processes in one gloo world."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def procs4() -> Iterator[ProcessPool]:
    """Four processes in one gloo world."""
    yield from _pool(4)


def _pool(world_size: int) -> Iterator[ProcessPool]:
    pool = ProcessPool(world_size)
    try:
        yield pool
    finally:
        pool.close()
