# SPDX-License-Identifier: Apache-2.0
"""Every example in the docstrings of modules that need a (simulated) world does what it says."""

import doctest
import importlib

import pytest

MODULES = [
    "hyper_parallel.dtensor.api",
    "hyper_parallel.dtensor.clip",
    "hyper_parallel.dtensor.teach",
    "hyper_parallel.dtensor.tensor",
    "hyper_parallel.parallel.parallelize",
    "hyper_parallel.parallel.prepare",
    "hyper_parallel.parallel.sequence",
    "hyper_parallel.parallel.styles",
    "hyper_parallel.runtime.mesh",
    "hyper_parallel.runtime.parts",
    "hyper_parallel.runtime.program",
    "hyper_parallel.runtime.registry",
    "hyper_parallel.tools.comm_mode",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_module(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
