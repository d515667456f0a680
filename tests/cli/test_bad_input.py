"""Every kind of bad input, end to end: exit code 2, one clear line, and nothing left behind."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import kvfold

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WEIGHTS_ONLY = ("--cache-ratio", "0.5", "--calibration-tokens", "0")
EXPLICIT = ("--calibration-tokens", "0", "--layout", "per_head", "--rope", "high")
ATTENTION = "model.layers.1.self_attn.v_proj.weight"
MLP = "model.layers.1.mlp.down_proj.weight"

Damage = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command line, in which {model}, {out}, {converted} and {tmp} stand for paths, after `damage` was done to the
    folder that holds them; `says` are the parts of the message that matter: what, the value, what to do."""

    argv: tuple[str, ...]
    says: tuple[str, ...]
    damage: Damage = lambda tmp: None


def convert(*options: str, says: tuple[str, ...], damage: Damage = lambda tmp: None, out: str = "{out}") -> Case:
    return Case(argv=("convert", "{model}", out, *options), says=says, damage=damage)


def other_model(model_type: str, factory=AutoModelForCausalLM, **sizes) -> Damage:
    def damage(tmp: Path) -> None:
        config = AutoConfig.for_model(model_type, **(sizes or SIZES))
        factory.from_config(config).save_pretrained(tmp / "model")

    return damage


def poison(name: str, value: float) -> Damage:
    def damage(tmp: Path) -> None:
        tensors = load_file(tmp / "model/model.safetensors")
        tensors[name].view(-1)[5] = value
        save_file(tensors, tmp / "model/model.safetensors", {"format": "pt"})

    return damage


def drop_tensor(folder: str, name: str) -> Damage:
    def damage(tmp: Path) -> None:
        tensors = load_file(tmp / folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, tmp / folder / "model.safetensors", {"format": "pt"})

    return damage


def widen_mlp(tmp: Path) -> None:
    edit_json(tmp / "model/config.json", intermediate_size=28)


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write(name: str, content: str | bytes) -> Damage:
    return lambda tmp: (tmp / name).write_bytes(content if isinstance(content, bytes) else content.encode()) and None


def remove(*names: str) -> Damage:
    return lambda tmp: [(tmp / name).unlink() for name in names] and None


def cut_weights(folder: str) -> Damage:
    def damage(tmp: Path) -> None:
        path = tmp / folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    return damage


def break_header(tmp: Path) -> None:
    path = tmp / "model/model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype"', b'"dtyp!"', 1))


def lose_shard(tmp: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tmp / "model")
    (tmp / "model/model.safetensors").unlink()
    model.save_pretrained(tmp / "model", max_shard_size="10KB")
    next((tmp / "model").glob("model-00002-of-*")).unlink()


def set_rope(tmp: Path) -> None:
    edit_json(tmp / "model/config.json", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})


def shrink_vocabulary(tmp: Path) -> None:
    other_model("llama", **(SIZES | {"vocab_size": 20}))(tmp)


def pickle_only(tmp: Path) -> None:
    (tmp / "model/model.safetensors").unlink()
    torch.save({}, tmp / "model/pytorch_model.bin")


