# SPDX-License-Identifier: Apache-2.0
"""Checks of a backend of torch tensors: random numbers, one step of tensor-parallel training."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hyper_parallel.conformance.here import PASS, Check, Here

__all__ = ["training_checks"]


def training_checks() -> Iterator[Check]:
    """List the checks."""
    yield Check("random numbers", "one seed, one sequence", _one_seed, _with_torch)
    yield Check("random numbers", "the state comes back", _state, _with_torch)
    yield Check("random numbers", "collectives draw none", _undisturbed, _with_torch)
    for sequence in (False, True):
        name = "sequence-parallel block" if sequence else "MLP"
        yield Check("training step", name, partial(_train, sequence), _with_torch)


def _with_torch(here: Here) -> str:
    return PASS if here.arrays.framework == "torch" else "its arrays are not torch tensors"


def _draws(here: Here) -> tuple[Any, Callable[[], Any]]:
    torch: Any = importlib.import_module("torch")
    device = here.backend.device()
    return torch, lambda: torch.rand(6, device=device).cpu().double().numpy()


def _one_seed(here: Here) -> None:
    torch, draw = _draws(here)
    torch.manual_seed(7)
    mine = draw()
    x = here.arrays.make(mine.reshape(1, -1), "float32")
    every, _ = here.arrays.read(here.comm.all_gather(x))
    assert (every == mine).all(), "ranks with one seed must draw the same numbers"


def _state(here: Here) -> None:
    torch, draw = _draws(here)
    kind = here.backend.device().type
    generator = torch if kind == "cpu" else torch.get_device_module(kind)
    draw()
    state = generator.get_rng_state()
    first, _ = draw(), here.comm.barrier()
    generator.set_rng_state(state)
    assert (draw() == first).all(), "a restored state must give the same numbers"


def _undisturbed(here: Here) -> None:
    torch, draw = _draws(here)
    torch.manual_seed(here.comm.rank)
    want = [draw(), draw()]
    torch.manual_seed(here.comm.rank)
    got = [draw(), here.comm.all_gather_ints([1]) and draw()]
    assert all((a == b).all() for a, b in zip(want, got, strict=True))


def _block(torch: Any, dtype: Any, device: Any) -> Any:
    nn = torch.nn
    torch.manual_seed(3)
    layers = {"norm": nn.LayerNorm(6), "up": nn.Linear(6, 8), "act": nn.GELU()}
    layers["down"] = nn.Linear(8, 6)
    # Made on the host in one dtype, so that the weights are the same everywhere.
    return nn.Sequential(*layers.values()).to(dtype).to(device)


def _plan(sequence: bool) -> dict[str, Any]:
    hyper_parallel: Any = importlib.import_module("hyper_parallel")
    shard = hyper_parallel.Shard
    if not sequence:
        return {"1": hyper_parallel.ColwiseParallel(), "3": hyper_parallel.RowwiseParallel()}
    return {
        "0": hyper_parallel.SequenceParallel(),
        "1": hyper_parallel.ColwiseParallel(input_layouts=shard(1)),
        "3": hyper_parallel.RowwiseParallel(output_layouts=shard(1)),
    }


def _train(sequence: bool, here: Here) -> None:
    """One step of SGD equals one process: output, loss's gradients, weights afterwards."""
    torch: Any = importlib.import_module("torch")
    hyper_parallel: Any = importlib.import_module("hyper_parallel")
    dtype, device = getattr(torch, here.best_dtype), here.backend.device()
    rows = 2 * here.world_size
    torch.manual_seed(5)
    x = torch.randn(2, rows, 6).to(dtype).to(device)
    reference, model = _block(torch, dtype, device), _block(torch, dtype, device)
    hyper_parallel.parallelize_module(model, here.mesh, _plan(sequence))
    want, mine = reference(x), x
    if sequence:
        i = here.comm.rank
        want, mine = want[:, 2 * i : 2 * i + 2], x[:, 2 * i : 2 * i + 2].contiguous()
    got = model(mine)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    close(got, want, msg=lambda text: f"output: {text}")
    reference(x).square().sum().backward()
    # Replicas share one loss; shards of a sequence add up to it.
    got.square().sum().backward()
    with torch.no_grad():
        for param in (*reference.parameters(), *model.parameters()):
            param.sub_(param.grad, alpha=0.1)
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        for what, ours, theirs in (("gradient", a.grad, b.grad), ("weight", a, b)):
            whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
            close(whole.detach(), theirs.detach(), msg=lambda t: f"{what} of {name}: {t}")  # noqa: B023
