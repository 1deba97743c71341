# SPDX-License-Identifier: Apache-2.0
"""A small Llama-style decoder and its tensor-parallel plan.

Nothing in the model knows about tensor parallelism: attention takes the number of heads from the
tensors it gets, so the same code runs on all heads or on the heads of one rank.

Names of tensors end in their axes:
    B  sequences in the batch          H  query heads (those of this rank under tensor parallel)
    T  positions in a sequence         G  key/value heads (likewise), G <= H
    D  model width                     K  width of one head
    F  width inside the MLP (likewise) V  vocabulary, one entry per byte value
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
)


@dataclass(frozen=True)
class Config:
    """Sizes of the model. `mlp_hidden` is 8/3 of `dim`, rounded up to `mlp_multiple`."""

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    mlp_multiple: int = 64
    max_seq: int = 128
    bias: bool = False
    tied: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self):
        if min(self.dim, self.heads, self.kv_heads) < 1:
            raise ValueError("the model width and the numbers of heads must be positive")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"model width {self.dim} must be a multiple of {2 * self.heads}: {self.heads} "
                "heads, each of an even width for the rotary embedding"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def mlp_hidden(self) -> int:
        return -(-self.dim * 8 // (3 * self.mlp_multiple)) * self.mlp_multiple

    def check_divides(self, tp: int, sequence_parallel: bool) -> None:
        """Raise ValueError unless `tp` ranks can share the model evenly."""
        sizes = {
            "query heads": self.heads,
            "key/value heads": self.kv_heads,
            "MLP columns": self.mlp_hidden,
            "vocabulary entries": self.vocab,
        }
        if sequence_parallel:
            sizes["sequence positions"] = self.max_seq
        for what, size in sizes.items():
            if size % tp:
                raise ValueError(f"{size} {what} cannot be divided among {tp} ranks")


def rotary_tables(positions: int, head_dim: int, base: float = 10000.0):
    """Cosine and sine of every position's rotation angles, each of shape (T, K)."""
    rates = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), rates)
    angles_TK = torch.cat((angles, angles), dim=-1)
    return angles_TK.cos(), angles_TK.sin()


def rotate(x_BTHK, cos_TK, sin_TK):
    """Rotate the pairs (i, i + K/2) of every head by the angle of its position."""
    positions = x_BTHK.shape[1]
    cos_T1K, sin_T1K = cos_TK[:positions, None], sin_TK[:positions, None]
    first, second = x_BTHK.chunk(2, dim=-1)
    return x_BTHK * cos_T1K + torch.cat((-second, first), dim=-1) * sin_T1K


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a key/value head."""

    def __init__(self, config: Config):
        super().__init__()
        kv_dim = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.wk = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.wv = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.wo = nn.Linear(config.dim, config.dim, bias=config.bias)
        # Buffers of this module rather than arguments: they are the same on every rank, so no
        # style has to move them.
        cos_TK, sin_TK = rotary_tables(config.max_seq, config.head_dim)
        self.register_buffer("cos_TK", cos_TK, persistent=False)
        self.register_buffer("sin_TK", sin_TK, persistent=False)

    def _split_heads(self, x):
        # -1, not the configured number of heads: a rank holds only its share of them.
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim)

    def forward(self, x_BTD):
        q_BTHK = rotate(self._split_heads(self.wq(x_BTD)), self.cos_TK, self.sin_TK)
        k_BTGK = rotate(self._split_heads(self.wk(x_BTD)), self.cos_TK, self.sin_TK)
        v_BTGK = self._split_heads(self.wv(x_BTD))
        out_BHTK = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2),
            k_BTGK.transpose(1, 2),
            v_BTGK.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self.wo(out_BHTK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated MLP: silu(gate(x)) * up(x), projected back by `down`."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate = nn.Linear(config.dim, config.mlp_hidden, bias=config.bias)
        self.up = nn.Linear(config.dim, config.mlp_hidden, bias=config.bias)
        self.down = nn.Linear(config.mlp_hidden, config.dim, bias=config.bias)

    def forward(self, x_BTD):
        hidden_BTF = F.silu(self.gate(x_BTD)) * self.up(x_BTD)
        return self.down(hidden_BTF)


class Block(nn.Module):
    """One decoder layer: attention and MLP, each normalised before and added after."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Decoder(nn.Module):
    """Byte-level language model: tokens (B, T) to logits (B, T, V)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.tie()
        self._init_weights()

    def tie(self) -> None:
        """Make the head use the embedding's weight, if the configuration says so.

        Also to be called after parallelize_module: implementations that give every planned module
        a parameter of its own separate the two, and where the tie was kept this changes nothing.
        Both hold the vocabulary cut along dimension 0, so one sharded parameter serves both.
        """
        if self.config.tied:
            self.head.weight = self.embed.weight

    def _init_weights(self) -> None:
        # Every linear keeps the size of what it gets. With weights much smaller, the attention
        # scores would have next to no gradient, and Adam would follow its rounding errors.
        width = self.config.dim**-0.5
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.embed.weight, std=width if self.config.tied else 1.0)
        if not self.config.tied:
            nn.init.normal_(self.head.weight, std=0.02)  # the first loss is about log(vocab)

    def forward(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD))


def tp_plan(config: Config, sequence_parallel: bool = False) -> dict:
    """The styles to pass to parallelize_module for a Decoder of this configuration.

    Every pair of linears is cut by columns, then by rows, so one layer needs two reductions. Under
    sequence parallelism the activations between the pairs are cut along the sequence (Shard(1)):
    norms and residual additions work on a share of the positions only.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    for index in range(config.layers):
        layer = f"layers.{index}"
        for name in ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up"):
            plan[f"{layer}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "mlp.down"):
            plan[f"{layer}.{name}"] = RowwiseParallel(output_layouts=between)
        if sequence_parallel:
            for name in ("attention", "mlp"):
                plan[f"{layer}.{name}_norm"] = SequenceParallel()
                plan[f"{layer}.{name}"] = PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                )
    return plan
