# SPDX-License-Identifier: Apache-2.0
"""The error tree: every error a user can meet, and the one form its text takes.

`<where>: <what must hold>, but got <name>=<value>, ... . <what to do>.`
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "HyperParallelError",
    "LayoutError",
    "PlanError",
    "RuleError",
    "describe",
    "near_names",
]


class HyperParallelError(RuntimeError):
    """Any error this library raises on purpose: of a text, or of what `describe` makes one."""

    def __init__(self, where: str, must: str = "", do: str = "", /, **got: object) -> None:
        # Not by super(): torch.compile would go on behind it, where it gives up at a raise.
        self.args = (describe(where, must, do, **got) if must else where,)


class LayoutError(HyperParallelError, ValueError):
    """A mesh, placement or layout that cannot exist, or a tensor that does not fit one."""


class RuleError(HyperParallelError):
    """An op rule that is malformed, or an op that no rule allows on these layouts."""


class PlanError(HyperParallelError):
    """A parallelize plan that does not fit the module or the mesh."""


class BackendError(HyperParallelError):
    """A backend that is missing, refused a call, or lost a rank."""


def describe(where: str, must: str, do: str, /, **got: object) -> str:
    """Build an error text in the library's one form.

    Args:
        where: the call the user made, as typed in code.
        must: what must hold.
        do: what to do about it.
        **got: the values that broke it, by name, shown with `repr`.

    Returns:
        The text, one line.

    Example:
        >>> describe("Shard", "dim must be an int", "Pass an int", dim="x")
        "Shard: dim must be an int, but got dim='x'. Pass an int."
    """
    values = ", ".join(f"{name}={value!r}" for name, value in got.items())
    tail = f", but got {values}" if values else ""
    return f"{where}: {must}{tail}. {do}."


def near_names(name: str, known: list[str], *, limit: int = 3) -> list[str]:
    """List the known names that look most like `name`, nearest first."""
    import difflib

    return difflib.get_close_matches(name, known, n=limit, cutoff=0.4)
