# SPDX-License-Identifier: Apache-2.0
"""Results of the suite: per check, and as a table with one row a group."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from hyper_parallel.conformance.here import EMULATED, FAIL, PASS, REFUSED

__all__ = ["Report", "Result"]

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

    def rows(self) -> list[tuple[str, ...]]:
        """Give the table: a heading, then per group the number of checks of each status."""
        counts: dict[str, Counter[str]] = {}
        for result in self.results:
            counts.setdefault(result.group, Counter())[result.status] += 1
        heading = (f"{self.backend}, {self.ranks} ranks, {self.world}", *STATUSES, "-")
        rows = [
            (group, *(str(found[status] or "") for status in (*STATUSES, "")))
            for group, found in counts.items()
        ]
        return [heading, *rows]

    def as_dict(self) -> dict[str, Any]:
        """Give everything as plain data."""
        return asdict(self)
