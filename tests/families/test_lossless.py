"""Every family through a whole conversion: lossless settings give the original's logits, a budget its cache."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from kvfold import KvfoldForCausalLM, convert
from kvfold.convert.rotary import LAYOUTS
from kvfold.evaluate import measure_cache


def relative_difference(converted, original, **inputs) -> float:
    with torch.no_grad():
        expected, logits = (model(**inputs).logits for model in (original, converted))
    seen = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    return float((logits[seen] - expected[seen]).abs().max() / expected[seen].abs().max())


def load(folder) -> KvfoldForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert isinstance(model, KvfoldForCausalLM)
    return model


@pytest.mark.parametrize("layout", ["shared", "per_head"])
def test_lossless_settings_give_the_original(original, ids, tmp_path, layout):
    model, folder = original
    convert(folder, tmp_path / "out", layout=layout, lossless=True)
    converted = load(tmp_path / "out")
    assert relative_difference(converted, model, input_ids=ids) < 1e-4
    padded = torch.ones_like(ids)
    padded[1, :9] = 0
    assert relative_difference(converted, model, input_ids=ids * padded, attention_mask=padded) < 1e-4
    with torch.no_grad():
        cache, steps = DynamicCache(config=converted.config), []
        for part in ids.split([20, 1, 1, 1, 1], dim=1):
            steps.append(converted(input_ids=part, past_key_values=cache).logits)
        expected = model(input_ids=ids).logits
    assert (torch.cat(steps, dim=1) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("cache_ratio", [0.5, 0.85])
@pytest.mark.parametrize("layout", ["shared", "per_head"])
def test_a_budget_gives_its_cache(original, tmp_path, text, layout, cache_ratio):
    _, folder = original
    done = convert(
        folder,
        tmp_path / "out",
        layout=layout,
        cache_ratio=cache_ratio,
        calibration=[text],
        calibration_tokens=64,
        calibration_window=32,
    )
    converted = load(tmp_path / "out")
    size = measure_cache(converted, tokens=8)
    assert size.elements_per_layer == tuple(layer.target.cached_elements() for layer in done.plan.layers)
    assert size.elements_per_token == done.plan.elements_after
    assert done.plan.kept <= cache_ratio
    errors = done.stage_errors["low rank"]
    assert len(errors) == 2
    assert all(0 < error < 1 for error in errors)


# Of the models that differ in how queries and keys are made and seen.
EVERYTHING_KEPT = ["llama", "llama_biases", "llama_yarn_biases", "mistral_window"]


@pytest.mark.parametrize("original", EVERYTHING_KEPT, indirect=True)
@pytest.mark.parametrize(
    ("layout", "rope"), [(layout, rope) for layout in LAYOUTS for rope in LAYOUTS[layout].strategies]
)
def test_every_rotary_component_and_full_rank_give_the_original(original, ids, tmp_path, text, layout, rope):
    """Whatever the strategy, calibrated and with the refit on top."""
    model, folder = original
    convert(
        folder,
        tmp_path / "out",
        layout=layout,
        rope=rope,
        qk_rope_head_dim=16 if layout == "shared" else 8,
        kv_lora_rank=16,
        calibration=[text],
        calibration_tokens=96,
        calibration_window=24,
    )
    assert relative_difference(load(tmp_path / "out"), model, input_ids=ids) < 1e-4


STRATEGIES = {
    "2-norm": {"layout": "per_head", "rope": "2-norm", "factorize": "svd_joint"},
    "mixed": {"layout": "shared", "rope": "mixed", "factorize": "svd_joint"},
    "svd_whitened": {"layout": "per_head", "rope": "uniform", "factorize": "svd_whitened"},
    "shared whitened": {"layout": "shared", "rope": "mixed", "factorize": "svd_whitened"},
    "high": {"layout": "per_head", "rope": "high", "factorize": "svd_joint", "calibration_tokens": 0},
    "low": {"layout": "per_head", "rope": "low", "factorize": "svd_split", "calibration_tokens": 0},
    "weights only": {"layout": "shared", "rope": "mixed", "factorize": "svd_joint", "calibration_tokens": 0},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_error_falls_with_rank(llama, ids, tmp_path, text, strategy):
    """In one shot: a refit to so little random text moves other text by as much as a few ranks do."""
    model, folder = llama
    calibration = {"calibration": [text], "calibration_tokens": 256, "calibration_window": 32, "one_shot": True}
    errors, of_attention = [], []
    for rank in (2, 8, 14, 16 if STRATEGIES[strategy]["layout"] == "shared" else 24):
        out = tmp_path / f"rank{rank}"
        options = calibration | STRATEGIES[strategy]
        done = convert(folder, out, qk_rope_head_dim=4, kv_lora_rank=rank, **options)
        of_attention.append(done.stage_errors.get("low rank"))
        with torch.no_grad():
            expected, logits = (m(input_ids=ids).logits for m in (model, load(out)))
        errors.append(float((logits - expected).norm() / expected.norm()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[-1] < 1.01 * min(errors)
    for layer in zip(*filter(None, of_attention), strict=True):
        assert sorted(layer, reverse=True) == list(layer)


def test_error_falls_with_rotary_dims(llama, ids, tmp_path, text):
    model, folder = llama
    errors = []
    for dims in (2, 4, 6):
        out = tmp_path / f"dims{dims}"
        options = {"layout": "per_head", "rope": "2-norm", "factorize": "svd_whitened", "kv_lora_rank": 32 - 2 * dims}
        calibration = {"calibration": [text], "calibration_tokens": 256, "calibration_window": 32}
        convert(folder, out, qk_rope_head_dim=dims, **options, **calibration)
        with torch.no_grad():
            expected, logits = (m(input_ids=ids).logits for m in (model, load(out)))
        errors.append(float((logits - expected).norm() / expected.norm()))
    assert errors[-1] < errors[0]


def test_written_dtype(llama, tmp_path):
    _, folder = llama
    convert(folder, tmp_path / "out", lossless=True, dtype="bfloat16")
    converted = load(tmp_path / "out")
    assert {parameter.dtype for parameter in converted.parameters()} == {torch.bfloat16}
    assert converted.attention_modules()[0].rotary_index.dtype == torch.int64
