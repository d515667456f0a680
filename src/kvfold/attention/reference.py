"""Naive twins of the attention modules: the equations as written in the papers, one head of one sequence at a time.

Slow on purpose and without any code of the fast modules, so that the two can only agree if both are right. No cache, no
absorbed path, no dropout. Rotation multiplies complex numbers: pair `l` of a width `2p` vector is `x[l] + i x[l + p]`.
A query that sees nothing (padding) gives zero before the output projection; the fast modules leave such rows undefined.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from kvfold.attention.base import LatentRMSNorm
from kvfold.attention.grouped import GroupedAttention
from kvfold.attention.latent import LatentAttention
from kvfold.attention.tied import TiedAttention


def grouped(
    module: GroupedAttention,
    hidden_BTD: Float[Tensor, "B T D"],
    phase_BTP: Complex[Tensor, "B T P"],
    mask_BTT: Bool[Tensor, "B T T"],
) -> Float[Tensor, "B T D"]:
    """MHA, GQA, MQA (arXiv 1706.03762, 2305.13245, 1911.02150): `softmax(RoPE(q_n) . RoPE(k_g) / sqrt(d)) v_g`.

    Args:
        phase_BTP: `exp(i theta_l t)` of every base frequency at the position of every token.
        mask_BTT: True where a query (second axis) sees a token (third axis).
    """
    spec, index = module.spec, module.rotary_index[0]
    outputs = []
    for x, phase, mask in zip(hidden_BTD, phase_BTP, mask_BTT, strict=True):
        heads = []
        for n in range(spec.num_attention_heads):
            g = n * spec.num_key_value_heads // spec.num_attention_heads
            query = _rotate(_head(module.q_proj, x, n, spec.head_dim), phase, index)
            key = _rotate(_head(module.k_proj, x, g, spec.head_dim), phase, index)
            value = _head(module.v_proj, x, g, spec.head_dim)
            heads.append(_attend(query, key, value, mask, spec.head_dim**-0.5))
        outputs.append(_output(module.o_proj, heads))
    return torch.stack(outputs)


def tied(
    module: TiedAttention,
    hidden_BTD: Float[Tensor, "B T D"],
    phase_BTP: Complex[Tensor, "B T P"],
    mask_BTT: Bool[Tensor, "B T T"],
) -> Float[Tensor, "B T D"]:
    """GTA (arXiv 2505.21487): `V = KV`, `K = [KV[:d/2] ; RoPE(W_kr x)]`, one rotary half for all key/value heads.

    Arguments as in `grouped`.
    """
    spec, index, half = module.spec, module.rotary_index[0], module.spec.head_dim // 2
    outputs = []
    for x, phase, mask in zip(hidden_BTD, phase_BTP, mask_BTT, strict=True):
        rotary_key = _rotate(_head(module.k_rope_proj, x, 0, half), phase, index)
        heads = []
        for n in range(spec.num_attention_heads):
            query = _head(module.q_proj, x, n, spec.head_dim)
            query = torch.cat((query[:, :half], _rotate(query[:, half:], phase, index)), dim=1)
            value = _head(module.kv_proj, x, n * spec.num_key_value_heads // spec.num_attention_heads, spec.head_dim)
            key = torch.cat((value[:, :half], rotary_key), dim=1)
            heads.append(_attend(query, key, value, mask, spec.head_dim**-0.5))
        outputs.append(_output(module.o_proj, heads))
    return torch.stack(outputs)


def latent(
    module: LatentAttention,
    hidden_BTD: Float[Tensor, "B T D"],
    phase_BTP: Complex[Tensor, "B T P"],
    mask_BTT: Bool[Tensor, "B T T"],
) -> Float[Tensor, "B T D"]:
    """MLA (arXiv 2405.04434, section 2.1), GLA-h (arXiv 2505.21487) and MHA2MLA's layout (arXiv 2502.14837):
    `k_g = [W_uk,g c_j ; RoPE(k_r)]`, `v_g = W_uv,g c_j`, scale `(d_nope + d_r)^-1/2`; the branches of MLRA (arXiv
    2603.02188) one after the other.

    Arguments as in `grouped`.
    """
    spec, nope = module.spec, module.spec.qk_nope_head_dim
    outputs = []
    for x, phase, mask in zip(hidden_BTD, phase_BTP, mask_BTT, strict=True):
        heads = []
        for n in range(spec.num_attention_heads):
            g = n * spec.num_key_value_heads // spec.num_attention_heads
            r = g if spec.rotary_heads > 1 else 0
            rotary_key = _rotate(_head(module.k_rope_proj, x, r, spec.qk_rope_head_dim), phase, module.rotary_index[r])
            query = _latent_query(module, x, n)
            query = torch.cat((query[:, :nope], _rotate(query[:, nope:], phase, module.rotary_index[r])), dim=1)
            branches = []
            for i in range(spec.branches):
                k = i * spec.num_key_value_heads + g
                c = _latent_head(module, x, k * spec.latent_heads // (spec.branches * spec.num_key_value_heads))
                key = torch.cat((_head(module.k_b_proj, c, k, nope), rotary_key), dim=1) if nope else rotary_key
                value = _head(module.v_b_proj, c, k, spec.v_head_dim)
                branches.append(_attend(query, key, value, mask, (nope + spec.qk_rope_head_dim) ** -0.5))
            heads.append(sum(branches) * spec.branches**-0.5)
        outputs.append(_output(module.o_proj, heads))
    return torch.stack(outputs)


def _latent_head(module: LatentAttention, x_TD: Tensor, j: int) -> Float[Tensor, "T R"]:
    c = _head(module.kv_a_proj, x_TD, j, module.spec.latent_rank)
    return _normed(module.kv_a_layernorm, c, j) if module.spec.latent_norm else c


def _latent_query(module: LatentAttention, x_TD: Tensor, n: int) -> Float[Tensor, "T qk"]:
    spec = module.spec
    if spec.q_lora_rank is None:
        return _head(module.q_proj, x_TD, n, spec.qk_head_dim)
    j = n * spec.q_latent_heads // spec.num_attention_heads
    c = _head(module.q_a_proj, x_TD, j, spec.q_lora_rank // spec.q_latent_heads)
    return _head(module.q_b_proj, _normed(module.q_a_layernorm, c, j), n, spec.qk_head_dim)


def _normed(norm: LatentRMSNorm, c_TR: Float[Tensor, "T R"], j: int) -> Float[Tensor, "T R"]:
    """RMSNorm of latent head `j` by its own mean square."""
    width = c_TR.shape[1]
    return norm.weight[j * width : (j + 1) * width] * c_TR / (c_TR.square().mean(1, keepdim=True) + norm.eps).sqrt()


def _head(projection: nn.Linear, x_Ti: Float[Tensor, "T i"], head: int, width: int) -> Float[Tensor, "T width"]:
    rows = slice(head * width, (head + 1) * width)
    y = x_Ti @ projection.weight[rows].T
    return y if projection.bias is None else y + projection.bias[rows]


def _rotate(
    x_Td: Float[Tensor, "T d"], phase_TP: Complex[Tensor, "T P"], index_p: Int[Tensor, " p"]
) -> Float[Tensor, "T d"]:
    half = x_Td.shape[1] // 2
    turned = torch.complex(x_Td[:, :half], x_Td[:, half:]) * phase_TP[:, index_p]
    return torch.cat((turned.real, turned.imag), dim=1)


def _attend(
    query_Td: Float[Tensor, "T d"],
    key_Td: Float[Tensor, "T d"],
    value_Tv: Float[Tensor, "T v"],
    mask_TT: Bool[Tensor, "T T"],
    scale: float,
) -> Float[Tensor, "T v"]:
    scores = query_Td @ key_Td.T * scale
    largest = scores.masked_fill(~mask_TT, torch.finfo(scores.dtype).min).amax(1, keepdim=True)
    weights = torch.where(mask_TT, (scores - largest).masked_fill(~mask_TT, 0).exp(), 0)
    return weights @ value_Tv / weights.sum(1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)


def _output(projection: nn.Linear, heads: list[Float[Tensor, "T v"]]) -> Float[Tensor, "T D"]:
    y = torch.cat(heads, dim=1) @ projection.weight.T
    return y if projection.bias is None else y + projection.bias


REFERENCES: dict[str, Callable[..., Tensor]] = {"grouped": grouped, "tied": tied, "latent": latent}
