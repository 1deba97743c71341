# SPDX-License-Identifier: Apache-2.0
"""Embedding over a vocabulary cut between ranks: shift the ids, look up, mask what is elsewhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["masked_embedding"]


def masked_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    start: int,
    vocab: int,
    padding_idx: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Look up the ids that this rank's rows cover; zeros for the others.

    Args:
        ids: [...], integer, global ids, the same on every rank.
        weight: [rows, H], this rank's rows of the table.
        start: global id of the first row.
        vocab: number of rows of the whole table.
        padding_idx: global id without gradient.
        *args: further arguments of F.embedding.
        **kwargs: further keyword arguments of F.embedding.

    Returns:
        [..., H]; the sum over the ranks is the lookup in the whole table.

    Raises:
        IndexError: an id outside the vocabulary, on every rank (as the dense lookup does).
    """
    rows = weight.shape[0]
    if rows == 0:
        weight = F.pad(weight, (0, 0, 0, 1))  # an empty shard still checks its ids
    local = ids - start
    elsewhere = (local < 0) | (local >= rows)
    known = (ids >= 0) & (ids < vocab)
    local = torch.where(elsewhere, torch.where(known, 0, -1), local)
    padding = None
    if padding_idx is not None:
        padding = (padding_idx % vocab) - start
        padding = padding if 0 <= padding < rows else None
    looked_up = F.embedding(local, weight, padding, *args, **kwargs)
    return looked_up.masked_fill(elsewhere.unsqueeze(-1), 0)
