# SPDX-License-Identifier: Apache-2.0
"""Refuse column-wise layers side by side whose uneven cuts would part what belongs together.

[Note: siblings] With grouped query attention, wq has r features for each one of wk. A model that
works on plain local tensors pairs local query heads with local key heads, so rank by rank wq must
have r times wk's features. Even cuts always do. Uneven ones need not: 35 query heads and 5 key
heads over 3 ranks are 12, 12, 11 and 2, 2, 1, which a model would pair wrongly without any error.
"""

from __future__ import annotations

from itertools import combinations

from torch import nn

from hyper_parallel.core import chunk_sizes
from hyper_parallel.errors import PlanError, describe
from hyper_parallel.parallel.linear import LinearForward

__all__ = ["refuse_unlike_siblings"]


def refuse_unlike_siblings(module: nn.Module) -> None:
    """Check all layers that hand out plain cut features; see [Note: siblings].

    Raises:
        PlanError: two of one parent read the same features, the features of one are a multiple
            of the other's, and the ranks' pieces are not.
    """
    for path, parent in module.named_modules():
        cut = [
            (f"{path}.{name}".lstrip("."), forward)
            for name, child in parent.named_children()
            if isinstance(forward := child.__dict__.get("forward"), LinearForward)
            and forward.hands_out_features
        ]
        for one, two in combinations(cut, 2):
            _compare(one, two)


def _compare(one: tuple[str, LinearForward], two: tuple[str, LinearForward]) -> None:
    (small, a), (large, b) = sorted((one, two), key=lambda entry: entry[1].sizes[1])
    ratio, rest = divmod(b.sizes[1], max(a.sizes[1], 1))
    if a.mesh != b.mesh or a.sizes[0] != b.sizes[0] or rest:
        return
    pieces, larger = (chunk_sizes(edge.sizes[1], edge.mesh.size(), edge.block) for edge in (a, b))
    if tuple(size * ratio for size in pieces) == larger:
        return
    raise PlanError(
        describe(
            f"ColwiseParallel on {large!r}",
            f"its {b.sizes[1]} features must be cut over {b.mesh.size()} ranks as those of"
            f" {small!r} are, {ratio} for each one",
            "Give both output_layouts=Shard(-1, block=...), the larger one the larger block, or"
            " use_local_output=False",
            **{"pieces": larger, "pieces beside it": pieces},
        )
    )
