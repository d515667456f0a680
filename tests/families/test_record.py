"""What is refused, and why; what the records say of a config."""

import re

import pytest
from transformers import AutoConfig

from kvfold import convert, inspect_model
from kvfold.errors import UnsupportedModelError
from kvfold.families import FAMILIES, check_tensors, family_of, head_dim
from kvfold.families.record import MISSING_FEATURES


def config(model_type, **changes):
    return AutoConfig.for_model(model_type, **changes)


REFUSED = {
    "gpt2": (config("gpt2"), "no rotary positions (its positions are learned embeddings)"),
    "t5": (config("t5"), "it is an encoder-decoder"),
    "qwen3": (config("qwen3"), "QK-norm"),
    "falcon": (config("falcon"), "a fused query/key/value projection"),
    "deepseek_v3": (config("deepseek_v3"), "its attention is latent already"),
    "stablelm": (config("stablelm"), "no family record (CONTRIBUTING.md says how to add one)"),
    "bert": (config("bert"), "no rotary positions in its config"),
    "partial rotary": (
        config("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial rotary heads (partial_rotary_factor=0.5)",
    ),
    "no layers": (config("llama", num_hidden_layers=0), "it has 0 layers"),
    "no KV heads": (
        config("llama", num_attention_heads=8, num_key_value_heads=0),
        "0 KV heads do not divide 8 query heads",
    ),
    "head counts": (
        config("llama", num_attention_heads=8, num_key_value_heads=3),
        "3 KV heads do not divide 8 query heads",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_the_feature(name, one_line):
    refused, reason = REFUSED[name]
    message = f"model type '{refused.model_type}' cannot be converted: {reason}. Families: llama, mistral, qwen2."
    with pytest.raises(UnsupportedModelError, match=re.escape(message)) as error:
        family_of(refused)
    one_line(error)


def test_every_family_has_a_tiny_model(covered_families):
    assert covered_families == set(FAMILIES)


def test_no_family_is_also_listed_as_missing():
    assert not set(FAMILIES) & set(MISSING_FEATURES)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3"])
def test_unsupported_checkpoint_is_refused_and_inspected(save_model, tmp_path, model_type):
    small = {"n_embd": 32, "n_head": 4, "n_layer": 2} if model_type == "gpt2" else {}
    _, folder = save_model(model_type, **small)
    with pytest.raises(UnsupportedModelError, match=MISSING_FEATURES[model_type].split(" (")[0]):
        convert(folder, tmp_path / "out", lossless=True)
    assert not (tmp_path / "out").exists()
    inspection = inspect_model(folder)
    assert not inspection.convertible
    assert MISSING_FEATURES[model_type] in inspection.reason


def test_foreign_attention_tensors_are_named():
    name = "model.layers.0.self_attn.q_norm.weight"
    with pytest.raises(UnsupportedModelError, match=f"QK-norm \\({name}\\)"):
        check_tensors(FAMILIES["llama"], ("model.embed_tokens.weight", name))
    with pytest.raises(UnsupportedModelError, match=r"an attention tensor that its family lacks \(.*sinks\)"):
        check_tensors(FAMILIES["llama"], ("model.layers.0.self_attn.sinks",))
    check_tensors(FAMILIES["llama"], ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.q_norm.weight"))


def test_layer_specs_and_windows():
    qwen = config("qwen2", use_sliding_window=True, sliding_window=8, num_hidden_layers=3, max_window_layers=1)
    assert FAMILIES["qwen2"].sliding_windows(qwen) == (None, 8, 8)
    (spec, *_) = FAMILIES["qwen2"].layer_specs(qwen)
    assert (spec.query_bias, spec.key_bias, spec.value_bias, spec.output_bias) == (True, True, True, False)
    mistral = config("mistral", num_hidden_layers=2, sliding_window=None)
    assert FAMILIES["mistral"].sliding_windows(mistral) == (None, None)
    llama = config("llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    assert head_dim(llama) == 32
    assert FAMILIES["llama"].layer_specs(llama)[0].cached_elements() == 2 * 2 * 32
    assert FAMILIES["llama"].prefix(3) == "model.layers.3.self_attn."


def test_inspection_of_original_and_converted(llama, tmp_path):
    model, folder = llama
    before = inspect_model(folder)
    assert before.convertible and before.reason is None
    assert before.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert [layer.attention for layer in before.layers] == ["GQA", "GQA"]
    assert (before.cached_elements_per_token, before.cached_bytes_per_token) == (64, 256)
    convert(folder, tmp_path / "out", layout="per_head", qk_rope_head_dim=2, d_kv=4, rope="high", calibration_tokens=0)
    after = inspect_model(tmp_path / "out")
    assert not after.convertible and "converted or trained so" in after.reason
    assert [layer.attention for layer in after.layers] == ["MLA", "MLA"]
    assert after.cached_elements_per_token == 2 * (2 * 2 + 2 * 4)
    assert after.to_dict()["layers"][1]["cached_elements"] == 12
