"""The doctor finds an export right in the runtimes that are here, and wrong where it was made wrong on purpose."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
from safetensors.torch import load_file, save_file

import kvfold
from kvfold.cli import main as cli
from kvfold.doctor import Check, doctor
from kvfold.errors import KvfoldError
from kvfold.export import export, gguf_file, model

from .conftest import MODEL, change_json, verdicts

SIZES = MODEL | {"head_dim": 32}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


@pytest.fixture
def folder(convert, tmp_path) -> Path:
    """An export for transformers."""
    export(convert(**SIZES), tmp_path / "out")
    return tmp_path / "out"


def test_a_folder_is_the_same_in_stock_transformers(folder, text, capsys):
    assert cli.main(["doctor", str(folder), "--text", text, "--json"]) == 0
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert check["verdict"] == "the same"
    assert max(check["prefill"], check["decode"]) < 1e-4
    assert check["cached_elements"] == check["expected_elements"]
    assert check["same_tokens"]


def test_a_file_is_the_same_in_llamacpp_and_caches_the_latent(convert, speak_ascii, text, tmp_path):
    export(speak_ascii(convert(**SIZES)), tmp_path / "out.gguf", runtime="llamacpp")
    exact, default = doctor(tmp_path / "out.gguf", text=text).checks
    assert exact.passed and default.passed, (exact, default)
    assert max(exact.prefill or 1, exact.decode or 1) < 1e-4
    assert exact.cached_elements == pytest.approx(exact.expected_elements, rel=0.01)


def test_linear_scaling_that_llamacpp_computes_with_another_softmax_scale_is_seen(
    convert, speak_ascii, text, tmp_path, monkeypatch
):
    """Its frequencies are right; the check that keeps it from being exported is switched off."""
    add_config = gguf_file._add_config

    def add_scaled_config(writer, *rest) -> None:
        add_config(writer, *rest)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(LINEAR["factor"])

    converted = convert({"target": None, "rope": "assigned"}, **SIZES, rope_parameters=LINEAR)
    monkeypatch.setattr(model, "check_deepseek", lambda *_: None)
    monkeypatch.setattr(gguf_file, "_add_config", add_scaled_config)
    export(speak_ascii(converted), tmp_path / "out.gguf", runtime="llamacpp")
    diagnosis = doctor(tmp_path / "out.gguf", text=text)
    assert verdicts(diagnosis) == ["other log-probabilities"] * 2
    assert not diagnosis.passed


def test_another_eps_of_the_norm_on_the_latent_is_seen(convert, text, tmp_path):
    export(convert(**SIZES, rms_norm_eps=1e-5), tmp_path / "out", runtime="sglang")
    assert verdicts(doctor(tmp_path / "out", runtimes=["transformers"], text=text)) == ["other log-probabilities"]


def another_cache(folder: Path) -> None:
    facts = json.loads((folder / "kvfold-export.json").read_text())
    change_json(folder / "kvfold-export.json", cached_elements=facts["cached_elements"] // 2)


def another_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content))


def another_scale(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: 2 * value if "q_proj" in name else value for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def no_values(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.kv_b_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGE = {
    "another cache": (another_cache, "other cache size"),
    "another tokenizer": (another_tokenizer, "other token ids"),
    "another scale": (another_scale, "other log-probabilities"),
    "missing weights": (no_values, "weights and config do not fit together"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_wrong_with_a_folder_is_said(name, folder, text, capsys):
    damage, expected = DAMAGE[name]
    damage(folder)
    assert cli.main(["doctor", str(folder), "--text", text, "--json"]) == 1
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert expected in check["verdict"]


def test_not_a_number_is_no_pass():
    facts = {"runtime": "x", "settings": "", "advised": True, "tolerance": 1, "expected_elements": 1}
    for rounded in (True, False):
        check = Check(**facts, rounded=rounded, prefill=0.0, decode=0.0, mean=float("nan"))
        assert check.verdict == "other log-probabilities"


def test_where_weights_are_rounded_the_mean_counts():
    facts = {"runtime": "x", "settings": "", "advised": True, "tolerance": 0.2, "expected_elements": 1}
    measured = {"prefill": 0.5, "decode": 0.4, "same_tokens": True, "cached_elements": 1}
    assert Check(**facts, **measured, rounded=True, mean=0.1).passed
    assert not Check(**facts, **measured, rounded=True, mean=0.3).passed
    assert not Check(**facts, **measured, mean=0.1).passed


@pytest.mark.parametrize("kind", ["bf16", "f16", "q8_0"])
def test_rounded_weights_pass_and_damage_in_them_is_seen(kind, convert, speak_ascii, text, tmp_path):
    out = tmp_path / "out.gguf"
    export(speak_ascii(convert(**SIZES)), out, type=kind)
    diagnosis = doctor(out, text=text)
    assert diagnosis.passed, diagnosis.checks
    reader = gguf.GGUFReader(out, "r+")
    for tensor in reader.tensors:
        if tensor.name.endswith("attn_norm.weight"):
            tensor.data[:] *= 2
    del reader
    assert verdicts(doctor(out, text=text)) == ["other log-probabilities"] * 2


def test_log_probabilities_that_are_no_numbers_are_told(convert, speak_ascii, text, tmp_path):
    out = tmp_path / "out.gguf"
    export(speak_ascii(convert(**SIZES)), out)
    reader = gguf.GGUFReader(out, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight").data[:] = float("nan")
    del reader
    assert not any(check.passed for check in doctor(out, text=text).checks)


def test_the_model_is_found_from_any_folder_and_must_be_a_conversion(folder, text, tmp_path, monkeypatch, one_line):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert doctor(folder, text=text).passed
    with pytest.raises(KvfoldError) as error:
        doctor(folder, text=text, model=tmp_path / "original")
    assert "is not converted" in one_line(error)
    change_json(folder / "kvfold-export.json", cached_elements="x")
    with pytest.raises(KvfoldError) as error:
        doctor(folder, text=text)
    assert "tells of itself is damaged" in one_line(error)


def mistakes(folder: Path) -> dict[str, tuple[dict, str]]:
    return {
        "unknown runtime": ({"runtimes": ["vlm"]}, "unknown runtime 'vlm'. Did you mean 'vllm'?"),
        "runtime that is not run": ({"runtimes": ["sglang"]}, "doctor cannot run SGLang; it runs transformers"),
        "missing runtime": ({"runtimes": ["vllm"]}, "vLLM is not installed for"),
        "folder for llama.cpp": ({"runtimes": ["llamacpp"]}, "llama.cpp loads .gguf files, got"),
        "no interpreter": ({"python": "no-python"}, "cannot run 'no-python': No such file or directory"),
        "another program": ({"python": shutil.which("false")}, "is no Python interpreter"),
        "no model": ({"model": "nowhere"}, "nowhere"),
        "short text": ({"text": str(folder / "generation_config.json")}, "tokens"),
    }


@pytest.mark.parametrize("name", mistakes(Path()))
def test_mistakes_are_one_line(name, folder, one_line):
    options, expected = mistakes(folder)[name]
    with pytest.raises(KvfoldError) as error:
        doctor(folder, **options)
    assert expected in one_line(error)


def test_what_is_no_export_is_refused(folder, tmp_path, one_line):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    (folder / "kvfold-export.json").write_text("[")
    for path, expected in (
        (tmp_path / "nothing", "is no export"),
        (tmp_path / "cut.gguf", "cannot be read as GGUF"),
        (folder, "tells of itself is damaged"),
    ):
        with pytest.raises(KvfoldError) as error:
            doctor(path)
        assert expected in one_line(error)
    (folder / "kvfold-export.json").unlink()
    with pytest.raises(KvfoldError) as error:
        doctor(folder, runtimes=["transformers"])
    assert "does not say what it was made from" in one_line(error)
    assert kvfold.load_model(tmp_path / "converted")
    assert doctor(folder, runtimes=["transformers"], model=tmp_path / "converted").passed
