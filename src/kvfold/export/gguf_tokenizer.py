"""A byte-level BPE tokenizer of transformers as the entries of a GGUF file."""

import json
from typing import Any

import gguf
from transformers import PreTrainedTokenizerBase

from kvfold.errors import OptionError

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}| ", r"\p{N}{1,3}| ")
PRE_TOKENIZERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    ("Split", QWEN2, "ByteLevel"): "qwen2",
    ("Split", LLAMA3, "ByteLevel"): "llama-bpe",
}
"""llama.cpp's names of what splits a text before BPE, by what transformers does."""

OPTIONS = {
    "ByteLevel": {"add_prefix_space": False},
    "Digits": {"individual_digits": True},
    "Split": {"behavior": "Isolated", "invert": False},
}
"""What it does in each of these; bytes are split by GPT-2's pattern where no other one has."""


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Write vocabulary, merges, special tokens and chat template.

    Args:
        vocab_size: embeddings of the model; those beyond the tokenizer's tokens are given names that no text has.

    Raises:
        OptionError: it is no byte-level BPE, or splits text in a way that llama.cpp is not known to have a name for.
    """
    backend: Any = tokenizer.backend_tokenizer
    content = json.loads(backend.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(content))
    added = {token["id"]: token for token in content["added_tokens"]}
    tokens = {place: text for text, place in tokenizer.get_vocab().items()}
    writer.add_token_list([tokens.get(place, f"[PAD{place}]") for place in range(vocab_size)])
    writer.add_token_types([_kind(place, tokens, added) for place in range(vocab_size)])
    merges = content["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        if (token := getattr(tokenizer, f"{name}_token_id")) is not None:
            add(token)
    first = tokenizer("a").input_ids[0]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and first == tokenizer.bos_token_id)
    writer.add_add_space_prefix(False)
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template is not None:
        writer.add_chat_template(template)


def _pre_tokenizer(content: dict[str, Any]) -> str:
    # Qwen2's composes characters, which llama.cpp leaves out: only text in decomposed ones is split in another way.
    composes = (content["normalizer"] or {}).get("type") == "NFC"
    if content["model"]["type"] != "BPE" or not (composes or content["normalizer"] is None):
        raise OptionError(
            "the tokenizer is no plain byte-level BPE, the only kind that can be exported to GGUF so far."
        )
    if not content["model"]["merges"]:
        raise OptionError("the tokenizer has no merges, which llama.cpp does not load.")
    outer: dict[str, Any] = content["pre_tokenizer"] or {"type": "none"}
    parts: list[dict[str, Any]] = outer.get("pretokenizers", [outer])
    key: list[str] = []
    for part in parts:
        wanted = OPTIONS.get(part["type"], {}) | {"use_regex": "Split" not in key}
        for name, value in wanted.items():
            if part.get(name, value) != value:
                raise OptionError(f"the tokenizer's {part['type']} has {name} {part[name]!r}, llama.cpp's {value!r}.")
        key.append(part["type"])
        if part["type"] == "Split":
            key.append(part["pattern"].get("Regex", ""))
    if tuple(key) not in PRE_TOKENIZERS:
        raise OptionError(
            f"the tokenizer splits text by {', '.join(key)}, for which llama.cpp has no name that we know."
        )
    return PRE_TOKENIZERS[tuple(key)]


def _kind(place: int, tokens: dict[int, str], added: dict[int, dict[str, Any]]) -> gguf.TokenType:
    if place not in tokens:
        return gguf.TokenType.UNUSED
    if place not in added:
        return gguf.TokenType.NORMAL
    return gguf.TokenType.CONTROL if added[place]["special"] else gguf.TokenType.USER_DEFINED
