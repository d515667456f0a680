"""A tiny checkpoint of every family and of every feature that its record names, with random biases."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# A new family is one line here; a feature of it that its record names is another.
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_head_dim": ("llama", {"head_dim": 16}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "llama_yarn_biases": ("llama", {"rope_parameters": YARN, "attention_bias": True}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", {"head_dim": 8, "sliding_window": None}),
    "mistral_window": ("mistral", {"head_dim": 8, "sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2_windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.fixture
def save_model(save_tiny: Callable[..., Path]) -> Callable[..., tuple[torch.nn.Module, Path]]:
    """Writes a random model of a type with changes to its config; returns the model and its folder."""

    def save(model_type: str, **changes) -> tuple[torch.nn.Module, Path]:
        folder = save_tiny("original", model_type, **changes)
        return AutoModelForCausalLM.from_pretrained(folder).eval(), folder

    return save


@pytest.fixture
def covered_families() -> set[str]:
    return {model_type for model_type, _ in MODELS.values()}


@pytest.fixture(params=MODELS)
def original(request, save_model) -> tuple[torch.nn.Module, Path]:
    model_type, changes = MODELS[request.param]
    return save_model(model_type, **changes)


@pytest.fixture
def llama(save_model) -> tuple[torch.nn.Module, Path]:
    return save_model("llama", attention_bias=True)


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A calibration text of 600 tokens."""
    letters = torch.randint(26, (600,), generator=torch.Generator().manual_seed(3))
    path = tmp_path / "calibration.txt"
    path.write_text(" ".join(chr(97 + int(letter)) for letter in letters), "utf-8")
    return str(path)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 32, (2, 24), generator=torch.Generator().manual_seed(4))
