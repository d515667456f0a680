"""Text and a tiny model to train from scratch."""

from pathlib import Path
from typing import Any

import pytest
import torch

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 264,
}
TRAIN: dict[str, Any] = {
    "tokenizer": "bytes",
    "steps": 8,
    "batch": 4,
    "sequence_length": 16,
    "save_steps": 3,
    "precision": "float32",
}


@pytest.fixture(autouse=True)
def _tokens_are_kept_here(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_words(path: Path, seed: int) -> str:
    words = ["the", "cell", "wall", "moves", "light", "under", "a", "root"]
    places = torch.randint(len(words), (600,), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text(" ".join(words[place] for place in places), "utf-8")
    return str(path)


@pytest.fixture
def text(tmp_path) -> str:
    return write_words(tmp_path / "text.txt", seed=3)


@pytest.fixture
def other_text(tmp_path) -> str:
    return write_words(tmp_path / "other.txt", seed=4)
