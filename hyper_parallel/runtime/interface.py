# SPDX-License-Identifier: Apache-2.0
"""The backend interface: what generic code asks of a device and its collectives.

[Note: consumes] all_reduce takes a contiguous array that the caller gives up: the backend may work
in place. Who still needs the array copies it first. The others leave theirs alone, but while one is
in flight (`async_op=True`) the caller must, too.

[Note: fused kinds] A kernel that multiplies and communicates at once takes matrices x [m, k] and
w [k, n], contiguous but for w, which may be a transposed view; all ranks of the group pass the same
shapes and dtypes. By kind:
  all_gather_matmul: gathers the rows of x; gives (all of x) @ w, and all of x.
  matmul_reduce_scatter: sums x @ w over the group; gives the own one of n equal pieces of its rows.
  matmul_all_reduce: gives that sum whole. Used only where no gradient is recorded.

[Note: group order] `Communicator.ranks` are listed by mesh coordinate, never sorted; "own index"
and every list of pieces or sizes follow that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hyper_parallel.core.mesh import AbstractMesh

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "REDUCE_SCATTER",
    "Array",
    "ArrayOps",
    "Backend",
    "Capabilities",
    "Communicator",
    "FusedMatmul",
    "Work",
]

Array = Any

# See [Note: fused kinds].
ALL_GATHER = "all_gather_matmul"
REDUCE_SCATTER = "matmul_reduce_scatter"
ALL_REDUCE = "matmul_all_reduce"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Answers about a backend, so that generic code never asks for its name.

    Args:
        uneven_gather: all_gather_v and reduce_scatter_v exist; else callers pad.
        native_avg: all_reduce and reduce_scatter take "avg"; else callers sum and divide.
        all_ranks: this process is every rank of its meshes at once; `rank` says that it has none,
            there are no communicators, and `redistribute(local_arrays, src, dst)` moves all.
        checks_calls: unlike calls of a group's ranks are refused on all of them, always; else only
            in checked mode.
        reduces: (op, dtype) that are reduced as they are, dtypes by name; None: all there are.
        widens: (op, dtype) that are reduced as another dtype, which takes copies. What is in
            neither set is refused.
        moves: dtypes that are moved as they are; others travel as bytes. None: all.
        fused: `fused(kind, communicator)` gives a matmul fused with its collective, see [Note:
            fused kinds], or None where what is installed lacks one; None: there are no kernels.
    """

    uneven_gather: bool = False
    native_avg: bool = False
    all_ranks: bool = False
    checks_calls: bool = False
    reduces: frozenset[tuple[str, str]] | None = None
    widens: frozenset[tuple[str, str]] = frozenset()
    moves: frozenset[str] | None = None
    fused: Callable[[str, Communicator], FusedMatmul | None] | None = None


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> Array:
        """Block (or order the current stream) until the result is there, and return it."""
        ...


