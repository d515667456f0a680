"""Exports to DeepSeek's attention: the same logits in stock transformers, and refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.cli import main as cli
from kvfold.convert import ConvertOptions, probe_ids
from kvfold.errors import KvfoldError
from kvfold.export import RUNTIMES, export
from kvfold.export.approximate import LENGTH, constant_direction, fold_bias, fold_biases
from kvfold.export.layer import NORM_ERROR, neutral_norm
from kvfold.lab import pretrain
from kvfold.progress import silent
from kvfold.report.tables import show_export
from kvfold.train import heal

IDS = torch.randint(3, 27, (2, 20), generator=torch.Generator().manual_seed(5))


def in_stock_transformers(folder: Path, place: Path) -> dict:
    torch.save(IDS, place / "ids.pt")
    script = Path(__file__).with_name("load_stock.py")
    command = [sys.executable, "-P", str(script), str(folder), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return torch.load(place / "o.pt")


def check_same(converted: Path, exported: Path, place: Path) -> dict:
    ours, _ = kvfold.load_model(converted, dtype=torch.float32)
    stock = in_stock_transformers(exported, place)
    with torch.no_grad():
        torch.testing.assert_close(stock["logits"], ours(IDS).logits, rtol=0, atol=1e-4)
        greedy = ours.generate(IDS, max_new_tokens=20, do_sample=False)
    assert torch.equal(stock["greedy"], greedy)
    assert stock["class"] == "DeepseekV3ForCausalLM"
    return stock


@pytest.mark.parametrize("rope", ["assigned", "stride", "fastest"])
def test_stock_transformers_computes_the_same_and_caches_the_latent(rope, convert, tmp_path):
    converted = convert({"rope": rope}, tie_word_embeddings=rope == "stride")
    result = export(converted, tmp_path / "out")
    stock = check_same(converted, tmp_path / "out", tmp_path)
    assert stock["elements"] == result.cached_elements == result.source_elements
    assert result.original_elements == 2 * result.cached_elements
    assert not result.padded
    assert not list(tmp_path.glob(".out*"))


def test_values_biases_come_out_in_the_output(convert, tmp_path):
    converted = convert(attention_bias=False)
    shape = json.loads((converted / "config.json").read_text())["attention"][0]
    assert not shape["value_bias"]
    model, tokenizer = kvfold.load_model(converted)
    config = model.config
    for spec in config.attention:
        spec |= {"value_bias": True, "rope_key_bias": True, "latent_bias": True, "output_bias": True}
    biased = kvfold.KvfoldForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    state = model.state_dict()
    for name, tensor in biased.state_dict().items():
        if name not in state:
            state[name] = torch.randn(tensor.shape, generator=generator)
    biased.load_state_dict(state)
    biased.save_pretrained(tmp_path / "biased")
    tokenizer.save_pretrained(tmp_path / "biased")
    export(tmp_path / "biased", tmp_path / "out")
    check_same(tmp_path / "biased", tmp_path / "out", tmp_path)


def test_padding_and_another_eps_change_nothing(convert, tmp_path, capsys):
    converted = convert(head_dim=64, tie_word_embeddings=True, rms_norm_eps=1e-5)
    result = export(converted, tmp_path / "out", runtime="vllm")
    assert (result.cached_elements, result.padded) == (576, True)
    show_export(result.to_dict())
    assert "NOTHING GAINED" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    config["latent_eps_of_test"] = config["rms_norm_eps"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    check_same(converted, tmp_path / "out", tmp_path)


def test_a_model_that_was_trained_with_latents_keeps_its_norms(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 264}
    pretrain(
        tmp_path / "run",
        attention="mla",
        q_lora_rank=16,
        intermediate_size=48,
        data=text,
        tokenizer="bytes",
        steps=3,
        batch=2,
        sequence_length=64,
        **shape,
    )
    export(tmp_path / "run" / "model", tmp_path / "out")
    check_same(tmp_path / "run" / "model", tmp_path / "out", tmp_path)


def test_a_healed_model_is_exported_like_any(convert, text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    heal(convert(), tmp_path / "run", data=text, steps=3, batch=2, sequence_length=16)
    result = export(tmp_path / "run" / "model", tmp_path / "out")
    assert result.original_elements == 2 * result.cached_elements
    check_same(tmp_path / "run" / "model", tmp_path / "out", tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_does_nothing_whatever_comes(dtype):
    generator = torch.Generator().manual_seed(2)
    latent, gain = torch.randn(6, 16, generator=generator, dtype=torch.float64), torch.rand(16).double()
    small, _, weight, rest = neutral_norm(latent, None, gain, 1e-6)
    assert torch.equal(weight.to(dtype).double(), weight)
    hidden = torch.randn(1000, 16, generator=generator, dtype=torch.float64)
    hidden = hidden / hidden.pow(2).mean(1, keepdim=True).sqrt() * gain
    expected, scaled = hidden @ latent.T, hidden @ small.T
    normed = weight * scaled / (scaled.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * rest
    assert ((normed - expected).abs() / expected.abs()).max() < NORM_ERROR


UNCHECKED = {"target": None, "rope": "assigned"}
"""A conversion that does not know what it is for."""
REFUSALS = {
    "rope": ({"target": None, "rope": "mixed"}, {}, "convert with --target deepseek"),
    "layout": (
        {"target": None, "layout": "per_head", "cache_ratio": None, "qk_rope_head_dim": 4, "kv_lora_rank": 8},
        {},
        "layer 0 has 2 rotary heads, which transformers cannot express.",
    ),
    "bias": (
        {},
        {"kind": "qwen2"},
        "biases of queries, which transformers cannot express; --approximate folds",
    ),
    "window": (UNCHECKED, {"kind": "mistral", "sliding_window": 8}, "the model has sliding windows"),
    "scaled": (
        UNCHECKED,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        "the model's rotary type is 'linear'",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_expressed_is_refused(name, convert, tmp_path, one_line):
    options, changes, expected = REFUSALS[name]
    converted = convert(options, **changes)
    with pytest.raises(KvfoldError) as error:
        export(converted, tmp_path / "out")
    assert expected in one_line(error)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("runtime", ["llamacpp", "vllm", "sglang"])
def test_norms_that_a_runtime_computes_with_another_eps_are_refused(runtime, convert, tmp_path, one_line):
    model, tokenizer = kvfold.load_model(convert(rms_norm_eps=1e-5))
    for spec in model.config.attention:
        spec["latent_norm"] = True
    normed = kvfold.KvfoldForCausalLM(model.config)
    normed.save_pretrained(tmp_path / "normed")
    tokenizer.save_pretrained(tmp_path / "normed")
    out = tmp_path / ("out.gguf" if runtime == "llamacpp" else "out")
    with pytest.raises(KvfoldError) as error:
        export(tmp_path / "normed", out, runtime=runtime)
    assert "has norms of latents with eps 1e-06 and not 1e-05" in one_line(error)


@pytest.mark.parametrize("runtime", ["transformers", "sglang"])
def test_biases_are_folded_into_the_weights_if_asked(runtime, convert, tmp_path, capsys):
    """The export is the model with its biases folded, and the loss that is told is that of it."""
    converted = convert(kind="qwen2", rms_norm_eps=1e-6)
    result = export(converted, tmp_path / "out", runtime=runtime, approximate=True)
    assert result.losses is not None
    fold_biases(converted, tmp_path / "folded", RUNTIMES[runtime], silent)
    check_same(tmp_path / "folded", tmp_path / "out", tmp_path)
    folded, tokenizer = kvfold.load_model(tmp_path / "folded")
    probes = probe_ids(tokenizer, LENGTH)
    with torch.no_grad():
        assert float(folded(probes, labels=probes).loss) == pytest.approx(result.losses["approximate"], abs=1e-4)
    assert result.original_elements == 2 * result.cached_elements
    show_export(result.to_dict())
    assert "approximated:" in capsys.readouterr().out


def test_a_bias_is_exact_on_inputs_with_a_constant_direction():
    generator = torch.Generator().manual_seed(1)
    linear, x = torch.nn.Linear(8, 5), torch.randn(400, 8, generator=generator)
    x[:, 3] = 7.0
    expected = linear(x)
    fold_bias(linear, constant_direction(x))
    assert linear.bias is None
    torch.testing.assert_close(linear(x), expected, rtol=0, atol=0.01)


def test_only_conversions_are_approximated(save_tiny, tmp_path, one_line):
    with pytest.raises(KvfoldError) as error:
        export(save_tiny("original"), tmp_path / "out", approximate=True)
    assert "is not converted" in one_line(error)
    assert not (tmp_path / "out").exists()


def test_fp16_is_refused_where_the_norm_must_do_nothing(convert, tmp_path, one_line):
    with pytest.raises(KvfoldError) as error:
        export(convert({"dtype": "float16"}), tmp_path / "out")
    assert "is in float16" in one_line(error)
    assert not (tmp_path / "out").exists()


def test_frequencies_that_no_base_has_in_fp32_are_refused(convert, tmp_path, one_line):
    with pytest.raises(KvfoldError) as error:
        export(convert(), tmp_path / "out", runtime="vllm")
    assert "too large for fp32" in one_line(error)


def test_originals_and_unknown_runtimes_are_refused(save_tiny, tmp_path, one_line):
    original = save_tiny("original")
    for changes, expected in (({}, "is not converted"), ({"runtime": "vlm"}, "unknown runtime 'vlm'")):
        with pytest.raises(KvfoldError) as error:
            export(original, tmp_path / "out", **changes)
        assert expected in one_line(error)


def test_a_conversion_for_deepseek_refuses_what_could_not_be_exported(convert, tmp_path, one_line):
    for name in ("window", "scaled"):
        _, changes, expected = REFUSALS[name]
        with pytest.raises(KvfoldError) as error:
            convert(**changes)
        assert expected in one_line(error)
    assert not (tmp_path / "converted").exists()


def test_an_approximate_export_never_replaces_its_model(convert, tmp_path, one_line):
    converted = convert()
    for out in (converted, converted.parent):
        with pytest.raises(KvfoldError) as error:
            export(converted, out, approximate=True, overwrite=True)
        assert one_line(error)
    assert kvfold.load_model(converted)


TARGETS = {
    "name": ({"target": "deepsek"}, "unknown target 'deepsek'. Did you mean 'deepseek'?"),
    "layout": ({"layout": "per_head"}, "has the layout shared, not per_head"),
    "rope": ({"rope": "mixed"}, "cannot express the rope strategy 'mixed': take one of assigned, stride, fastest."),
    "lossless": ({"lossless": True, "cache_ratio": None}, "cannot express the rope strategy 'full'"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_refuses_what_it_cannot_express(name, one_line):
    changes, expected = TARGETS[name]
    with pytest.raises(KvfoldError) as error:
        ConvertOptions.from_dict({"cache_ratio": 0.5, "target": "deepseek"} | changes)
    assert expected in one_line(error)


def test_a_damaged_account_of_the_conversion_is_told(convert, tmp_path, one_line):
    converted = convert()
    (converted / "kvfold.json").write_text("{}")
    with pytest.raises(KvfoldError) as error:
        export(converted, tmp_path / "out")
    assert "kvfold.json is damaged" in one_line(error)


def test_the_command(convert, tmp_path, capsys):
    converted, out = convert(), tmp_path / "out"
    assert cli.main(["export", str(converted), str(out), "--format", "deepseek"]) == 0
    printed = capsys.readouterr().out
    assert "cached elements" in printed and "50.00 % of" in printed and "NOTHING GAINED" not in printed
    assert cli.main(["export", str(converted), str(out)]) == 2
    assert "exists" in capsys.readouterr().err
