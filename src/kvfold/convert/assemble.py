"""From a layer's split and factors to the tensors of a `LatentAttention`."""

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.attention import LatentSpec
from kvfold.convert.factorize import FACTORIZATIONS, Factors
from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit


def fold_layer(
    weights: LayerWeights,
    split: RotarySplit,
    statistics: LayerStatistics,
    target: LatentSpec,
    factorize: str,
    **choices: int | float,
) -> dict[str, Tensor]:
    """One layer's attention as `LatentAttention` tensors of shape `target`, by parameter name.

    `choices` are those that the factorisation leaves open.
    """
    factors = FACTORIZATIONS[factorize](split, weights, statistics, target.kv_lora_rank, **choices)
    return _tensors(weights, split, factors, target)


def exact_layer(weights: LayerWeights, split: RotarySplit, target: LatentSpec) -> tuple[LatentSpec, dict[str, Tensor]]:
    """The same with the rank that keeps everything: what the rotary stage alone does. Returns its spec too."""
    down = torch.cat((split.key_nope.flatten(0, 1), weights.value.flatten(0, 1)))
    up = torch.eye(len(down), dtype=down.dtype)
    keys = split.key_nope.shape[0] * split.key_nope.shape[1]
    spec = replace(target, kv_lora_rank=len(down))
    return spec, _tensors(weights, split, Factors(down=down, up_key=up[:keys], up_value=up[keys:]), spec)


def _tensors(weights: LayerWeights, split: RotarySplit, factors: Factors, target: LatentSpec) -> dict[str, Tensor]:
    tensors = {
        "rotary_index": split.index,
        "q_proj.weight": torch.cat((split.query_nope, split.query_rope), dim=1).flatten(0, 1),
        "k_rope_proj.weight": split.key_rope.flatten(0, 1),
        "kv_a_proj.weight": factors.down,
        "v_b_proj.weight": factors.up_value,
        "o_proj.weight": weights.output,
    }
    if target.qk_nope_head_dim:
        tensors["k_b_proj.weight"] = factors.up_key
    return tensors | _biases(weights, split)


def _biases(weights: LayerWeights, split: RotarySplit) -> dict[str, Tensor]:
    biases: dict[str, Tensor] = {}
    if split.query_nope_bias is not None and split.query_rope_bias is not None:
        biases["q_proj.bias"] = torch.cat((split.query_nope_bias, split.query_rope_bias), dim=1).flatten()
    if split.key_rope_bias is not None:
        biases["k_rope_proj.bias"] = split.key_rope_bias.flatten()
    if weights.value_bias is not None:
        biases["v_b_proj.bias"] = weights.value_bias.flatten()
    if weights.output_bias is not None:
        biases["o_proj.bias"] = weights.output_bias
    return biases
