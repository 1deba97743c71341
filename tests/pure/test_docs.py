# SPDX-License-Identifier: Apache-2.0
"""Every example in the docstrings of the framework-free core and tools does what it says."""

import doctest
import importlib
import pkgutil

import pytest

import hyper_parallel.core

MODULES = [
    "hyper_parallel.errors",
    "hyper_parallel.tools.explain",
    "hyper_parallel.tools.sharding",
    *(
        f"hyper_parallel.core.{module.name}"
        for module in pkgutil.iter_modules(hyper_parallel.core.__path__)
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_module(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
