# SPDX-License-Identifier: Apache-2.0
"""The models of the host benchmark, and tensor parallelism written by hand to compare with.

The hand-written form is the f and g of "Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism" (Shoeybi et al., 2019), section 3: f is the identity forward and an
all-reduce backward, g an all-reduce forward and the identity backward. Parameters are plain local
tensors. Without autograd f is skipped and g is the bare all-reduce, so that inference is compared
with the cheapest form one would write by hand, not with Megatron's, which enters both Functions.

Letters in tensor names: B batch, S sequence, D hidden, F intermediate, N query heads, G key and
value heads, H head size.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one decoder layer; `shard` gives what one of `num_ranks` ranks holds of it."""

    hidden: int = 64
    intermediate: int = 128
    num_heads: int = 16
    num_kv_heads: int = 8
    head_size: int = 4
    sequence: int = 8
    batch: int = 2

    def shard(self, num_ranks: int) -> "Sizes":
        """Return the sizes of the column-parallel outputs on one rank."""
        split = ("intermediate", "num_heads", "num_kv_heads")
        return replace(self, **{name: getattr(self, name) // num_ranks for name in split})


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), as in Llama."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x)): [B, S, D] to [B, S, D]."""
        return self.down(functional.silu(self.gate(x_BSD)) * self.up(x_BSD))


def _rotate(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    first, second = x_BNSH.chunk(2, dim=-1)
    return x_BNSH * cos_SH + torch.cat((-second, first), dim=-1) * sin_SH


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped key and value heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_size = sizes.head_size
        q_size = sizes.num_heads * sizes.head_size
        kv_size = sizes.num_kv_heads * sizes.head_size
        self.q = nn.Linear(sizes.hidden, q_size, bias=False)
        self.k = nn.Linear(sizes.hidden, kv_size, bias=False)
        self.v = nn.Linear(sizes.hidden, kv_size, bias=False)
        self.o = nn.Linear(q_size, sizes.hidden, bias=False)
        half = torch.arange(0, sizes.head_size, 2) / sizes.head_size
        angle = torch.outer(torch.arange(sizes.sequence).float(), 10000.0**-half).repeat(1, 2)
        self.register_buffer("cos_SH", angle.cos(), persistent=False)
        self.register_buffer("sin_SH", angle.sin(), persistent=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return causal attention of `x_BSD` with itself: [B, S, D] to [B, S, D]."""
        q_BNSH = _rotate(self._heads(self.q(x_BSD)), self.cos_SH, self.sin_SH)
        k_BGSH = _rotate(self._heads(self.k(x_BSD)), self.cos_SH, self.sin_SH)
        v_BGSH = self._heads(self.v(x_BSD))
        y_BNSH = functional.scaled_dot_product_attention(
            q_BNSH, k_BGSH, v_BGSH, is_causal=True, enable_gqa=True
        )
        return self.o(y_BNSH.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """One Llama decoder layer: attention and gated MLP, each behind a norm and with a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.mlp = GatedMLP(sizes)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the layer's output: [B, S, D] to [B, S, D]."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


MODELS = {"mlp": GatedMLP, "layer": DecoderLayer}
COLUMN = ("q", "k", "v", "gate", "up")
ROW = ("o", "down")


class _CopyToRanks(torch.autograd.Function):
    """f: identity forward, all-reduce of the gradient backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFromRanks(torch.autograd.Function):
    """g: all-reduce forward, in place, and identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _CopyToRanks.apply(x, group) if torch.is_grad_enabled() else x


def _reduce_from_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.is_grad_enabled():
        return _ReduceFromRanks.apply(x, group)
    dist.all_reduce(x, group=group)
    return x


class _ColumnLinear(nn.Linear):
    """Linear whose weight is the local rows; f is inside unless its block has one for all."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(_copy_to_ranks(x, self.group), self.weight)


class _RowLinear(nn.Linear):
    """Linear whose weight is the local columns, followed by g."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        return _reduce_from_ranks(functional.linear(x, self.weight), self.group)


def _with_shared_copy(block: type[nn.Module]) -> type[nn.Module]:
    """Return the block with one f for all its column-parallel linears."""

    class SharedCopy(block):
        def forward(self, x_BSD: Tensor) -> Tensor:
            return super().forward(_copy_to_ranks(x_BSD, self.group))

    return SharedCopy


_SHARED_COPY = {block: _with_shared_copy(block) for block in (GatedMLP, Attention)}


def add_collectives(local_model: nn.Module, group: dist.ProcessGroup, *, per_block: bool) -> None:
    """Turn a model of local shards into the hand-written tensor-parallel one, in place.

    Args:
        local_model: a model of `MODELS` whose linears already have their local sizes.
        group: the tensor-parallel group.
        per_block: one f per block (q, k, v share one, gate and up share one), else one per linear.

    Communicates: per row-parallel linear one all-reduce of its output forward; per f one
        all-reduce of the gradient of its input backward.
    """
    for name, module in local_model.named_modules():
        last = name.rpartition(".")[2]
        if last in ROW:
            module.__class__ = _RowLinear
        elif last in COLUMN and not per_block:
            module.__class__ = _ColumnLinear
        elif per_block and type(module) in _SHARED_COPY:
            module.__class__ = _SHARED_COPY[type(module)]
        else:
            continue
        module.group = group


def local_state(full_model: nn.Module, *, rank: int, num_ranks: int) -> dict[str, Tensor]:
    """Return the shard that `rank` holds of each parameter of an unsharded model."""
    state = {}
    for name, parameter in full_model.named_parameters():
        linear = name.split(".")[-2]
        dim = 0 if linear in COLUMN else 1 if linear in ROW else None
        value = parameter.detach()
        state[name] = value if dim is None else value.chunk(num_ranks, dim)[rank]
    return {name: value.clone() for name, value in state.items()}
