"""Exports in vLLM on the CPU, which has an environment of its own: `make test-vllm`.

Four of the ways in which vLLM computes something else and says nothing; each must be seen.
"""

import json
import os
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

import kvfold
from kvfold.doctor import doctor, probe
from kvfold.export import RUNTIMES, export, model

from .conftest import MODEL, change_json, verdicts

PYTHON = os.environ.get("KVFOLD_VLLM_PYTHON", "")

pytestmark = pytest.mark.skipif(not PYTHON, reason="vLLM is tested by make test-vllm")

SIZES = MODEL | {"head_dim": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.fixture
def _advised_only(monkeypatch) -> None:
    """One start of vLLM less."""
    monkeypatch.setitem(probe.PROBES, "vllm", tuple(way for way in probe.PROBES["vllm"] if way.advised))


def test_the_advised_settings_are_right_and_the_default_rotary_operator_is_seen(convert, text, tmp_path):
    result = export(convert({"rope": "fastest"}, **SIZES), tmp_path / "out", runtime="vllm")
    advised, default = doctor(tmp_path / "out", text=text, python=PYTHON).checks
    assert advised.passed, advised
    assert advised.cached_elements == pytest.approx(result.cached_elements, rel=0.01)
    assert default.verdict == "other log-probabilities"


@pytest.mark.usefixtures("_advised_only")
def test_a_tied_head_is_seen(convert, text, tmp_path):
    """vLLM's DeepSeek has no ties: its head stays as it was drawn."""
    export(convert({"rope": "fastest"}, **SIZES, tie_word_embeddings=True), tmp_path / "out", runtime="vllm")
    assert verdicts(doctor(tmp_path / "out", text=text, python=PYTHON)) == ["the same"]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    change_json(tmp_path / "out" / "config.json", tie_word_embeddings=True)
    assert verdicts(doctor(tmp_path / "out", text=text, python=PYTHON)) == ["other log-probabilities"]


@pytest.mark.usefixtures("_advised_only")
def test_biases_are_seen(convert, text, tmp_path, monkeypatch):
    """The check that keeps them from being exported is switched off."""
    network, tokenizer = kvfold.load_model(convert({"rope": "fastest"}, **SIZES))
    for spec in network.config.attention:
        spec |= {"value_bias": True, "output_bias": True}
    biased = kvfold.KvfoldForCausalLM(network.config)
    state = network.state_dict()
    biased.load_state_dict({name: state.get(name, value + 1) for name, value in biased.state_dict().items()})
    biased.save_pretrained(tmp_path / "biased")
    tokenizer.save_pretrained(tmp_path / "biased")
    monkeypatch.setitem(RUNTIMES, "vllm", replace(RUNTIMES["vllm"], biases=True))
    export(tmp_path / "biased", tmp_path / "out", runtime="vllm")
    assert verdicts(doctor(tmp_path / "out", text=text, python=PYTHON)) == ["other log-probabilities"]


@pytest.mark.usefixtures("_advised_only")
def test_llama3_frequencies_are_seen(convert, text, tmp_path, monkeypatch):
    """The check that keeps them from being exported is switched off."""
    monkeypatch.setattr(model, "check_deepseek", lambda *_: None)
    export(
        convert({"target": None, "rope": "fastest"}, **SIZES, rope_parameters=LLAMA3), tmp_path / "out", runtime="vllm"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    theta = config["rope_parameters"]["rope_theta"]
    change_json(tmp_path / "out" / "config.json", rope_parameters=LLAMA3 | {"rope_theta": theta})
    assert verdicts(doctor(tmp_path / "out", text=text, python=PYTHON)) == ["other log-probabilities"]
