"""From a text file to token ids, with clear errors for what is missing or too short."""

import codecs
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.errors import CheckpointError, TextError


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        TextError: the file is missing, unreadable, not UTF-8, binary, or holds only white space.
    """
    with _refusing(path):
        text = _plain(path, codecs.utf_8_decode(Path(path).read_bytes(), "strict", True)[0])
    if not text.strip():
        raise TextError(f"text file {path} is empty: give a file with some text in it.")
    return text


def text_size(path: str | Path) -> int:
    """Bytes of a text file.

    Raises:
        TextError: the file is missing or unreadable.
    """
    with _refusing(path):
        return Path(path).stat().st_size


def read_slice(path: str | Path, start: int, length: int) -> str:
    """The text within `length` bytes of a UTF-8 file from byte `start` on, without the words cut at either end.

    It begins at a line if one begins in the first quarter, else at a word; only a script without spaces is cut between
    any two characters. The rest of the file is not read, and may be damaged.

    Raises:
        TextError: the file is missing or unreadable; the slice is not UTF-8, or binary.
    """
    with _refusing(path, start), Path(path).open("rb") as file:
        file.seek(start)
        data = file.read(length)
        whole = not file.read(1)
        # The rest of a character that began before `start`: up to three bytes of the form 10xxxxxx.
        head = next((index for index, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0) if start else 0
        text, _ = codecs.utf_8_decode(b" " * head + data[head:], "strict", whole)
    text = _plain(path, text[head:])
    quarter = len(text) // 4
    begin = 0
    if start and (cut := re.search(r"\n", text[:quarter]) or re.search(r"\s", text)):
        begin = cut.end()
    end = -1 if whole else max(text.rfind(space, len(text) - quarter) for space in "\n ")
    return text[begin:] if end < 0 else text[begin:end]


def _plain(path: str | Path, text: str) -> str:
    """`text` with the line breaks of Unix; a NUL says that it is none."""
    if "\0" in text:
        raise TextError(f"text file {path} is binary, it holds NUL characters: give a plain text file.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


@contextmanager
def _refusing(path: str | Path, start: int = 0) -> Iterator[None]:
    """Turns what can go wrong while `path` is read from byte `start` on into one line."""
    try:
        yield
    except UnicodeDecodeError as error:
        at = start + error.start
        raise TextError(f"text file {path} is not UTF-8 (byte {at}): convert it to UTF-8 first.") from None
    except OSError as error:
        raise TextError(
            f"cannot read text file {path}: {error.strerror}. Give the path of a plain text file."
        ) from None


def token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, *, minimum: int, name: str = "the text"
) -> Int64[Tensor, " tokens"]:
    """Token ids of `text`, without special tokens: windows are cut out of it, so there is no sequence start to mark.

    Raises:
        TextError: fewer than `minimum` tokens; `name` says which text it is.
    """
    # verbose=False: the text is longer than the model's context on purpose, a warning would only puzzle.
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < minimum:
        raise TextError(f"{name} has {len(ids)} tokens, {minimum} are needed: give more text, or ask for fewer tokens.")
    return torch.tensor(ids, dtype=torch.int64)


def check_vocabulary(ids: Int64[Tensor, "*tokens"], vocabulary: int) -> None:
    """Refuse token ids that a model with `vocabulary` embeddings does not have.

    Raises:
        CheckpointError: the tokenizer that made them belongs to another model.
    """
    if ids.numel() and (highest := int(ids.max())) >= vocabulary:
        raise CheckpointError(
            f"the tokenizer gives token {highest}, the model has {vocabulary} embeddings: restore the tokenizer files "
            "of this model."
        )
