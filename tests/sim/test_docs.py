# SPDX-License-Identifier: Apache-2.0
"""Every example in the docstrings of modules that need a (simulated) world does what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel import rules

ROOT = Path(hyper_parallel.__file__).parent
PURE = ("core", "errors.py", "tools/explain.py", "tools/sharding.py")  # tests/pure/test_docs.py
FILES = [
    name
    for name in sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    if not name.startswith(PURE) and ">>> " in (ROOT / name).read_text()
]


@pytest.mark.parametrize("name", FILES)
def test_examples_of_module(name, monkeypatch):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))  # one example registers its own
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    result = doctest.testmod(importlib.import_module(f"hyper_parallel.{module}"))
    assert result.attempted
    assert result.failed == 0
