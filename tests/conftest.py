"""Fixtures that several parts use. Models are tiny: more threads would only wait for each other."""

from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import kvfold
from kvfold.lab.tokenizer import make_tokenizer
from kvfold.train import TrainOptions

torch.set_num_threads(1)

TINY = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter; ids below 32."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(["<unk>", *ascii_lowercase])}, "<unk>"))
    words.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


@pytest.fixture
def one_line() -> Callable[[pytest.ExceptionInfo], str]:
    """The message of an error, which must be a single line."""

    def text(error: pytest.ExceptionInfo) -> str:
        message = str(error.value)
        assert "\n" not in message
        return message

    return text


@pytest.fixture
def randomise() -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Gives every parameter, biases and norms included, a size at which a mistake shows."""

    def fill(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(module.named_parameters()):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5)
        return module.eval()

    return fill


@pytest.fixture
def save_tiny(tmp_path, tokenizer, randomise) -> Callable[..., Path]:
    """Saves a tiny model with random weights and its tokenizer: a Llama with two KV heads, but for `changes`."""

    def save(name: str, kind: str = "llama", **changes) -> Path:
        config = AutoConfig.for_model(kind, **TINY | changes)
        randomise(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def text(tmp_path) -> str:
    letters = torch.randint(26, (600,), generator=torch.Generator().manual_seed(3)).tolist()
    path = tmp_path / "text.txt"
    path.write_text(" ".join(chr(97 + letter) for letter in letters), "utf-8")
    return str(path)


@pytest.fixture
def byte_level_tokenizer(text, tmp_path, monkeypatch):
    """264 tokens, made for the text; llama.cpp takes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_tokenizer("bpe", 264, TrainOptions(data=(text,)))


@pytest.fixture
def convert(save_tiny, text, tmp_path) -> Callable[..., Path]:
    """A conversion within half of the cache that can be exported, unless options say otherwise."""

    def made(options=None, **changes) -> Path:
        chosen = {"cache_ratio": 0.5, "target": "deepseek", "one_shot": True} | (options or {})
        calibration = {"calibration": text, "calibration_tokens": 64, "calibration_window": 16}
        kvfold.convert(save_tiny("original", **changes), tmp_path / "converted", **calibration | chosen)
        return tmp_path / "converted"

    return made


@pytest.fixture
def speak_ascii() -> Callable[[Path], Path]:
    """Lets a conversion never put out an end or half a character, of which llama.cpp tells nothing."""

    def quieten(folder: Path) -> Path:
        model, tokenizer = kvfold.load_model(folder, dtype=torch.float32)
        strange = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).isascii()]
        with torch.no_grad():
            model.lm_head.weight[[model.config.base.eos_token_id, *strange]] = 0
        model.save_pretrained(folder)
        return folder

    return quieten
