"""Grouped tied attention, GTA (arXiv 2505.21487): one projection gives keys and values."""

import torch
from torch import Tensor, nn

from kvfold.attention.base import Attention, LayerContext, split_heads
from kvfold.attention.kernels import Mask, split_attention
from kvfold.attention.rotary import rotate
from kvfold.attention.spec import TiedSpec


class TiedAttention(Attention[TiedSpec]):
    """`V = KV` and `K = [KV[:d/2] ; RoPE(W_kr x)]`: the first half of a key is never rotated, the second is one rotary
    head that all key/value heads share."""

    def __init__(self, spec: TiedSpec, context: LayerContext) -> None:
        super().__init__(spec, context)
        self.q_proj = nn.Linear(spec.hidden_size, spec.num_attention_heads * spec.head_dim, bias=spec.query_bias)
        self.kv_proj = nn.Linear(spec.hidden_size, spec.num_key_value_heads * spec.head_dim, bias=False)
        self.k_rope_proj = nn.Linear(spec.hidden_size, spec.head_dim // 2, bias=False)

    def project_queries(self, hidden_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        content, rotary = split_heads(self.q_proj(hidden_BTD), self.spec.num_attention_heads).chunk(2, dim=-1)
        return torch.cat((content, rotate(rotary, cos, sin)), dim=-1)

    def project_cached(self, hidden_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        tied = split_heads(self.kv_proj(hidden_BTD), self.spec.num_key_value_heads)
        return tied, rotate(split_heads(self.k_rope_proj(hidden_BTD), 1), cos, sin)

    def expand(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        rotary = second.expand(-1, first.shape[1], -1, -1)
        return torch.cat((first[..., : self.spec.head_dim // 2], rotary), dim=-1), first

    def attend_absorbed(self, query_BNTd: Tensor, first: Tensor, second: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        content, rotary = query_BNTd.chunk(2, dim=-1)
        output, weights = split_attention(
            content, first[..., : content.shape[-1]], rotary, second, first, mask, scaling=self.spec.softmax_scale
        )
        return output.transpose(1, 2), weights
