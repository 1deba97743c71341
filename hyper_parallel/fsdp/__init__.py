# SPDX-License-Identifier: Apache-2.0
"""fully_shard: torch's FSDP2 for a model that is tensor-parallel on another mesh axis.

[Note: hand over] FSDP2 knows only torch's own DTensor, so parameters that are ours are handed over
as torch's, on the same storage and process groups; the styles' local forms work on either kind.
Everything is checked on layouts first, for all ranks alike: where torch would raise on some ranks,
the others would wait for them.
"""

from __future__ import annotations

from hyper_parallel.fsdp.apply import fully_shard

__all__ = ["fully_shard"]
