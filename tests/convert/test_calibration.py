"""Errors of attention on calibration text."""

import pytest
import torch
from transformers import LlamaConfig

from kvfold.attention import GroupedSpec, LayerContext, build_attention
from kvfold.convert.calibration import AttentionSample


@pytest.mark.parametrize(("scale", "error"), [(0.0, 0.0), (1.0, 0.25)])
def test_relative_error_of_a_pruned_layer_and_of_another(scale, error):
    spec = GroupedSpec(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = LlamaConfig(attn_implementation="sdpa")
    attention = build_attention(spec, LayerContext(config=config, layer_idx=0, base_pairs=4)).eval()
    hidden, angles = torch.randn(1, 5, 32), torch.randn(1, 5, 8)
    rotation = (angles.cos(), angles.sin())
    with torch.no_grad():
        attention.o_proj.weight *= scale
        output, _ = attention(hidden, rotation, None)
        sample = AttentionSample(
            hidden_states=hidden, position_embeddings=rotation, attention_mask=None, output=output.clone()
        )
        attention.o_proj.weight *= 1.5
    assert sample.relative_error(attention) == pytest.approx(error)
