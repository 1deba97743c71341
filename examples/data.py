# SPDX-License-Identifier: Apache-2.0
"""Byte-level training text that every machine has, and batches of it in a reproducible order."""

import sysconfig
from pathlib import Path

import torch

MAX_BYTES = 4 * 2**20


def read_text(folder: str | None, at_least: int) -> torch.Tensor:
    """The first MAX_BYTES of the text files under `folder`, in the order of their names.

    Without a folder, the source files of Python's standard library. Raises ValueError where that
    leaves fewer than `at_least` bytes. Returns a uint8 tensor.
    """
    if folder is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(root.glob("*.py"))
    else:
        root = Path(folder)
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder")
        files = sorted(path for path in root.rglob("*") if path.is_file())
    text = bytearray()
    for path in files:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES - len(text))
        if b"\0" not in content:  # a zero byte marks a file that is not text
            text += content
        if len(text) >= MAX_BYTES:
            break
    if len(text) < at_least:
        raise ValueError(
            f"too little text in {root}: {len(text)} bytes in its text files, "
            f"at least {at_least} are needed"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(text: torch.Tensor, batch: int, length: int, steps: int, seed: int):
    """Yield `steps` pairs of inputs and targets, each (batch, length) and the latter one byte on.

    The generator is private to this call, so every rank and every run of one seed sees the same
    batches whatever else draws random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
        chunk = text[starts + offsets].long()
        yield chunk[:, :-1], chunk[:, 1:]
