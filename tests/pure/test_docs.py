# SPDX-License-Identifier: Apache-2.0
"""Every example in the docstrings of what needs no framework does what it says."""

import doctest
import importlib
import pkgutil

import pytest

import hyper_parallel.backends.numpy
import hyper_parallel.core

MODULES = [
    "hyper_parallel.errors",
    "hyper_parallel.tools.explain",
    "hyper_parallel.tools.sharding",
    *(
        f"{room.__name__}.{module.name}"
        for room in (hyper_parallel.core, hyper_parallel.backends.numpy)
        for module in pkgutil.iter_modules(room.__path__)
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_module(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
