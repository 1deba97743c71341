# SPDX-License-Identifier: Apache-2.0
"""Every dtype through every move on simulated ranks: exact, or refused before anything is sent."""

from __future__ import annotations

from hyper_parallel import simulate
from support.device import DEVICE, DTYPE
from support.dtensors import line
from support.dtypes import DTYPES, outcomes, unexpected


def test_every_dtype_moves_exactly_or_is_refused():
    first, *others = simulate(2).run(lambda: outcomes(line(2)))
    assert all(found == first for found in others)
    assert {dtype for dtype, _, _ in first} == {str(t).removeprefix("torch.") for t in DTYPES}
    irreducible = () if DTYPE.itemsize == 8 else ("float64",)
    assert unexpected(first, complex_products=DEVICE == "cpu", irreducible=irreducible) == {}
