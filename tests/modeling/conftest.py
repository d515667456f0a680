"""A model in memory and on disk: one layer with a rotary head per KV head, one with two latent heads."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from kvfold import KvfoldConfig, KvfoldForCausalLM
from kvfold.attention import LatentSpec

SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SPECS = (
    LatentSpec(**SHAPE, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, rotary_heads=2),
    LatentSpec(
        **SHAPE, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, latent_heads=2, latent_norm=True
    ),
)


@pytest.fixture
def config() -> KvfoldConfig:
    base = LlamaConfig(
        **SHAPE,
        vocab_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    return KvfoldConfig(text_config=base.to_dict(), attention=[spec.to_dict() for spec in SPECS])


@pytest.fixture
def model(config, randomise) -> KvfoldForCausalLM:
    return randomise(KvfoldForCausalLM(config))


@pytest.fixture
def folder(model, tokenizer, tmp_path) -> Path:
    path = tmp_path / "model"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(5))
