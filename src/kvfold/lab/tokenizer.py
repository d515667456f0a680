"""The tokenizer of a model that is trained from scratch: another model's, one made for the text, or plain bytes."""

import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvfold.checkpoint import new_folder, open_checkpoint
from kvfold.errors import OptionError
from kvfold.texts import CALIBRATION, DEFAULT_TEXT
from kvfold.train.data import cache_folder, identity
from kvfold.train.documents import documents
from kvfold.train.options import TrainOptions

BPE, BYTES = "bpe", "bytes"
END = "<|endoftext|>"
MOST_CHARACTERS = 50_000_000
"""Of the text that a tokenizer is made for."""


def tokenizer_key(name: str, vocab_size: int, options: TrainOptions) -> dict[str, Any]:
    """JSON-able; says whether two runs have the same tokenizer."""
    if name != BPE:
        return {"tokenizer": name}
    texts = [[identity(_file(source)), column] for source, column in _sources(options)]
    return {"tokenizer": name, "size": vocab_size, "texts": texts}


def make_tokenizer(name: str, vocab_size: int, options: TrainOptions) -> PreTrainedTokenizerBase:
    """The tokenizer that a recipe names.

    Args:
        name: `bpe`, a byte-level BPE of `vocab_size` tokens for the training text, kept on disk; `bytes`, one token a
            byte; or a model whose tokenizer is taken.

    Raises:
        OptionError: it has more tokens than `vocab_size`.
        KvfoldError: the text or the model cannot be read.
    """
    if name == BPE:
        tokenizer = _bpe(vocab_size, options)
    elif name == BYTES:
        tokenizer = _wrapped(_byte_level(models.BPE(vocab=_byte_vocabulary(), merges=[])))
    else:
        tokenizer = open_checkpoint(name).load_tokenizer()
    if len(tokenizer) > vocab_size:
        raise OptionError(
            f"the tokenizer {name} has {len(tokenizer):,} tokens, vocab_size is {vocab_size:,}: raise it."
        )
    return tokenizer


def _bpe(vocab_size: int, options: TrainOptions) -> PreTrainedTokenizerBase:
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < smallest:
        raise OptionError(f"a bpe tokenizer has at least {smallest} tokens, vocab_size is {vocab_size}: raise it.")
    key = json.dumps(tokenizer_key(BPE, vocab_size, options), sort_keys=True)
    place = cache_folder() / "tokenizers" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not place.exists():
        tokenizer = _byte_level(models.BPE())
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(_texts(options), trainer)
        with new_folder(place) as folder:
            _wrapped(tokenizer).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(place)


def _texts(options: TrainOptions) -> Iterator[str]:
    """The beginning of all training text, as much of each source."""
    sources = _sources(options)
    for source, column in sources:
        left = MOST_CHARACTERS // len(sources)
        for text in documents(_file(source), column, tokenizer=None):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


def _sources(options: TrainOptions) -> list[tuple[str, str | None]]:
    return list(zip(options.data, options.columns, strict=True))


def _file(source: str) -> str:
    return str(CALIBRATION) if source == DEFAULT_TEXT else source


def _byte_vocabulary() -> dict[str, int]:
    return {token: place for place, token in enumerate(chain([END], sorted(pre_tokenizers.ByteLevel.alphabet())))}


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)
