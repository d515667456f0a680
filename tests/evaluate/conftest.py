"""Tiny models with random weights: grouped attention, one with a sliding window, and one that caches latents."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    """2 KV heads of 16 dims: 64 elements per token and layer."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)).eval()


@pytest.fixture(scope="session")
def mistral() -> MistralForCausalLM:
    """The same with a window of 16 tokens."""
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=16)
    return MistralForCausalLM(config).eval()


@pytest.fixture(scope="session")
def deepseek() -> DeepseekV3ForCausalLM:
    """A latent of 32 and one rotary key head of 8: 40 elements per token and layer."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=2,
        num_mtp_layers=0,
    )
    return DeepseekV3ForCausalLM(config).eval()


@pytest.fixture
def token_ids() -> torch.Tensor:
    return torch.randint(128, (300,), generator=torch.Generator().manual_seed(1))
