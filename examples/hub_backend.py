# SPDX-License-Identifier: Apache-2.0
"""A backend of one file: processes that exchange torch tensors through rank 0, over sockets.

A package that holds it makes it known by an entry point; the name is the device type of the mesh:

    [project.entry-points."hyper_parallel.backends"]
    hub = "hub_backend:HubBackend"

It passes the conformance suite: python -m hyper_parallel.conformance --backend hub --ranks 4.
Every collective is one exchange: all members of a group bring something to the hub, a thread of
rank 0, which answers each with what all brought. Slow, but a backend.
"""

from __future__ import annotations

import os
import threading
import time
from functools import reduce
from multiprocessing.connection import Client, Connection, Listener, wait
from types import SimpleNamespace

import torch

from hyper_parallel.backends.cpu import CpuBackend
from hyper_parallel.core.mesh import AbstractMesh
from hyper_parallel.errors import BackendError, describe
from hyper_parallel.runtime.interface import Capabilities

KEY = b"hyper_parallel hub"
OPS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
DTYPES = ("float64", "float32", "int64", "int32", "bool")


def refuse(where: str, must: str, do: str, **got: object) -> None:
    raise BackendError(describe(where, must, do, **got))


def serve(listener: Listener, world_size: int) -> None:
    """Be the hub: collect what a group's members bring, then answer each with all of it."""
    open_pipes: list[Connection] = [listener.accept() for _ in range(world_size)]
    brought: dict[object, dict[int, tuple[Connection, object]]] = {}
    while open_pipes:
        for pipe in wait(open_pipes):
            try:
                ranks, rank, payload = pipe.recv()
            except EOFError:
                open_pipes.remove(pipe)
                continue
            group = brought.setdefault(ranks, {})
            group[rank] = pipe, payload
            if len(group) == len(ranks):
                del brought[ranks]
                for member in sorted(ranks, reverse=True):  # rank 0, which is the hub, may end then
                    group[member][0].send([group[one][1] for one in ranks])


def over(collective):
    """Give a collective its asynchronous form: nothing overlaps here."""

    def run(self, *args, async_op=False, **kwargs):
        result = collective(self, *args, **kwargs)
        return SimpleNamespace(wait=lambda: result) if async_op else result

    return run


class HubCommunicator:
    """Collectives of one group; what the members brought is combined on each of them."""

    def __init__(self, pipe: Connection, ranks: tuple[int, ...], rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, ranks.index(rank), len(ranks)
        self._pipe = pipe

    def exchange(self, payload: object) -> list:
        self._pipe.send((self.ranks, self.ranks[self.rank], payload))
        return self._pipe.recv()

    def _tensors(self, where: str, x: torch.Tensor, divide: int = 0) -> list[torch.Tensor]:
        """Refuse what a backend must refuse, before anything is sent; else exchange it."""
        if not x.is_contiguous():
            refuse(where, "x must be contiguous", "Call .contiguous()", stride=x.stride())
        if divide and (x.ndim == 0 or x.shape[0] % divide):
            refuse(where, f"dim 0 must divide by {divide}", "Pad it", shape=tuple(x.shape))
        # As bytes: torch would send a handle of shared memory.
        sent = x.detach().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
        every = self.exchange((tuple(x.shape), sent))
        flat = [torch.tensor(bytearray(b), dtype=torch.uint8).view(x.dtype) for _, b in every]
        return [one.view(shape) for one, (shape, _) in zip(flat, every, strict=True)]

    def _reduced(self, where: str, x: torch.Tensor, op: str, divide: int = 0) -> torch.Tensor:
        dtype = str(x.dtype).removeprefix("torch.")
        if op not in OPS or dtype not in DTYPES:
            refuse(
                where, f"op must be in {[*OPS]}, dtype in {DTYPES}", "Use one", op=op, dtype=dtype
            )
        return reduce(OPS[op], self._tensors(where, x, divide))

    @over
    def all_reduce(self, x, op="sum"):
        return x.copy_(self._reduced("all_reduce", x, op))

    @over
    def reduce_scatter(self, x, op="sum"):
        whole = self._reduced("reduce_scatter", x, op, divide=self.size)
        return whole.chunk(self.size)[self.rank].clone()

    @over
    def reduce_scatter_v(self, x, sizes, op="sum"):
        return self._reduced("reduce_scatter_v", x, op).split(list(sizes))[self.rank].clone()

    @over
    def all_gather(self, x):
        return torch.cat(self._tensors("all_gather", x, divide=1))

    @over
    def all_gather_v(self, x, sizes):
        return torch.cat(self._tensors("all_gather_v", x))

    @over
    def all_to_all_v(self, x, send_sizes, recv_sizes, even=False):
        sent = zip(self._tensors("all_to_all_v", x), self.exchange(list(send_sizes)), strict=True)
        return torch.cat([one.split(sizes)[self.rank] for one, sizes in sent])

    def broadcast(self, x, src=0):
        return x.copy_(self._tensors("broadcast", x)[src])

    def scatter(self, out, pieces, src=0):
        whole = torch.stack(list(pieces)) if pieces is not None else out[:0]
        return out.copy_(self._tensors("scatter", whole)[src][self.rank])

    def all_gather_ints(self, values):
        return [tuple(one) for one in self.exchange(tuple(values))]

    def barrier(self) -> None:
        self.exchange(None)


class HubBackend:
    """CPU tensors of processes on one machine."""

    name = device_type = "hub"
    ops = CpuBackend.ops
    capabilities = Capabilities(
        uneven_gather=True, reduces=frozenset((op, dtype) for op in OPS for dtype in DTYPES)
    )

    def unavailable(self) -> str | None:
        return None

    def start(self, mesh: AbstractMesh) -> None:
        size = int(os.environ["WORLD_SIZE"])
        if max(mesh.ranks) >= size:
            refuse("hub", f"ranks must be below {size}", "Start more processes", ranks=mesh.ranks)
        if hasattr(self, "_pipe"):
            return
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if self.rank() == 0:
            listener = Listener(address, backlog=64, authkey=KEY)
            threading.Thread(target=serve, args=(listener, size), daemon=True).start()
        self._pipe = connect(address)

    def rank(self) -> int:
        return int(os.environ["RANK"])

    def make_groups(self, mesh: AbstractMesh) -> list[tuple[int, ...]]:
        return [mesh.group_ranks(axis, rank=self.rank()) for axis in range(mesh.ndim)]

    def make_group(self, ranks: tuple[int, ...], name: str) -> tuple[int, ...]:
        return ranks  # a group is nothing else

    def group_ranks(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return group

    def communicator(self, group: tuple[int, ...], ranks: tuple[int, ...]) -> HubCommunicator:
        return HubCommunicator(self._pipe, ranks, self.rank())

    def index_array(self, mesh: AbstractMesh) -> torch.Tensor:
        return torch.tensor(mesh.ranks, dtype=torch.int).view(mesh.shape)

    def device(self) -> torch.device:
        return torch.device("cpu")

    def framework_mesh(self, mesh: object) -> None:
        return None

    def wrap_mesh(self, mesh: object) -> None:
        refuse("hub", "meshes must be made by init_device_mesh", "There are no process groups")


def connect(address: tuple[str, int]) -> Connection:
    """Connect to the hub, which may not listen yet."""
    while True:
        try:
            return Client(address, authkey=KEY)
        except ConnectionRefusedError:
            time.sleep(0.1)