class Communicator(Protocol):
    """Collectives over one ordered group of ranks; see [Note: consumes], [Note: group order]."""

    ranks: tuple[int, ...]
    rank: int
    size: int

    def all_reduce(self, x: Array, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce over the group; every rank gets the result. Decides: which ops run natively."""
        ...

    def all_gather(self, x: Array, *, async_op: bool = False) -> Any:
        """Concatenate equal pieces along dim 0. Decides: whether it gathers into one array."""
        ...

    def all_gather_v(self, x: Array, sizes: Sequence[int], *, async_op: bool = False) -> Any:
        """Concatenate pieces of `sizes` rows along dim 0. Called only with `uneven_gather`."""
        ...

    def reduce_scatter(self, x: Array, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce, then keep the own one of n equal pieces of dim 0. Decides: as all_reduce."""
        ...

    def reduce_scatter_v(
        self, x: Array, sizes: Sequence[int], op: str = "sum", *, async_op: bool = False
    ) -> Any:
        """Reduce, then keep the own `sizes[rank]` rows. Called only with `uneven_gather`."""
        ...

    def all_to_all_v(
        self,
        x: Array,
        send_sizes: Sequence[int],
        recv_sizes: Sequence[int],
        *,
        even: bool = False,
        async_op: bool = False,
    ) -> Any:
        """Send consecutive parts of the 1-d `x`, receive parts in group order, concatenated.

        Decides: what to gain where `even` promises that all parts of all ranks have one size.
        """
        ...

    def broadcast(self, x: Array, src: int = 0) -> Array:
        """Give every rank the `x` of group index `src`. Every rank passes the same shape."""
        ...

    def scatter(self, out: Array, pieces: Sequence[Array] | None, src: int = 0) -> Array:
        """Fill `out` with the own one of `src`'s equal-sized pieces; others pass None."""
        ...

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Exchange a few host integers. Decides: which side group carries them."""
        ...

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        ...


class FusedMatmul(Protocol):
    """A matmul and a collective in one kernel; see [Note: fused kinds]."""

    def refusal(self, x: Array, w: Array) -> str | None:
        """Say which limit keeps it from serving this call, or None; alike on all ranks."""
        ...

    def __call__(self, x: Array, w: Array) -> Any:
        """Run it. Records no gradient."""
        ...


class ArrayOps(Protocol):
    """The few local operations that executing a plan needs. None of them records a gradient."""

    def narrow(self, x: Array, dim: int, start: int, length: int) -> Array:
        """View `length` entries of `dim`. Decides: nothing; a view, never a copy."""
        ...

    def cat(self, parts: Sequence[Array], dim: int) -> Array:
        """Concatenate into a new contiguous array."""
        ...

    def movedim(self, x: Array, src: int, dst: int) -> Array:
        """View `x` with one dim moved."""
        ...

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """Give `x` another shape of the same number of elements."""
        ...

    def contiguous(self, x: Array) -> Array:
        """Give `x` itself if it is contiguous, else a contiguous copy."""
        ...

    def clone(self, x: Array) -> Array:
        """Copy into a new contiguous array."""
        ...

    def empty(self, shape: Sequence[int], like: Array) -> Array:
        """Make an uninitialised array with the dtype and device of `like`."""
        ...

    def identity(self, shape: Sequence[int], op: str, like: Array) -> Array:
        """Make an array of the reduction's identity. Decides: infinities or integer limits."""
        ...

    def scale(self, x: Array, factor: float, *, divide: bool = False) -> Array:
        """Multiply (or divide) into a new array of the same dtype."""
        ...

    def copy_into(self, dst: Array, src: Array) -> None:
        """Write `src` into the view `dst` of the same shape."""
        ...


class Backend(Protocol):
    """One kind of device with its collectives, as this process sees it."""

    name: str
    device_type: str
    capabilities: Capabilities
    ops: ArrayOps

    def unavailable(self) -> str | None:
        """Say why this backend cannot be used here, or None. Never raises."""
        ...

    def start(self, mesh: AbstractMesh) -> None:
        """Be ready for `mesh`: start the world, choose the device, refuse ranks it lacks."""
        ...

    def rank(self) -> int:
        """Give this process's global rank."""
        ...

    def make_groups(self, mesh: AbstractMesh) -> Sequence[Any]:
        """Make the groups of every axis; every rank of the world calls this.

        Decides: what a group is. Gives this rank's, one an axis; outside the mesh it need not.
        """
        ...

    def make_group(self, ranks: tuple[int, ...], name: str) -> Any:
        """Make one group, or give the one there is; exactly its ranks call this together."""
        ...

    def group_ranks(self, group: Any) -> tuple[int, ...]:
        """List the global ranks of a group, in any order."""
        ...

    def communicator(self, group: Any, ranks: tuple[int, ...]) -> Communicator:
        """Give the collectives of a group for this rank, which list its ranks in this order."""
        ...

    def framework_mesh(self, mesh: Any) -> Any:
        """Give the framework's own mesh on the groups of our DeviceMesh; None if it has none."""
        ...

    def wrap_mesh(self, mesh: Any) -> Any:
        """Give our DeviceMesh on the groups of the framework's own; the same one each time."""
        ...

    def index_array(self, mesh: AbstractMesh) -> Any:
        """Give the mesh's ranks as the framework's integer array."""
        ...

    def device(self) -> Any:
        """Give the framework's device object that this rank's arrays live on."""
        ...
