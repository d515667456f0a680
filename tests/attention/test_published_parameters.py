"""Published parameter-matched models: our formulas give every published total."""

import json
from pathlib import Path

import pytest

from kvfold.attention import AttentionSpec, GroupedSpec, LatentSpec, TiedSpec

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published_parameters.json").read_text("utf-8"))
MATCHED, DOUBLE = PUBLISHED["matched"], PUBLISHED["double_heads"]


def attention(row: dict, *, hidden: int, head_dim: int, biases_and_norm: bool) -> AttentionSpec:
    """The attention of a row. Published latent heads have a full head dim without rotation beside the rotary dims."""
    heads = {"hidden_size": hidden, "num_attention_heads": row["heads"]}
    if "kv_latent_total" not in row:
        cls = TiedSpec if row["variant"].startswith("gta") else GroupedSpec
        return cls(**heads, num_key_value_heads=row["kv_heads"], head_dim=head_dim)
    biases = ("query_bias", "latent_bias", "rope_key_bias", "value_bias", "output_bias")
    return LatentSpec(
        **heads,
        num_key_value_heads=row["heads"],
        kv_lora_rank=row["kv_latent_total"],
        latent_heads=row["latent_heads"],
        q_lora_rank=row["q_latent"],
        q_latent_heads=row["latent_heads"] if row["variant"].startswith("glaq") else 1,
        qk_rope_head_dim=row["rope_dim"],
        qk_nope_head_dim=head_dim,
        v_head_dim=head_dim,
        latent_norm=biases_and_norm,
        **dict.fromkeys(biases, biases_and_norm),
    )


def total_millions(spec: AttentionSpec, *, vocab: int, layers: int, ffn: int) -> float:
    """Tied embeddings, attention, SwiGLU, two norms per layer and a final one."""
    hidden = spec.hidden_size
    return (vocab * hidden + layers * (spec.parameters() + 3 * hidden * ffn + 2 * hidden) + hidden) / 1e6


@pytest.mark.parametrize("row", MATCHED["rows"], ids=lambda row: f"{row['size']}-{row['variant']}")
def test_matched_models(row):
    spec = attention(row, hidden=row["hidden"], head_dim=row["head_dim"], biases_and_norm=True)
    total = total_millions(spec, vocab=MATCHED["vocab"], layers=row["layers"], ffn=row["ffn"])
    assert round(total, 2) == row["params_millions"]


@pytest.mark.parametrize("row", DOUBLE["rows"], ids=lambda row: f"{row['variant']}-{row['heads']}")
def test_double_heads_models(row):
    spec = attention(row, hidden=DOUBLE["hidden"], head_dim=DOUBLE["head_dim"], biases_and_norm=False)
    total = total_millions(spec, vocab=DOUBLE["vocab"], layers=DOUBLE["layers"], ffn=row["ffn"])
    low, high = DOUBLE["params_millions_range"]
    assert low <= round(total, 1) <= high
