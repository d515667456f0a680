"""What runtimes would cache is known before an export."""

import json

import pytest

from kvfold.cli import main as cli
from kvfold.export import RUNTIMES, runtime_costs

CASES = {
    "small model": ((88, 32, 384), "vLLM", 576, "nothing gained: the original has 384"),
    "padded": ((320, 64, 2048), "vLLM", 576, "--kv-lora-rank 512 --qk-rope-head-dim 64 is better at no cost"),
    "exact": ((512, 64, 2048), "vLLM", 576, ""),
    "too wide": ((576, 64, 2048), "vLLM", None, "--kv-lora-rank 512 --qk-rope-head-dim 64 fits"),
    "any width": ((88, 32, 384), "transformers", 120, ""),
    "slow": ((88, 32, 384), "llama.cpp", 120, "multiples of 64"),
    "slow latent": ((96, 32, 384), "llama.cpp", 128, "multiples of 64"),
    "fast": ((64, 64, 384), "llama.cpp", 128, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_costs_and_advice(name):
    widths, runtime, elements, advice = CASES[name]
    costs = {cost.runtime: cost for cost in runtime_costs(*widths)}
    assert len(costs) == len(RUNTIMES)
    cost = costs[runtime]
    assert cost.elements == elements and cost.kept == (None if elements is None else elements / widths[2])
    assert advice in cost.advice and bool(advice) == bool(cost.advice)


def test_a_conversion_for_deepseek_tells_them(save_tiny, tmp_path, capsys):
    command = ["convert", str(save_tiny("original")), str(tmp_path / "out"), "--cache-ratio", "0.5"]
    flags = ["--calibration-tokens", "0", "--rope", "fastest", "--one-shot", "--target", "deepseek"]
    assert cli.main([*command, *flags, "--dry-run"]) == 0
    assert "nothing gained: the original has" in capsys.readouterr().out
    assert cli.main([*command, *flags, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [cost["runtime"] for cost in result["runtimes"]] == ["transformers", "llama.cpp", "vLLM", "SGLang"]
    assert cli.main([*command, "--overwrite", "--calibration-tokens", "0", "--dry-run", "--json"]) == 0
    assert "runtimes" not in json.loads(capsys.readouterr().out)
