"""From a layer's split and factors to the tensors of a `LatentAttention`."""

import torch
from torch import Tensor

from kvfold.attention import LatentSpec
from kvfold.convert.factorize import FACTORIZATIONS
from kvfold.convert.rotary import LAYOUTS
from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit


def fold_layer(
    weights: LayerWeights, statistics: LayerStatistics, target: LatentSpec, *, layout: str, rope: str, factorize: str
) -> dict[str, Tensor]:
    """One layer's attention as `LatentAttention` tensors of shape `target`, by parameter name."""
    statistics = statistics.to(weights.query.dtype)
    split = LAYOUTS[layout].strategies[rope](weights, statistics, target.qk_rope_head_dim // 2)
    factors = FACTORIZATIONS[factorize](
        split.key_nope.flatten(0, 1), weights.value.flatten(0, 1), target.kv_lora_rank, statistics
    )
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
