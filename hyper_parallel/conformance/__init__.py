# SPDX-License-Identifier: Apache-2.0
"""The suite that a backend must pass; see run_conformance. Its pytest form is test_conformance.py.

What must come out of a check is read off the backend's Capabilities: it passes as the library does
it, it passes although the library does it another way (emulated), or it is refused by design. Any
other outcome is a failure.
"""

from hyper_parallel.conformance.here import EMULATED, FAIL, PASS, REFUSED, Check, Here
from hyper_parallel.conformance.report import Report, Result, table
from hyper_parallel.conformance.suite import all_checks, run_conformance

__all__ = [
    "EMULATED",
    "FAIL",
    "PASS",
    "REFUSED",
    "Check",
    "Here",
    "Report",
    "Result",
    "all_checks",
    "run_conformance",
    "table",
]
