# SPDX-License-Identifier: Apache-2.0
"""The size report: what is over an aim and under its stop is printed, and fails nothing."""

import pytest

LINES = pytest.StashKey[list[str]]()


@pytest.fixture
def size_report(request: pytest.FixtureRequest) -> list[str]:
    """Return the list whose lines are printed at the end of the run."""
    return request.config.stash.setdefault(LINES, [])


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Print the report where there is one."""
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("size report (over an aim, under the stop)")
        for line in lines:
            terminalreporter.write_line(line)