def write_gguf(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_feed_forward_length):
        add(32)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_vocab_size(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.ones((32, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def gguf_file(change: Callable[[bytes], bytes]) -> Damage:
    def damage(tmp: Path) -> None:
        (tmp / "tiny.gguf").write_bytes(change(write_gguf(tmp / "tiny.gguf")))

    return damage


def tamper(**values) -> Damage:
    """Change the attention spec of layer 1 of the converted folder."""

    def damage(tmp: Path) -> None:
        path = tmp / "converted/config.json"
        attention = json.loads(path.read_text())["attention"]
        attention[1] |= values
        edit_json(path, attention=attention)

    return damage


OPTIONS = {
    "rope": convert("--cache-ratio", "0.5", "--rope", "mixd", says=("rope strategy", "'mixd'", "mean 'mixed'?")),
    "rope of the other layout": convert(
        "--cache-ratio", "0.5", "--rope", "2-norm", says=("'2-norm'", "layout shared has mixed, assigned, stride,")
    ),
    "factorize": convert("--cache-ratio", "0.5", "--factorize", "svd-joint", says=("'svd-joint'", "mean 'svd_joint'?")),
    "layout": convert("--cache-ratio", "0.5", "--layout", "per-head", says=("'per-head'", "mean 'per_head'?")),
    "dtype": convert("--cache-ratio", "0.5", "--dtype", "bfloat", says=("'bfloat'", "mean 'bfloat16'?")),
    "no budget": convert(says=("give a budget",)),
    "budget too small": convert("--cache-ratio", "0.01", says=("cache_ratio 0.01", "ask for at least")),
    "budget too large": convert(
        *EXPLICIT, "--qk-rope-head-dim", "4", "--d-kv", "16", says=("exceed the original cache of 32", "d_kv to 12")
    ),
    "2-norm uncalibrated": convert(
        *WEIGHTS_ONLY, "--layout", "per_head", "--rope", "2-norm", says=("'2-norm'", "calibration_tokens above 0")
    ),
    "the default of per_head uncalibrated": convert(
        *WEIGHTS_ONLY, "--layout", "per_head", says=("'rotation_error'", "calibration_tokens above 0", "another")
    ),
    "svd_whitened uncalibrated": convert(
        *WEIGHTS_ONLY, "--factorize", "svd_whitened", says=("svd_whitened", "calibration_tokens above 0")
    ),
} | {
    f"rotary dims {dims}": convert(*EXPLICIT, "--qk-rope-head-dim", dims, "--d-kv", "4", says=(f"got {dims}", "even"))
    for dims in ("3", "0", "-2")
}
OPTIONS |= {
    "weights of no text": convert(
        *("--cache-ratio", "0.5", "--calibration", "default", "sampled", "--calibration-weights", "1"),
        says=("calibration_weights has 1 number", "calibration 2", "give one"),
    ),
    "a weight of zero": convert(
        *("--cache-ratio", "0.5", "--calibration-weights", "0"),
        says=("calibration_weights must be positive", "got 0.0"),
    ),
    "a text twice": convert(
        *("--cache-ratio", "0.5", "--calibration", "default", "default"), says=("same text twice, 'default'", "once")
    ),
    "seed": convert("--cache-ratio", "0.5", "--seed", "-1", says=("seed must be between 0", "got -1")),
}
OPTIONS["rotary dims 10"] = convert(
    *EXPLICIT, "--qk-rope-head-dim", "10", "--d-kv", "4", says=("qk_rope_head_dim 10 exceeds the 8 rotary dims",)
)
OPTIONS |= {
    f"cache ratio {ratio}": convert(f"--cache-ratio={ratio}", says=("cache_ratio must be in (0, 1]", f"got {ratio}"))
    for ratio in ("0.0", "-0.5", "1.5")
} | {
    f"cache ratio {ratio}": convert("--cache-ratio", ratio, says=("--cache-ratio must be a number", repr(ratio)))
    for ratio in ("nan", "inf", "half")
}

RECIPES = {
    "unknown key": convert(
        *("--config", "{tmp}/r.yaml"),
        damage=write("r.yaml", "cache_ration: 0.5\n"),
        says=("'cache_ration'", "mean 'cache_ratio'?"),
    ),
    "missing": convert("--config", "{tmp}/none.yaml", says=("the recipe cannot be read", "none.yaml")),
    "not YAML": convert("--config", "{tmp}/r.yaml", damage=write("r.yaml", "a: [1\n"), says=("not valid YAML",)),
    "binary": convert("--config", "{tmp}/r.yaml", damage=write("r.yaml", b"\xff\xfe\x00\x80"), says=("recipe",)),
    "a folder": convert("--config", "{tmp}", says=("recipe",)),
    "wrong type": convert(
        *("--config", "{tmp}/r.yaml"),
        damage=write("r.yaml", "cache_ratio: half\n"),
        says=("--cache-ratio must be a number", "'half'"),
    ),
    "unknown name": convert(
        *("--config", "{tmp}/r.yaml"),
        damage=write("r.yaml", "cache_ratio: 0.5\nrope: strid\n"),
        says=("'strid'", "mean 'stride'?"),
    ),
}

TOKENIZER = ("the tokenizer gives token 2", "the model has 20 embeddings", "restore the tokenizer")
MODELS = {
    "nothing there": Case(
        argv=("convert", "{tmp}/none", "{out}", *WEIGHTS_ONLY), says=("does not exist", "{tmp}/none")
    ),
    "gpt2": convert(
        *WEIGHTS_ONLY,
        damage=other_model("gpt2", vocab_size=32, n_embd=32, n_layer=1, n_head=4, n_positions=32),
        says=("'gpt2'", "no rotary positions"),
    ),
    "t5": convert(
        *WEIGHTS_ONLY,
        damage=other_model("t5", AutoModelForSeq2SeqLM, vocab_size=32, d_model=32, d_ff=32, num_layers=1, num_heads=4),
        says=("'t5'", "encoder-decoder"),
    ),
    "qwen3": convert(*WEIGHTS_ONLY, damage=other_model("qwen3", **SIZES, head_dim=8), says=("'qwen3'", "QK-norm")),
    "missing shard": convert(
        *WEIGHTS_ONLY, damage=lose_shard, says=("lacks the shard model-00002-of-", "download it again")
    ),
    "truncated": convert(*WEIGHTS_ONLY, damage=cut_weights("model"), says=("model.safetensors is truncated",)),
    "corrupt header": convert(*WEIGHTS_ONLY, damage=break_header, says=("truncated or corrupt", "download it again")),
    "missing tensor": convert(*WEIGHTS_ONLY, damage=drop_tensor("model", MLP), says=(MLP,)),
    "missing attention tensor": convert(*WEIGHTS_ONLY, damage=drop_tensor("model", ATTENTION), says=(ATTENTION,)),
    "wrong shape": convert(*WEIGHTS_ONLY, damage=widen_mlp, says=("mlp.", "(24, 32)", "(28, 32)")),
    "wrong shape, calibrated": convert("--cache-ratio", "0.5", damage=widen_mlp, says=("mlp.", "(24, 32)")),
    "rope type": convert(
        *WEIGHTS_ONLY, damage=set_rope, says=("gives no llama model", "'spiral'", "restore config.json")
    ),
    "lm_head that is not tied": convert(
        *WEIGHTS_ONLY,
        damage=lambda tmp: edit_json(tmp / "model/config.json", tie_word_embeddings=True),
        says=("another lm_head.weight than model.embed_tokens.weight", "set tie_word_embeddings to false"),
    ),
    "tokenizer of another model": convert("--cache-ratio", "0.5", damage=shrink_vocabulary, says=TOKENIZER),
    "tokenizer of another model, generate": Case(
        argv=("generate", "{model}", "--prompt", "a z"), damage=shrink_vocabulary, says=TOKENIZER
    ),
    "too large for float16": convert(
        *WEIGHTS_ONLY,
        *("--dtype", "float16"),
        damage=poison(MLP, 1e6),
        says=("dtype float16 cannot hold", MLP, "take bfloat16 or float32"),
    ),
    "pickle": convert(*WEIGHTS_ONLY, damage=pickle_only, says=("pytorch_model.bin", "save_pretrained")),
    "no tokenizer": convert(
        *WEIGHTS_ONLY,
        damage=remove("model/tokenizer.json", "model/tokenizer_config.json"),
        says=("has no tokenizer", "copy tokenizer.json"),
    ),
    "broken config": convert(*WEIGHTS_ONLY, damage=write("model/config.json", "{"), says=("config.json", "restore it")),
} | {
    f"{value} in {part}, {way}": convert(
        "--cache-ratio", "0.5", *options, damage=poison(name, float(value)), says=(repr(name), "NaN or Inf", "restore")
    )
    for value in ("nan", "inf")
    for part, name in (("attention", ATTENTION), ("mlp", MLP))
    for way, options in (
        ("weights only", WEIGHTS_ONLY[2:]),
        ("calibrated", ("--calibration-tokens", "64", "--calibration-window", "32")),
    )
}

GGUF = ("convert", "{tmp}/tiny.gguf", "{out}", *WEIGHTS_ONLY)
GGUFS = {
    "cut in its tensors": Case(
        argv=GGUF, damage=gguf_file(lambda data: data[:-64]), says=("truncated", "download it again")
    ),
    "cut in its header": Case(
        argv=GGUF, damage=gguf_file(lambda data: data[:60]), says=("truncated", "download it again")
    ),
    "cut to its magic": Case(argv=GGUF, damage=gguf_file(lambda data: data[:4]), says=("truncated",)),
    "empty": Case(argv=GGUF, damage=gguf_file(lambda data: b""), says=("truncated",)),
    "wrong magic": Case(argv=GGUF, damage=gguf_file(lambda data: b"GGML" + data[4:]), says=("no GGUF file",)),
    "absurd counts": Case(
        argv=GGUF, damage=gguf_file(lambda data: data[:8] + b"\xff" * 16 + data[24:]), says=("truncated",)
    ),
    "overwritten in the middle": Case(
        argv=GGUF, damage=gguf_file(lambda data: data[:40] + b"\xfe" * 40 + data[80:]), says=("tiny.gguf",)
    ),
    "without its tensors": Case(argv=GGUF, damage=gguf_file(bytes), says=("lacks the tensor",)),
}

CALIBRATE = ("--cache-ratio", "0.5", "--calibration", "{tmp}/text.txt")
TEXTS = {
    "missing": convert(*CALIBRATE, says=("cannot read text file {tmp}/text.txt", "Give the path")),
    "a folder": convert("--cache-ratio", "0.5", "--calibration", "{tmp}", says=("cannot read text file {tmp}",)),
    "empty": convert(*CALIBRATE, damage=write("text.txt", " \n"), says=("{tmp}/text.txt is empty", "give a file")),
    "too short": convert(*CALIBRATE, damage=write("text.txt", "a b c"), says=("has 3 tokens, 16384", "give more text")),
    "binary": convert(*CALIBRATE, damage=write("text.txt", b"\x00\xff\x80"), says=("not UTF-8", "convert it")),
    "NUL": convert(
        *CALIBRATE, damage=write("text.txt", b"a\0b"), says=("text.txt is binary", "give a plain text file")
    ),
    "missing among others": convert(*CALIBRATE, "sampled", "default", says=("cannot read text file {tmp}/text.txt",)),
    "too short to evaluate": Case(
        argv=("evaluate", "{model}", "--text", "{tmp}/text.txt"),
        damage=write("text.txt", "a b c"),
        says=("has 3 tokens, 512", "give more text"),
    ),
}

OUTPUTS = {
    "exists": convert(*WEIGHTS_ONLY, out="{converted}", says=("{converted} already exists", "--overwrite")),
    "is no model": convert(
        *WEIGHTS_ONLY,
        "--overwrite",
        out="{tmp}/thesis",
        damage=lambda tmp: (tmp / "thesis").mkdir() or write("thesis/a.tex", "years of work")(tmp),
        says=("{tmp}/thesis holds something else", "another folder"),
    ),
    "inside the model": convert(*WEIGHTS_ONLY, out="{model}/x", says=("inside the model", "another folder")),
    "the model": convert(*WEIGHTS_ONLY, "--overwrite", out="{model}", says=("is the model itself", "another folder")),
    "around the model": convert(*WEIGHTS_ONLY, "--overwrite", out="{tmp}", says=("contains the model",)),
    "a file": convert(
        *WEIGHTS_ONLY, "--overwrite", out="{model}/../f", damage=write("f", "1"), says=("existing file",)
    ),
    "below a file": convert(*WEIGHTS_ONLY, out="{tmp}/f/x", damage=write("f", "1"), says=("{tmp}/f/x", "write to")),
    "of an unknown user": convert(*WEIGHTS_ONLY, out="~nobody-here/x", says=("~nobody-here/x", "another folder")),
    "a link to itself": convert(
        *WEIGHTS_ONLY, out="{tmp}/loop", damage=lambda tmp: (tmp / "loop").symlink_to("loop"), says=("existing file",)
    ),
    "a name too long": convert(*WEIGHTS_ONLY, out="{tmp}/" + "x" * 250, says=("File name too long", "write to")),
    "in /proc": convert(*WEIGHTS_ONLY, out="/proc/x", says=("cannot create /proc/x", "write to")),
}

PROMPTS = {
    "empty": Case(argv=("generate", "{model}", "--prompt", ""), says=("the prompt is empty", "give some text")),
    "blank": Case(argv=("generate", "{model}", "--prompt", " "), says=("' ' gives no tokens", "give some text")),
    "seed": Case(argv=("generate", "{model}", "--prompt", "a", "--seed", "-1"), says=("seed must be", "not -1")),
}

COMMANDS = {
    "evaluate": ("evaluate", "{converted}", "--text", str(Path(__file__))),
    "verify": ("verify", "{model}", "{converted}"),
    "generate": ("generate", "{converted}", "--prompt", "a b"),
    "inspect": ("inspect", "{converted}"),
}
V_B = "model.layers.1.self_attn.v_b_proj.weight"
DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "rank": (tamper(kv_lora_rank=6), ("has shape", "its config says")),
    "kind": (tamper(kind="latnt"), ("'latnt'", "mean 'latent'?")),
    "type": (tamper(kv_lora_rank="x"), ("kv_lora_rank", "'x'")),
    "no specs": (lambda tmp: edit_json(tmp / "converted/config.json", attention=None), ("no 'attention'",)),
    "specs of no layer": (lambda tmp: edit_json(tmp / "converted/config.json", attention=3), ("'attention'",)),
    "base": (
        lambda tmp: edit_json(
            tmp / "converted/config.json", text_config={"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4}
        ),
        ("'gpt2'", "no rotary positions"),
    ),
    "no base": (lambda tmp: edit_json(tmp / "converted/config.json", text_config=3), ("text_config",)),
    "missing tensor": (drop_tensor("converted", V_B), (V_B,)),
    "truncated": (cut_weights("converted"), ("truncated or corrupt",)),
}
SEEN_BY_INSPECT = DAMAGES.keys() - {"rank", "missing tensor"}  # it reads no weights
LOADING = {
    f"{command}, {name}": Case(argv=argv, damage=damage, says=says)
    for command, argv in COMMANDS.items()
    for name, (damage, says) in DAMAGES.items()
    if command != "inspect" or name in SEEN_BY_INSPECT
} | {
    f"{command} original, {name}": Case(
        argv=tuple(word.replace("{converted}", "{model}") for word in argv), damage=damage, says=(MLP,)
    )
    for command, argv in COMMANDS.items()
    if command != "verify" and command != "inspect"
    for name, damage in (("missing tensor", drop_tensor("model", MLP)), ("nan", poison(MLP, float("nan"))))
}

TABLES = {"option": OPTIONS, "recipe": RECIPES, "model": MODELS, "gguf": GGUFS, "text": TEXTS, "output": OUTPUTS}
TABLES |= {"prompt": PROMPTS, "loading": LOADING}
CASES = {f"{table}: {name}": case for table, cases in TABLES.items() for name, case in cases.items()}


@pytest.fixture
def place(tmp_path, tokenizer, randomise) -> dict[str, str]:
    """A tiny model, one converted from it, and a place for the output, by the names that the cases use."""
    model = randomise(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    kvfold.convert(tmp_path / "model", tmp_path / "converted", lossless=True, calibration_tokens=0)
    names = {name: str(tmp_path / name) for name in ("model", "converted", "out")}
    return names | {"tmp": str(tmp_path)}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, place, tmp_path, refused):
    case = CASES[name]
    case.damage(tmp_path)
    line = refused(*(word.format(**place) for word in case.argv))
    for part in case.says:
        assert part.format(**place) in line
