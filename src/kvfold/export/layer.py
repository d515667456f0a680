"""One layer of `LatentAttention` as the attention of DeepSeek-V3: the same function of the hidden states."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvfold.attention import LatentSpec

NORM_ERROR = 1e-7
"""The most that the norm on the latent may change it, relatively, where it has to be made to do nothing."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Of one head and of the cache in the runtime; at least those of the spec, filled up with zeros."""

    kv_lora_rank: int
    qk_rope_head_dim: int


def deepseek_layer(
    tensors: Mapping[str, Tensor], spec: LatentSpec, widths: Widths, input_norm: Float[Tensor, " D"], eps: float
) -> dict[str, Tensor]:
    """Tensors of `DeepseekV3Attention` by parameter name, in fp64.

    Differences that are made up for: its rotary dims are interleaved; its softmax scale is that of the runtime's
    widths; every query head has keys and values of its own; and there is always a norm on the latent: `neutral_norm`.

    Args:
        tensors: of `LatentAttention`, by parameter name.
        input_norm: weight of the norm before the attention, which bounds what the latent can be.
        eps: of the norm on the latent.
    """
    weights = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
    latent, latent_bias = weights["kv_a_proj.weight"], weights.get("kv_a_proj.bias")
    up = _up_projection(weights, spec)
    if spec.latent_norm:
        norm = weights["kv_a_layernorm.weight"]
    else:
        latent, latent_bias, norm, rest = neutral_norm(latent, latent_bias, input_norm.double(), eps)
        up = up * rest
    down = torch.cat((_rows(latent, widths.kv_lora_rank), _rotary_rows(weights["k_rope_proj.weight"], widths)))
    result = _queries(weights, spec, widths) | {
        "kv_a_proj_with_mqa.weight": down,
        "kv_a_layernorm.weight": _rows(norm, widths.kv_lora_rank),
        "kv_b_proj.weight": torch.nn.functional.pad(up, (0, widths.kv_lora_rank - spec.kv_lora_rank)),
        "o_proj.weight": weights["o_proj.weight"],
    }
    return result | _biases(weights, spec, widths, latent_bias)


def neutral_norm(
    latent: Float[Tensor, "R D"], bias: Float[Tensor, " R"] | None, input_norm: Float[Tensor, " D"], eps: float
) -> tuple[Tensor, Tensor | None, Tensor, float]:
    """Rows and bias of the latent, the weight of its norm, and a factor behind it, with which the norm does nothing.

    `RMSNorm(a c) = a c / sqrt(a^2 mean(c^2) + eps)` is `a c / sqrt(eps)` up to a relative `a^2 mean(c^2) / (2 eps)`.
    The hidden states behind an RMSNorm of weight g have a norm of at most sqrt(D) before g, so that `mean(c^2) <= D / R
    |W diag(g)|_2^2`, and `a` can be so small that the error is below `NORM_ERROR` for every input. Both `a` and the
    norm's weight are powers of two, which round in no dtype.
    """
    rank, width = latent.shape
    largest = float(torch.linalg.matrix_norm(latent * input_norm, ord=2)) * width**0.5
    if bias is not None:
        largest += float(bias.norm())
    small = _power_of_two((2 * NORM_ERROR * eps * rank) ** 0.5 / max(largest, torch.finfo(torch.float32).tiny))
    wanted = eps**0.5 / small
    weight = _power_of_two(wanted)
    norm = torch.full((rank,), weight, dtype=latent.dtype)
    return latent * small, None if bias is None else bias * small, norm, wanted / weight


def _power_of_two(x: float) -> float:
    return float(2.0 ** torch.tensor(x, dtype=torch.float64).log2().floor())


def _up_projection(weights: Mapping[str, Tensor], spec: LatentSpec) -> Float[Tensor, "NkvR R"]:
    """Keys and values of every query head out of the latent, (N * (nope + v), R)."""
    heads = spec.num_key_value_heads
    parts = [weights["v_b_proj.weight"].unflatten(0, (heads, -1))]
    if spec.qk_nope_head_dim:
        parts.insert(0, weights["k_b_proj.weight"].unflatten(0, (heads, -1)))
    return torch.cat(parts, dim=1).repeat_interleave(spec.query_groups, dim=0).flatten(0, 1)


def _queries(weights: Mapping[str, Tensor], spec: LatentSpec, widths: Widths) -> dict[str, Tensor]:
    """Query projections with the rotary rows of every head interleaved, scaled to the runtime's softmax scale."""
    name = "q_proj" if spec.q_lora_rank is None else "q_b_proj"
    per_head = weights[f"{name}.weight"].unflatten(0, (spec.num_attention_heads, -1))
    content, rotary = per_head.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), dim=1)
    scale = ((spec.qk_nope_head_dim + widths.qk_rope_head_dim) / spec.qk_head_dim) ** 0.5
    rotary = torch.stack([_rotary_rows(head, widths) for head in rotary])
    query = {f"{name}.weight": torch.cat((content, rotary), dim=1).flatten(0, 1) * scale}
    if spec.q_lora_rank is None:
        return query
    return query | {key: weights[key] for key in ("q_a_proj.weight", "q_a_layernorm.weight")}


def _rotary_rows(rows: Float[Tensor, "d D"], widths: Widths) -> Tensor:
    """Pair l in the rows 2l and 2l + 1, where it was in l and l + d/2; pairs of zeros behind them."""
    pairs = rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    return _rows(pairs, widths.qk_rope_head_dim)


def _rows(rows: Tensor, count: int) -> Tensor:
    """With rows of zeros behind, `count` in all."""
    return torch.cat((rows, rows.new_zeros(count - len(rows), *rows.shape[1:])))


def _biases(
    weights: Mapping[str, Tensor], spec: LatentSpec, widths: Widths, latent: Tensor | None
) -> dict[str, Tensor]:
    """Those that DeepSeek's attention has, all or none; values' biases are the output's, for weights sum to one."""
    value, output = weights.get("v_b_proj.bias"), weights.get("o_proj.bias")
    rotary = weights.get("k_rope_proj.bias")
    if all(bias is None for bias in (latent, rotary, value, output)):
        return {}
    down = torch.zeros(widths.kv_lora_rank + widths.qk_rope_head_dim, dtype=torch.float64)
    if latent is not None:
        down[: spec.kv_lora_rank] = latent
    if rotary is not None:
        down[widths.kv_lora_rank :] = _rotary_rows(rotary, widths)
    total = torch.zeros(spec.hidden_size, dtype=torch.float64) if output is None else output
    if value is not None:
        by_query = value.unflatten(0, (spec.num_key_value_heads, -1)).repeat_interleave(spec.query_groups, dim=0)
        total = total + weights["o_proj.weight"] @ by_query.flatten()
    return {"kv_a_proj_with_mqa.bias": down, "o_proj.bias": total}
