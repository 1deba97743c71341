# SPDX-License-Identifier: Apache-2.0
"""Names that differ between the torch releases we support, chosen once by feature."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

# 2.13 renamed both and deprecates the old names; the arguments stayed.
if hasattr(dist, "all_gather_single"):
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor
