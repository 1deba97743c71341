# SPDX-License-Identifier: Apache-2.0
"""Run the suite under pytest: python -m hyper_parallel.conformance --backend NAME."""

from __future__ import annotations

import sys


def main() -> int:
    """Run pytest on this package, with its options."""
    try:
        import pytest
    except ImportError:
        return _without_pytest()
    package = "hyper_parallel.conformance"
    return pytest.main(["-p", f"{package}.plugin", "--pyargs", package, *sys.argv[1:]])


def _without_pytest() -> int:
    print("pytest is not installed: pip install pytest, or use hyper-parallel doctor --conformance")
    return 2


if __name__ == "__main__":
    sys.exit(main())
