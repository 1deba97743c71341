# SPDX-License-Identifier: Apache-2.0
"""Errors say their text in one form, and survive the way between processes."""

import copy
import pickle

import pytest

from hyper_parallel import errors

KINDS = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_parts_has_the_text_that_describe_gives(kind):
    parts = ("Shard", "dim must be an int", "Pass an int")
    error = kind(*parts, dim="x")
    assert str(error) == errors.describe(*parts, dim="x")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), kind(str(error))):
        assert type(other) is kind
        assert str(other) == str(error)
