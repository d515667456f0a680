"""`kvfold plan`: what it hands to the library, and what it writes."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfold.cli import main as cli
from kvfold.cli.plan import RATIOS, default_folder

TRADEOFF = {
    "model": "m",
    "text": {"name": "a novel", "windows": 4},
    "original": {"bytes_per_token": 1000, "perplexity": 20.0},
    "points": [
        {
            "name": "mixed",
            "cache": "bfloat16",
            "cache_ratio": 0.5,
            "bytes_per_token": 500,
            "qk_rope_head_dim": 8,
            "kv_lora_rank": 24,
            "predicted_perplexity": 30.0,
            "perplexity": None,
        }
    ],
}


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The calls that reach `tradeoff`; commands run in an empty folder."""
    calls = []

    def tradeoff(model, *, ratios, progress, **method):
        calls.append((model, ratios, method))
        return SimpleNamespace(to_dict=lambda: TRADEOFF)

    monkeypatch.setattr(importlib.import_module("kvfold.evaluate"), "tradeoff", tradeoff)
    monkeypatch.chdir(tmp_path)
    return calls


def test_the_defaults(calls, tmp_path, capsys):
    assert cli.main(["plan", "m"]) == 0
    assert calls == [("m", RATIOS, {})]
    assert {path.name for path in (tmp_path / "m-plan").iterdir()} == {
        "tradeoff.png",
        "tradeoff.svg",
        "tradeoff.json",
    }
    out = capsys.readouterr().out
    assert "Trade-off of m" in out
    assert "30.00 (1.50x)" in out
    assert out.endswith(f"\nfigure: {Path(tmp_path, 'm-plan', 'tradeoff.png').resolve()}\n")


def test_what_is_printed_is_what_is_written(calls, tmp_path, capsys):
    assert cli.main(["plan", "m", "--json", "--out", "here"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("out") == str(Path(tmp_path, "here").resolve())
    assert printed == json.loads((tmp_path / "here" / "tradeoff.json").read_text())
    assert printed["provenance"]["seed"] == 0
    assert {key: printed[key] for key in TRADEOFF} == TRADEOFF


def test_the_method_options_are_those_of_convert(calls):
    flags = "--layout shared --rope assigned --factorize svd_joint --calibration a.txt b.txt --calibration-tokens 0"
    assert cli.main(["plan", "m", "--ratios", "0.25", "0.5", "0.25", *flags.split()]) == 0
    method = {
        "layout": "shared",
        "rope": "assigned",
        "factorize": "svd_joint",
        "calibration": ("a.txt", "b.txt"),
        "calibration_tokens": 0,
    }
    assert calls == [("m", (0.5, 0.25), method)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ratios", "0"], "--ratios must be above 0 and up to 1, not 0"),
        (["--ratios", "0.5", "31.25"], "--ratios must be above 0 and up to 1, not 31.25"),
        (["--ratios", "much"], "--ratios must be a number, not 'much'"),
        (["--cache-ratio", "0.5"], "unexpected argument '--cache-ratio'."),
    ],
)
def test_mistakes_get_one_line(calls, mistake, argv, message):
    assert mistake("plan", "m", *argv).startswith(message)
    assert calls == []


def test_a_folder_with_other_content_is_left_alone(calls, tmp_path, mistake):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert "holds something else (it has no tradeoff.json)" in mistake("plan", "m", "--out", "mine")
    assert calls == []


def test_an_earlier_plan_is_replaced(calls, tmp_path):
    for _ in range(2):
        assert cli.main(["plan", "m"]) == 0
        assert not (tmp_path / "m-plan" / "stale").exists()
        (tmp_path / "m-plan" / "stale").touch()


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("smollm2", "smollm2-plan"),
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M-plan"),
        ("/models/llama-7b/", "llama-7b-plan"),
        ("models/tiny.Q8_0.gguf", "tiny.Q8_0-plan"),
    ],
)
def test_the_default_folder_is_named_after_the_model(model, folder):
    assert default_folder(model) == folder


def test_the_folder_of_a_relative_path(monkeypatch, tmp_path):
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path / "llama")
    assert default_folder(".") == "llama-plan"
