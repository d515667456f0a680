"""Multi-head latent attention (MLA, arXiv 2405.04434) and grouped latent attention (GLA-h, arXiv 2505.21487)."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvfold.attention.base import Attention, LatentRMSNorm, LayerContext, split_heads
from kvfold.attention.kernels import Mask, split_attention
from kvfold.attention.rotary import rotate
from kvfold.attention.spec import LatentSpec


class LatentAttention(Attention[LatentSpec]):
    """Caches the latent `c = W_dkv x` and the rotary key `k_r = RoPE(W_kr x)`, nothing else.

    Key/value head g sees the latent head `j = g // (G / H)` only:
        k_g = [W_uk,g c_j ; k_r]    v_g = W_uv,g c_j + b_v    softmax scale (d_nope + d_r)^-1/2
    Absorbed, equal up to rounding:
        s_n = (W_uk,g^T q_n) . c_j + q_r,n . k_r    o_n = W_uv,g (sum_s a_s c_j,s) + b_v
    With b branches (MLRA-b, arXiv 2603.02188) there are b N query heads, b copies of N, and b G keys and values; head n
    puts out b^-1/2 (o_n + o_n+N + ...).
    """

    def __init__(self, spec: LatentSpec, context: LayerContext) -> None:
        super().__init__(spec, context)
        width = spec.num_attention_heads * spec.qk_head_dim
        if spec.q_lora_rank is None:
            self.q_proj = nn.Linear(spec.hidden_size, width, bias=spec.query_bias)
        else:
            self.q_a_proj = nn.Linear(spec.hidden_size, spec.q_lora_rank, bias=spec.latent_bias)
            self.q_a_layernorm = LatentRMSNorm(spec.q_latent_heads, spec.q_lora_rank, spec.norm_eps)
            self.q_b_proj = nn.Linear(spec.q_lora_rank // spec.q_latent_heads, width, bias=spec.query_bias)
        self.kv_a_proj = nn.Linear(spec.hidden_size, spec.kv_lora_rank, bias=spec.latent_bias)
        if spec.latent_norm:
            self.kv_a_layernorm = LatentRMSNorm(spec.latent_heads, spec.kv_lora_rank, spec.norm_eps)
        self.k_rope_proj = nn.Linear(
            spec.hidden_size, spec.rotary_heads * spec.qk_rope_head_dim, bias=spec.rope_key_bias
        )
        if spec.qk_nope_head_dim:
            self.k_b_proj = nn.Linear(spec.latent_rank, spec.key_heads * spec.qk_nope_head_dim, bias=False)
        self.v_b_proj = nn.Linear(spec.latent_rank, spec.key_heads * spec.v_head_dim, bias=spec.value_bias)

    def project_queries(self, hidden_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        spec = self.spec
        if spec.q_lora_rank is None:
            flat = self.q_proj(hidden_BTD)
        else:
            flat = _per_latent(self.q_b_proj, self.q_a_layernorm(self.q_a_proj(hidden_BTD)), spec.q_latent_heads)
        query = split_heads(flat, spec.num_attention_heads)
        content, rotary = query.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), dim=-1)
        return torch.cat((content, rotate(rotary, cos, sin)), dim=-1).repeat(1, spec.branches, 1, 1)

    def merge_heads(self, output_BTNv: Tensor) -> Tensor:
        branches = self.spec.branches
        if branches > 1:
            output_BTNv = output_BTNv.unflatten(2, (branches, -1)).sum(2) * branches**-0.5
        return output_BTNv.flatten(2)

    def project_cached(self, hidden_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.kv_a_proj(hidden_BTD)
        if self.spec.latent_norm:
            latent = self.kv_a_layernorm(latent)
        rotary = split_heads(self.k_rope_proj(hidden_BTD), self.spec.rotary_heads)
        return split_heads(latent, self.spec.latent_heads), rotate(rotary, cos, sin)

    def expand(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        flat = first.transpose(1, 2).flatten(2)
        value = split_heads(_per_latent(self.v_b_proj, flat, spec.latent_heads), spec.key_heads)
        rotary = second.expand(-1, spec.key_heads, -1, -1)
        if not spec.qk_nope_head_dim:
            return rotary, value
        content = split_heads(_per_latent(self.k_b_proj, flat, spec.latent_heads), spec.key_heads)
        return torch.cat((content, rotary), dim=-1), value

    def attend_absorbed(self, query_BNTd: Tensor, first: Tensor, second: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        spec = self.spec
        content, rotary = query_BNTd.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), dim=-1)
        latent_query = self._by_key_head(content, self._up(self.k_b_proj)) if spec.qk_nope_head_dim else None
        latent_output, weights = split_attention(
            latent_query, first, rotary, second, first, mask, scaling=spec.softmax_scale
        )
        output = self._by_key_head(latent_output, self._up(self.v_b_proj).transpose(-1, -2)).transpose(1, 2)
        if spec.value_bias:
            bias = self.v_b_proj.bias.view(spec.key_heads, spec.v_head_dim)
            output = output + bias.repeat_interleave(spec.query_groups, dim=0)
        return output, weights

    def _up(self, projection: nn.Linear) -> Float[Tensor, "G w R"]:
        return projection.weight.view(self.spec.key_heads, -1, self.spec.latent_rank)

    def _by_key_head(self, x_BNTx: Tensor, weight_Gxy: Tensor) -> Float[Tensor, "B N T y"]:
        """Multiply each query head by the matrix of its key/value head."""
        batch, heads, new, width = x_BNTx.shape
        rows = x_BNTx.reshape(batch, self.spec.key_heads, -1, width)
        return (rows @ weight_Gxy).view(batch, heads, new, weight_Gxy.shape[-1])


def _per_latent(projection: Any, x_BTw: Float[Tensor, "B T w"], latents: int) -> Float[Tensor, "B T out"]:
    """Apply a block-diagonal projection: `latents` blocks of its rows, each to its own part of the input.

    The projection is an `nn.Linear`, or for one latent whatever computes the same.
    """
    if latents == 1:
        return projection(x_BTw)
    parts = zip(x_BTw.chunk(latents, dim=-1), projection.weight.chunk(latents), strict=True)
    output = torch.cat([nn.functional.linear(part, block) for part, block in parts], dim=-1)
    return output if projection.bias is None else output + projection.bias
