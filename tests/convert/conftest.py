"""Tiny layers with weights that show every mistake, and what calibration text would tell about them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold.attention import GroupedSpec
from kvfold.convert.attention_moments import AttentionMomentsAccumulator
from kvfold.convert.statistics import LayerStatistics, StatisticsAccumulator
from kvfold.convert.weights import LayerWeights


@dataclass(frozen=True, kw_only=True)
class Layer(LayerWeights):
    """A layer with the angle per position of every rotary pair, which its tables are made of."""

    frequency: Tensor


def _layer(*, head_dim=8, heads=4, kv_heads=2, width=12, biases=True, rope_gain=1.0) -> Layer:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    names = ("query_bias", "key_bias", "value_bias", "output_bias")
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim), (width,))
    return Layer(
        spec=GroupedSpec(
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            **dict.fromkeys(names, biases),
        ),
        query=normal(heads, head_dim, width) / 4,
        key=normal(kv_heads, head_dim, width),
        value=normal(kv_heads, head_dim, width),
        output=normal(width, heads * head_dim),
        frequency=0.5 ** torch.arange(head_dim // 2, dtype=torch.float64),
        rope_gain=rope_gain,
        **{name: normal(*shape) if biases else None for name, shape in zip(names, shapes, strict=True)},
    )


def _tables(weights: Layer, length: int) -> tuple[Tensor, Tensor]:
    """`cos, sin` as the base model makes them: both halves alike, the gain of a rope scaling included."""
    angle = torch.arange(length, dtype=torch.float64)[:, None] * weights.frequency
    cos, sin = (weights.rope_gain**0.5 * torch.cat((table, table), dim=1) for table in (angle.cos(), angle.sin()))
    return cos, sin


def _observe(weights: Layer, hidden: Tensor, mask: Tensor | None = None) -> LayerStatistics:
    moments = StatisticsAccumulator(weights)
    attention = AttentionMomentsAccumulator(weights, *_tables(weights, hidden.shape[1]), mask)
    for window in hidden:
        moments.update(window[None])
        attention.update(window[None])
    return replace(moments.finish(), attention=attention.finish())


@pytest.fixture
def make_layer() -> Callable[..., Layer]:
    return _layer


@pytest.fixture
def tables() -> Callable[..., tuple[Tensor, Tensor]]:
    return _tables


@pytest.fixture
def observe() -> Callable[..., LayerStatistics]:
    """The statistics of a layer on attention inputs (windows, tokens, width), those of attention included."""
    return _observe


@pytest.fixture
def hidden() -> Tensor:
    """Attention inputs of two windows of 50 tokens, whose mean is not zero."""
    return torch.randn(2, 50, 12, generator=torch.Generator().manual_seed(1)) + 0.5


@pytest.fixture
def save_model(tmp_path, tokenizer, randomise) -> Callable[..., Path]:
    """Writes a random model of three layers, a Llama if nothing else is asked for, and returns its folder."""
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    def save(model_type="llama", **changes) -> Path:
        folder = tmp_path / "original"
        config = AutoConfig.for_model(model_type, **(sizes | changes))
        randomise(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def text(tmp_path) -> str:
    """A calibration text of 600 random letters, which are tokens."""
    letters = torch.randint(26, (600,), generator=torch.Generator().manual_seed(3))
    path = tmp_path / "calibration.txt"
    path.write_text(" ".join(chr(97 + int(letter)) for letter in letters), "utf-8")
    return str(path)
