# SPDX-License-Identifier: Apache-2.0
"""ProcessPart: state that threads share and processes do not; each simulated rank owns one."""

from __future__ import annotations

import random
import sys
import warnings
from typing import Any, Protocol

__all__ = ["NumpyRandom", "ProcessPart", "PythonRandom", "WarningFilters", "standard_parts"]


class ProcessPart(Protocol):
    """One piece of process-wide state."""

    def fork(self) -> Any:
        """Copy the present state, for one rank to start from."""
        ...

    def swap(self, state: Any) -> Any:
        """Put a state in force and give the one that was; the caller keeps each in one place."""
        ...

    def seed(self, seed: int) -> None:
        """Seed what is in force, if this part draws random numbers."""
        ...


def standard_parts() -> list[ProcessPart]:
    """List the parts of Python itself, and NumPy's if it is loaded."""
    parts: list[ProcessPart] = [PythonRandom(), WarningFilters()]
    # NumPy loads this module at first use, which may be a rank's.
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    return parts if numpy_random is None else [*parts, NumpyRandom(numpy_random)]


class PythonRandom:
    """The module `random`."""

    def fork(self) -> Any:
        """Copy the state (a tuple)."""
        return random.getstate()

    def swap(self, state: Any) -> Any:
        """Set the state and give the old one."""
        before = random.getstate()
        random.setstate(state)
        return before

    def seed(self, seed: int) -> None:
        """Seed the module's generator."""
        random.seed(seed)


class NumpyRandom:
    """`numpy.random`'s global generator: each rank has its own bit generator.

    Exchanging bit generators is hundreds of times faster than copying their state; the price is
    that the spare normal number NumPy keeps after an odd number of legacy draws is lost.

    Args:
        module: `numpy.random`.
    """

    def __init__(self, module: Any) -> None:
        self._random = module
        self._callers = module.get_bit_generator()
        self._callers_state = module.get_state(legacy=False)

    def fork(self) -> Any:
        """Make a bit generator in the state of the caller's (three times as fast as a copy)."""
        made = type(self._callers)(0)
        made.state = self._callers_state
        return made

    def swap(self, state: Any) -> Any:
        """Set the bit generator and give the old one."""
        before = self._random.get_bit_generator()
        self._random.set_bit_generator(state)
        if state is self._callers:
            self._random.set_state(self._callers_state)
        return before

    def seed(self, seed: int) -> None:
        """Seed the bit generator in force, in the 32 bits that NumPy takes."""
        self._random.seed(seed % 2**32)


class WarningFilters:
    """The filters of `warnings`, which catch_warnings and pytest.warns exchange."""

    def fork(self) -> Any:
        """Copy the filters."""
        return (warnings.filters[:], *self._handlers())

    def swap(self, state: Any) -> Any:
        """Set filters and handlers and give the old ones."""
        before = (warnings.filters, *self._handlers())
        filters, warnings.showwarning, show = state
        setattr(warnings, "_showwarnmsg_impl", show)  # noqa: B010  # private to typeshed
        change, warnings.filters = filters != warnings.filters, filters
        if change:  # what was shown once is forgotten
            getattr(warnings, "_filters_mutated", lambda: None)()
        return before

    def seed(self, seed: int) -> None:
        """Do nothing: no random numbers here."""

    @staticmethod
    def _handlers() -> tuple[Any, Any]:
        return warnings.showwarning, getattr(warnings, "_showwarnmsg_impl", None)
