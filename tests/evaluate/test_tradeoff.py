"""The prediction of a tiny model's trade-off, as `kvfold plan` shows it."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.convert import convert, run
from kvfold.convert.sampling import sample_from
from kvfold.errors import OptionError
from kvfold.evaluate import tradeoff
from kvfold.evaluate.tradeoff import BASE_RATIO


@pytest.fixture
def folder(tmp_path, tokenizer, randomise):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    randomise(LlamaForCausalLM(config)).save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    return tmp_path / "original"


@pytest.fixture
def calibration(tmp_path):
    letters = torch.randint(26, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    path = tmp_path / "text.txt"
    path.write_text(" ".join(chr(ord("a") + letter) for letter in letters))
    return {"calibration": [str(path)], "calibration_tokens": 256, "calibration_window": 32}


@pytest.fixture
def own_novel(folder, tokenizer, tmp_path, monkeypatch):
    """The text that losses are measured on is the model's own: of another, a random model may know more when folded."""
    ids = sample_from(folder, tokenizer, windows=8, length=32, seed=0, progress=lambda *step: None)
    path = tmp_path / "novel.txt"
    path.write_text(tokenizer.decode(ids.flatten()))
    monkeypatch.setattr(run, "EVALUATION", path)


@pytest.mark.usefixtures("own_novel")
@pytest.mark.parametrize("per_layer", [False, True])
def test_points_of_every_ratio_and_cache(folder, calibration, per_layer):
    stages = []
    found = tradeoff(
        folder,
        ratios=(0.75, 0.5),
        progress=lambda *step: stages.append(step[0]),
        per_layer=per_layer,
        **calibration,
    ).to_dict()
    names = [(point["name"], point["cache"], point["cache_ratio"]) for point in found["points"]]
    assert names == [
        ("original", "int8", None),
        ("original", "int4", None),
        *[("kvfold mixed", cache, ratio) for ratio in (0.75, 0.5) for cache in ("bfloat16", "int8", "int4")],
    ]
    measured = {point["cache"]: point["perplexity"] for point in found["points"][:2]}
    assert measured["int8"] == pytest.approx(found["original"]["perplexity"], rel=0.02)
    predicted = {point["cache_ratio"]: point for point in found["points"] if point["cache"] == "bfloat16"}
    assert predicted[0.75]["predicted_perplexity"] < predicted[0.5]["predicted_perplexity"]
    assert predicted[0.75]["bytes_per_token"] == 0.75 * found["original"]["bytes_per_token"] == 0.75 * 2 * 32 * 2
    assert {"profiling layers", "measuring quantised caches of the original"} == set(stages)


@pytest.mark.usefixtures("own_novel")
def test_the_budget_that_is_tried_is_predicted_as_a_conversion_measures_it(folder, calibration, tmp_path):
    found = tradeoff(folder, ratios=(BASE_RATIO,), progress=lambda *step: None, **calibration)
    (predicted,) = (point for point in found.points if point.cache == "bfloat16")
    done = convert(folder, tmp_path / "out", cache_ratio=BASE_RATIO, one_shot=True, **calibration)
    assert math.log(found.original["perplexity"]) == pytest.approx(done.stage_losses["original"])
    assert math.log(predicted.predicted_perplexity) == pytest.approx(done.stage_losses["low rank"])


def test_what_cannot_be_predicted_is_refused(folder, calibration, one_line):
    with pytest.raises(OptionError) as error:
        tradeoff(folder, ratios=(0.5,), progress=lambda *step: None, rope="stride", **calibration)
    assert "mixed" in one_line(error)


def test_per_layer_ranks_keep_the_budget(folder, calibration, tmp_path):
    done = convert(folder, tmp_path / "out", cache_ratio=0.5, per_layer=True, one_shot=True, **calibration)
    assert done.plan.elements_after <= 0.5 * done.plan.elements_before
    assert list(done.stage_errors) == ["rotary", "low rank"]
