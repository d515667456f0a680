"""Tiny models on disk, each changed by a test into something broken."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_config(**changes) -> LlamaConfig:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaConfig(**(sizes | changes))


def tiny_model(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**changes))


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_model()


@pytest.fixture
def folder(tmp_path: Path, model: LlamaForCausalLM) -> Path:
    """A model in one safetensors file."""
    path = tmp_path / "model"
    model.save_pretrained(path)
    return path


@pytest.fixture
def sharded(tmp_path: Path, model: LlamaForCausalLM) -> Path:
    """A model in several safetensors files with an index."""
    path = tmp_path / "sharded"
    model.save_pretrained(path, max_shard_size="6KB")
    return path
