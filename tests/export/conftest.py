"""Tiny conversions to export."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvfold

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def save_model(tmp_path, tokenizer, randomise) -> Callable[..., Path]:
    def save(kind: str = "llama", **changes) -> Path:
        folder = tmp_path / "original"
        config = AutoConfig.for_model(kind, **SIZES | changes)
        randomise(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def text(tmp_path) -> str:
    letters = torch.randint(26, (600,), generator=torch.Generator().manual_seed(3)).tolist()
    path = tmp_path / "text.txt"
    path.write_text(" ".join(chr(97 + letter) for letter in letters), "utf-8")
    return str(path)


@pytest.fixture
def convert(save_model, text, tmp_path) -> Callable[..., Path]:
    """A conversion within half of the cache that can be exported, unless options say otherwise."""

    def made(options=None, **changes) -> Path:
        chosen = {"cache_ratio": 0.5, "target": "deepseek", "one_shot": True} | (options or {})
        calibration = {"calibration": text, "calibration_tokens": 64, "calibration_window": 16}
        kvfold.convert(save_model(**changes), tmp_path / "converted", **calibration | chosen)
        return tmp_path / "converted"

    return made
