"""Tiny models to heal, and text for them."""

from pathlib import Path

import pytest
import torch

import kvfold


@pytest.fixture(autouse=True)
def _tokens_are_kept_here(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def original(save_tiny) -> Path:
    """A Llama with two KV heads."""
    return save_tiny("original")


@pytest.fixture
def text(tmp_path) -> str:
    """600 random letters, which are tokens; one in four is an e, which can be learnt."""
    return write_letters(tmp_path / "text.txt", seed=3)


@pytest.fixture
def other_text(tmp_path) -> str:
    """Another text of this kind."""
    return write_letters(tmp_path / "other.txt", seed=4)


def write_letters(path: Path, seed: int) -> str:
    letters = torch.randint(104, (600,), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text(" ".join("e" if letter >= 26 else chr(97 + letter) for letter in letters), "utf-8")
    return str(path)


@pytest.fixture
def converted(original, text, tmp_path) -> Path:
    folder = tmp_path / "converted"
    kvfold.convert(original, folder, cache_ratio=0.5, calibration=text, calibration_tokens=64, calibration_window=16)
    return folder
