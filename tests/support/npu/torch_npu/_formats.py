# SPDX-License-Identifier: Apache-2.0
"""Private memory formats: the elements of such a tensor lie in another order than its strides say.

Here they lie backwards, so that whoever slices one gets wrong numbers, as on a device.
"""

import enum

import torch


class Format(enum.IntEnum):
    """The formats the tests use; numbers are torch_npu's."""

    ND = 2
    FRACTAL_NZ = 29


# Storages, kept for ever, by address: views and detached tensors share them.
_private: dict[int, torch.UntypedStorage] = {}


def get_npu_format(x: torch.Tensor) -> Format:
    """Give the format of a tensor's storage."""
    return Format.FRACTAL_NZ if x.untyped_storage().data_ptr() in _private else Format.ND


def npu_format_cast(x: torch.Tensor, acl_format: int) -> torch.Tensor:
    """Copy into another format."""
    if get_npu_format(x) == acl_format:
        return x
    cast = x.detach().reshape(-1).flip(0).reshape(x.shape)
    if acl_format == Format.FRACTAL_NZ:
        storage = cast.untyped_storage()
        _private[storage.data_ptr()] = storage
    return cast
