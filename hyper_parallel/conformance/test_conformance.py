# SPDX-License-Identifier: Apache-2.0
"""The suite as pytest runs it, one test a check.

    pytest -p hyper_parallel.conformance.plugin --pyargs hyper_parallel.conformance --backend NAME

or, shorter, `python -m hyper_parallel.conformance --backend NAME`. The checks that pytest selected
run together, in one world, before the first test looks at its result.
"""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.conformance import FAIL, REFUSED, Result, all_checks, run_conformance

_IDS = [check.id for check in all_checks()]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Result]:
    """Run what was selected; give the results by the checks' ids."""
    option: Any = request.config.getoption
    here = [item for item in request.session.items if item.parent is request.node]
    ids = [item.callspec.params["check"] for item in here]  # type: ignore[attr-defined]
    report = run_conformance(
        option("--backend", "cpu"),
        world=option("--world", None),
        ranks=option("--ranks", None),
        only=ids,
    )
    return dict(zip(ids, report.results, strict=True))


@pytest.mark.parametrize("check", _IDS)
def test_check(results: dict[str, Result], check: str) -> None:
    """One check; what does not apply is skipped with its reason."""
    result = results[check]
    if not result.status:
        pytest.skip(result.detail)
    assert result.status != FAIL, result.detail
    if result.status == REFUSED:
        print(f"refused by design: {result.detail}")
