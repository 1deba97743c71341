# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for vendor ops of torch_npu, of the same names and signatures, made of torch ops.

They check what the vendor's ops check of their arguments, above all that the number of heads is
that of the tensors they are given.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

__all__ = ["OPS"]

_LIB = torch.library.Library("hp_npu", "DEF")


def _define(schema: str, function) -> None:
    _LIB.define(schema)
    _LIB.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")


def _rms_norm(x, gamma, epsilon=1e-6):
    dims = list(range(x.ndim - gamma.ndim, x.ndim))
    scale = torch.rsqrt(x.square().mean(dims, keepdim=True) + epsilon)
    return x * scale * gamma, scale


def _add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    total = x1 + x2
    return (*_rms_norm(total, gamma, epsilon), total.clone())


def _rotary_mul(x, r1, r2):
    first, second = x.chunk(2, -1)
    return x * r1 + torch.cat([-second, first], -1) * r2


def _swiglu(x, dim=-1):
    first, second = x.chunk(2, dim)
    return F.silu(first) * second


def _geglu(x):
    first, second = x.chunk(2, -1)
    gate = F.gelu(second)
    return first * gate, gate


def _to_bnsd(x, layout, heads):
    if layout == "SBH":
        x = x.transpose(0, 1)
    if layout.endswith("H"):
        x = x.unflatten(2, (heads, -1))
    return x if layout == "BNSD" else x.transpose(1, 2)


def _fusion_attention(q, k, v, head_num, input_layout, atten_mask=None, scale=1.0, keep_prob=1.0):
    at = {"BNSD": 1, "BSND": 2}.get(input_layout)
    if at is not None and q.shape[at] != head_num:
        raise RuntimeError(f"head_num {head_num} must be that of the query, {q.shape[at]}")
    query = _to_bnsd(q, input_layout, head_num)
    size = query.shape[-1]
    kv_heads = k.shape[at] if at is not None else k.shape[2] // size
    key, value = (_to_bnsd(x, input_layout, kv_heads) for x in (k, v))
    group = head_num // kv_heads
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.mT * scale
    if atten_mask is not None:
        scores = scores.masked_fill(atten_mask, float("-inf"))
    out = (scores.softmax(-1) @ value).transpose(1, 2)
    if input_layout == "BNSD":
        out = out.transpose(1, 2)
    if input_layout.endswith("H"):
        out = out.flatten(2)
    out = out.transpose(0, 1) if input_layout == "SBH" else out
    top = scores.amax(-1, keepdim=True).detach().expand(*scores.shape[:3], 8).contiguous()
    total = scores.detach().logsumexp(-1, keepdim=True).expand(*scores.shape[:3], 8).contiguous()
    return out, top, total, q.new_zeros(0), 0, 0, 0


def _token_unpermute(permuted, sorted_indices, probs=None):
    restored = torch.zeros_like(permuted).index_copy(0, sorted_indices.long(), permuted)
    if probs is None:
        return restored
    return (restored.unflatten(0, probs.shape) * probs.unsqueeze(-1)).sum(1)


_define("npu_rms_norm(Tensor x, Tensor gamma, float epsilon=1e-6) -> (Tensor, Tensor)", _rms_norm)
_define(
    "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-6)"
    " -> (Tensor, Tensor, Tensor)",
    _add_rms_norm,
)
_define("npu_rotary_mul(Tensor input, Tensor r1, Tensor r2) -> Tensor", _rotary_mul)
_define("npu_swiglu(Tensor input, int dim=-1) -> Tensor", _swiglu)
_define("npu_geglu(Tensor input) -> (Tensor, Tensor)", _geglu)
for _name, _function in (
    ("fast_gelu", F.gelu),
    ("gelu", F.gelu),
    ("silu", F.silu),
    ("mish", F.mish),
):
    _define(f"npu_{_name}(Tensor input) -> Tensor", partial(lambda f, x: f(x), _function))
_define("npu_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", F.linear)
_define(
    "npu_scaled_masked_softmax(Tensor x, Tensor mask, float scale=1.0) -> Tensor",
    lambda x, mask, scale=1.0: (x * scale).masked_fill(mask, -10000.0).softmax(-1),
)
_define(
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout,"
    " *, Tensor? atten_mask=None, float scale=1.0, float keep_prob=1.0)"
    " -> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    _fusion_attention,
)
_define(
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None)"
    " -> Tensor",
    _token_unpermute,
)

OPS = torch.ops.hp_npu
