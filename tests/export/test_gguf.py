"""Exports to GGUF: llama.cpp computes what we do, and caches the latent alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch

import kvfold
from kvfold.cli import main as cli
from kvfold.errors import KvfoldError
from kvfold.export import export
from kvfold.export.gguf_tokenizer import LLAMA3, QWEN2, _pre_tokenizer

SIZES = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "eos_token_id": 0}


@pytest.fixture
def tokenizer(byte_level_tokenizer):
    return byte_level_tokenizer


def in_llamacpp(path: Path, ids: list[int]) -> tuple[list[dict[int, float]], str]:
    """Log-probabilities of the likeliest tokens at four steps, and the log."""
    script = Path(__file__).with_name("load_llamacpp.py")
    done = subprocess.run(
        [sys.executable, script, path, json.dumps(ids)], capture_output=True, text=True, errors="replace", timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps = json.loads(done.stdout.splitlines()[-1])
    return [{token["id"]: token["logprob"] for token in step} for step in steps], done.stderr


@pytest.mark.parametrize(("kind", "error"), [("f32", 1e-4), ("bf16", 0.06), ("f16", 0.01), ("q8_0", 0.15)])
def test_llamacpp_computes_the_same_and_caches_the_latent(kind, error, convert, speak_ascii, tmp_path):
    converted = speak_ascii(convert(**SIZES, tie_word_embeddings=kind == "bf16"))
    model, tokenizer = kvfold.load_model(converted, dtype=torch.float32)
    result = export(converted, tmp_path / "out.gguf", runtime="llamacpp", type=kind)
    ids = tokenizer("a cell is under the wall").input_ids
    steps, log = in_llamacpp(tmp_path / "out.gguf", ids)
    for step in steps:
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert max(abs(value - float(expected[token])) for token, value in step.items()) < error
        ids.append(max(step, key=step.__getitem__))
    assert re.search(rf"n_embd_k_gqa\s+= {result.cached_elements}\b", log)
    sizes = re.search(r"K \(f32\):\s+([\d.]+) MiB, V \(f32\):\s+([\d.]+) MiB", log)
    assert sizes is not None
    assert float(sizes[1]) == pytest.approx(256 * 2 * result.cached_elements * 4 / 2**20, abs=0.01)
    assert float(sizes[2]) == 0
    assert not list(tmp_path.glob(".out*"))


def test_small_rows_stay_in_a_type_that_holds_them(convert, tmp_path):
    export(convert(**SIZES), tmp_path / "out.gguf", runtime="llamacpp", type="q8_0")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert types["blk.1.attn_kv_a_mqa.weight"] == types["blk.1.attn_kv_a_norm.weight"] == "F32"
    assert types["blk.1.ffn_up.weight"] == types["token_embd.weight"] == "Q8_0"


def test_ways_to_split_text_have_llamacpps_names():
    def content(*parts):
        return {
            "model": {"type": "BPE", "merges": ["a b"]},
            "normalizer": None,
            "pre_tokenizer": {"pretokenizers": list(parts)},
        }

    level, digits = {"type": "ByteLevel"}, {"type": "Digits"}
    assert _pre_tokenizer(content(level)) == "gpt-2"
    assert _pre_tokenizer(content(digits, level)) == "smollm"
    for pattern, name in ((QWEN2, "qwen2"), (LLAMA3, "llama-bpe")):
        assert _pre_tokenizer(content({"type": "Split", "pattern": {"Regex": pattern}}, level)) == name
    assert _pre_tokenizer(content(level) | {"normalizer": {"type": "NFC"}}) == "gpt-2"
    for part, name in ((level, "add_prefix_space"), (digits, "individual_digits"), (level, "use_regex")):
        value = name == "add_prefix_space"
        with pytest.raises(KvfoldError, match=f"has {name} {value}, llama.cpp's {not value}"):
            _pre_tokenizer(content(part | {name: value}, level))
    with pytest.raises(KvfoldError, match="splits text by Metaspace"):
        _pre_tokenizer(content({"type": "Metaspace"}))
    with pytest.raises(KvfoldError, match="no plain byte-level BPE"):
        _pre_tokenizer(content(level) | {"model": {"type": "WordLevel"}})
    with pytest.raises(KvfoldError, match="has no merges"):
        _pre_tokenizer(content(level) | {"model": {"type": "BPE", "merges": []}})


MISTAKES = {
    "folder": ({"out": "out"}, "llama.cpp loads a file that ends in .gguf, got"),
    "file": ({"out": "out.gguf", "runtime": "vllm"}, "vLLM loads a folder, got"),
    "format": ({"out": "out", "format": "onnx"}, "unknown format 'onnx'"),
    "other format": ({"out": "out.gguf", "format": "gguf", "runtime": "vllm"}, "vLLM does not load the format gguf"),
    "no suffix": ({"out": "out", "format": "gguf", "runtime": None}, "llama.cpp loads a file that ends in .gguf, got"),
    "suffix": ({"out": "out.gguf", "format": "deepseek", "runtime": None}, "transformers loads a folder, got"),
    "type": ({"out": "out.gguf", "type": "q4"}, "unknown type of weights 'q4'"),
    "type of a folder": ({"out": "out", "runtime": "sglang", "type": "f16"}, "a type is for GGUF files"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name, tmp_path, one_line):
    changes, expected = MISTAKES[name]
    options = {"runtime": "llamacpp"} | changes
    with pytest.raises(KvfoldError) as error:
        export("unread", tmp_path / options.pop("out"), **options)
    assert expected in one_line(error)


def test_a_file_that_is_there_stays(convert, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    out.write_text("precious")
    command = ["export", str(convert(**SIZES)), str(out), "--runtime", "llamacpp"]
    assert cli.main(command) == 2
    assert "exists; give another name" in capsys.readouterr().err
    assert out.read_text() == "precious"
    assert cli.main([*command, "--overwrite"]) == 0
    assert out.stat().st_size > 10_000
    assert cli.main(["export", str(tmp_path / "converted"), "/proc/no/out.gguf", "--runtime", "llamacpp"]) == 2
    assert "cannot write" in capsys.readouterr().err
