"""Tiny conversions to export."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvfold


@pytest.fixture
def text(tmp_path) -> str:
    letters = torch.randint(26, (600,), generator=torch.Generator().manual_seed(3)).tolist()
    path = tmp_path / "text.txt"
    path.write_text(" ".join(chr(97 + letter) for letter in letters), "utf-8")
    return str(path)


@pytest.fixture
def convert(save_tiny, text, tmp_path) -> Callable[..., Path]:
    """A conversion within half of the cache that can be exported, unless options say otherwise."""

    def made(options=None, **changes) -> Path:
        chosen = {"cache_ratio": 0.5, "target": "deepseek", "one_shot": True} | (options or {})
        calibration = {"calibration": text, "calibration_tokens": 64, "calibration_window": 16}
        kvfold.convert(save_tiny("original", **changes), tmp_path / "converted", **calibration | chosen)
        return tmp_path / "converted"

    return made
