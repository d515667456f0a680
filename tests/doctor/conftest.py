"""Models that every runtime takes, and a text for the doctor."""

import json
from pathlib import Path

import pytest

MODEL = {"vocab_size": 264, "hidden_size": 64, "eos_token_id": 0, "max_position_embeddings": 4096}


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat and looked at a wall, as cats do when there is no mouse. " * 20, "utf-8")
    return str(path)


@pytest.fixture
def tokenizer(byte_level_tokenizer):
    return byte_level_tokenizer


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def verdicts(diagnosis) -> list[str]:
    return [check.verdict for check in diagnosis.checks]
