# SPDX-License-Identifier: Apache-2.0
"""Random numbers on DTensors: the same on replicas, different on shards, and replayable.

[Note: random numbers] Every draw comes from torch's default generator of the device, whose state
must be the same on every rank of the mesh (torch.manual_seed with one seed; compared at a mesh's
first draw, in checked mode at each). A draw whose result is whole on every rank is that of one
process. So is a draw that fills a DTensor (normal_, uniform_, the functions of torch.nn.init, the
factories rand and randn): each rank draws the whole and keeps its part, so initial values do not
depend on the number of ranks; this takes the memory of the whole for a moment. Any other draw on
shards (dropout, rand_like, ...) is made by a generator seeded with the default one's state and the
shard's place: it differs from one process, and with the number of shards. The default generator
then goes on as after one draw, on every rank alike. Since all follows from its state, what restores
that state, as activation checkpointing does, gets the same numbers again. A call's own `generator=`
takes the default one's place in all of this, but for the comparison; it must be seeded alike, too.
Meta tensors draw nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hyper_parallel.core import Layout
from hyper_parallel.dtensor.moves import move
from hyper_parallel.dtensor.read import read_mesh, whole_of
from hyper_parallel.errors import LayoutError
from hyper_parallel.runtime import DeviceMesh

__all__ = ["FILLS", "agree", "drawing", "fill", "manual_seed", "own_draw"]

FILLS = frozenset(
    "normal uniform bernoulli exponential geometric log_normal cauchy random"
    " kaiming_uniform".split()
)
# The ranks that were compared, and which of them this one is, in each world. Not by mesh: whether
# an equal one was collected already differs between ranks, and then some would compare alone.
_agreed: WeakKeyDictionary[Any, set[tuple[int, tuple[int, ...]]]] = WeakKeyDictionary()


def manual_seed(seed: int, device_mesh: Any = None) -> None:
    """Seed torch's default generators alike on every rank of a mesh.

    Args:
        seed: the seed, the same on every rank.
        device_mesh: the mesh; default the one of the enclosing `with mesh:` block.

    Communicates:
        One exchange of two integers per axis.

    Raises:
        LayoutError: the ranks pass different seeds.

    Example:
        >>> import torch
        >>> from hyper_parallel import init_device_mesh, manual_seed, simulate
        >>> @simulate(2)
        ... def draw():
        ...     manual_seed(7, init_device_mesh("cpu", (2,)))
        ...     return torch.rand(()).item()
        >>> one, other = draw()
        >>> one == other
        True
    """
    mesh = read_mesh(device_mesh, "manual_seed")
    if mesh.get_coordinate() is None:
        return
    least, most = _extremes(mesh, int(seed) % 2**63)
    if least != most:
        raise LayoutError(
            "manual_seed",
            "every rank of the mesh must pass the same seed",
            "Pass one seed; shards draw different numbers all the same",
            least=least,
            most=most,
        )
    torch.manual_seed(seed)


def agree(mesh: DeviceMesh, device: torch.device, name: str) -> None:
    """Compare the ranks' random states at the first draw on a mesh; in checked mode at each.

    Communicates:
        If they are compared, one exchange of two integers per axis.

    Raises:
        LayoutError: on every rank, if two ranks' states differ.
    """
    known = _agreed.setdefault(mesh.backend, set())
    group = (mesh.get_rank(), mesh.ranks)
    if (
        (group in known and not mesh.checked)
        or device.type == "meta"
        or mesh.get_coordinate() is None
    ):
        return
    least, most = _extremes(mesh, _digest(_default(device).get_state(), 0) >> 2)
    if least != most:
        raise LayoutError(
            f"DTensor op {name!r}",
            "random states must be the same on every rank of the mesh",
            "Call hyper_parallel.manual_seed(seed, mesh) after everything that draws on one"
            " rank only",
            mesh=mesh,
        )
    known.add(group)


def _extremes(mesh: DeviceMesh, value: int) -> tuple[int, int]:
    """Give the least and the greatest value of any rank of the mesh."""
    least = most = value
    for axis, size in enumerate(mesh.shape):
        if size > 1:
            every = mesh.communicator(axis).all_gather_ints([least, most])
            least, most = min(low for low, _ in every), max(high for _, high in every)
    return least, most


def drawing(layout: Layout, name: str, values: Sequence[Any]) -> AbstractContextManager[None]:
    """Give what an op runs in whose draws lie in `layout`; see [Note: random numbers].

    Communicates:
        The comparison of `agree`.
    """
    generator = _given_generator(values)
    device = next(value.device for value in values if isinstance(value, torch.Tensor))
    if generator is None:
        agree(layout.mesh, device, name)  # type: ignore[arg-type]
    if layout.is_replicated or device.type == "meta":
        return nullcontext()
    return own_draw(layout, device, generator)


@contextmanager
def own_draw(layout: Layout, device: torch.device, generator: Any = None) -> Generator[None]:
    """Within it a generator, by default the device's, draws a shard's own numbers."""
    mesh = layout.mesh
    coordinate = mesh.coordinate(mesh.get_rank())  # type: ignore[attr-defined]
    place = 0
    for axis, placement in enumerate(layout.placements):
        if placement.cut_dim is not None and coordinate is not None:
            place = place * mesh.shape[axis] + coordinate[axis]
    source = _default(device) if generator is None else generator
    before = source.get_state()
    torch.empty(1, device=device).uniform_(generator=generator)
    after = source.get_state()
    try:
        source.manual_seed(_digest(before, place + 1))
        yield
    finally:
        source.set_state(after)


def fill(
    func: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = ""
) -> None:
    """Fill a DTensor in place with what one process would draw.

    Communicates:
        The comparison of `agree`; a probability given as a DTensor is gathered.
    """
    layout: Layout = target._layout
    local = target._local
    if layout.mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        return
    if _given_generator((*args, *kwargs.values())) is None:
        agree(layout.mesh, local.device, name or func.__name__)  # type: ignore[arg-type]
    cls = type(target)
    args = tuple(whole_of(cls, value) for value in args)
    kwargs = {key: whole_of(cls, value) for key, value in kwargs.items()}
    with torch.no_grad():
        if layout.is_replicated:
            func(local, *args, **kwargs)
            return
        whole = torch.empty(layout.shape, dtype=local.dtype, device=local.device)
        func(whole, *args, **kwargs)
        local.copy_(move(whole, layout.replicated, layout))


def _given_generator(values: Iterable[Any]) -> torch.Generator | None:
    """Find the generator among a call's arguments."""
    return next((value for value in values if isinstance(value, torch.Generator)), None)


def _default(device: torch.device) -> Any:
    """Give what stands for the device's default generator."""
    if device.type == torch.default_generator.device.type:
        return torch.default_generator
    return _DefaultGenerator(device)


class _DefaultGenerator:
    """A device's default generator, through the functions of the device's module."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)

    def get_state(self) -> torch.Tensor:
        return self.module.get_rng_state(self.device)

    def set_state(self, state: torch.Tensor) -> None:
        self.module.set_rng_state(state, self.device)

    def manual_seed(self, seed: int) -> None:
        with self.module.device(self.device):  # it seeds the current device
            self.module.manual_seed(seed)


def _digest(state: torch.Tensor, place: int) -> int:
    """Make a seed of a generator's state and a number."""
    data = state.numpy().tobytes()
    key = place.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8, key=key).digest(), "little") >> 1
