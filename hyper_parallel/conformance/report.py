# SPDX-License-Identifier: Apache-2.0
"""Results of the suite: per check, and as a table with one row a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hyper_parallel.conformance.here import EMULATED, FAIL, PASS, REFUSED

__all__ = ["Report", "Result", "table"]

STATUSES = (PASS, EMULATED, REFUSED, FAIL)


@dataclass(frozen=True, slots=True)
class Result:
    """What came out of one check.

    Args:
        group: the check's row in the table.
        case: the check's case.
        status: PASS, EMULATED, REFUSED or FAIL; "" where the check does not apply.
        detail: what went wrong, or why it does not apply.
    """

    group: str
    case: str
    status: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one run of the suite on one backend.

    Args:
        backend: the device type it was run on.
        world: where the ranks were.
        ranks: how many.
        results: one for each check.
    """

    backend: str
    world: str
    ranks: int
    results: tuple[Result, ...]

    @property
    def failures(self) -> tuple[Result, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.status == FAIL)

    @property
    def title(self) -> str:
        """What was run where."""
        return f"{self.backend}, {self.ranks} ranks, {self.world}"

    def counts(self) -> dict[str, str]:
        """Say for each group how many of its checks had which status."""
        found: dict[str, Counter[str]] = {}
        for result in self.results:
            found.setdefault(result.group, Counter())[result.status] += 1
        said = {group: [f"{n[s]} {s}" for s in STATUSES if n[s]] for group, n in found.items()}
        return {group: ", ".join(words) or "-" for group, words in said.items()}

    def as_dict(self) -> dict[str, Any]:
        """Give everything as plain data."""
        return asdict(self)


def table(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """Give the results of several backends side by side.

    Args:
        reports: one for each column.

    Returns:
        A heading, then one row a group of checks; "-" where none of them applies.
    """
    counts = [report.counts() for report in reports]
    groups = dict.fromkeys(group for each in counts for group in each)
    heading = ("checks", *(report.title for report in reports))
    return [heading, *((group, *(each.get(group, "-") for each in counts)) for group in groups)]
