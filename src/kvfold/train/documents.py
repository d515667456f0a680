"""The documents of a training source, streamed: files of text, JSON Lines or Parquet, and datasets of the hub."""

import glob
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvfold.checkpoint import reason
from kvfold.errors import OptionError, TextError
from kvfold.texts import read_text

TEXT_FILES = (".txt", ".md")
TABLE_FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Builder of the datasets library by the ending of a file."""
TEXT, CHAT = "text", "messages"
"""The columns that are looked for where none is named."""


def documents(name: str, column: str | None, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[str]:
    """The texts of one source, in order. Chats become text by the tokenizer's template.

    Raises:
        OptionError: a library is missing, or a chat is given to a tokenizer without a template.
        TextError: the source is missing or unreadable, or lacks the column.
    """
    path = Path(name)
    if path.suffix in TEXT_FILES:
        yield read_text(path)
        return
    for row in _rows(name, path):
        chosen = _column(name, column, row)
        value = row[chosen]
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield _chat(name, value, tokenizer)
        else:
            raise TextError(
                f"column {chosen!r} of {name} holds {type(value).__name__}, neither text nor a chat: name another one."
            )


def _rows(name: str, path: Path) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("datasets") is None:
        raise OptionError(f"{name} needs the package datasets, which is not installed: pip install 'kvfold[train]'.")
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    try:
        yield from _stream(name, path)
    except (DatasetNotFoundError, DatasetGenerationError, OSError, ValueError) as error:
        raise TextError(f"training data {name} cannot be read: {reason(error)}.") from None


def _stream(name: str, path: Path) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset

    if path.is_file() and path.suffix not in TABLE_FILES:
        endings = ", ".join((*TEXT_FILES, *TABLE_FILES))
        raise TextError(f"training data {name} has none of the endings {endings}: convert or rename the file.")
    if path.suffix not in TABLE_FILES:
        dataset, _, configuration = name.partition(":")
        return load_dataset(dataset, configuration or None, split="train", streaming=True)
    if not path.is_file():
        raise TextError(f"training data {name} does not exist: give the path of a file.")
    if not path.stat().st_size:
        raise TextError(f"training data {name} is empty: give a file with some text in it.")
    if "::" in name:
        raise TextError(f"training data {name} has :: in its name, which the datasets library cannot read: rename it.")
    # A name is a pattern there.
    return load_dataset(TABLE_FILES[path.suffix], data_files=glob.escape(str(path)), split="train", streaming=True)


def _column(name: str, column: str | None, row: dict[str, Any]) -> str:
    if column is None:
        column = next((known for known in (TEXT, CHAT) if known in row), TEXT)
    if column not in row:
        raise TextError(f"{name} has no column {column!r}, only {', '.join(row)}: name one with --column.")
    return column


def _chat(name: str, messages: list[Any], tokenizer: PreTrainedTokenizerBase | None) -> str:
    if tokenizer is None or tokenizer.chat_template is None:
        raise OptionError(f"{name} holds chats and the tokenizer has no chat template: give plain text.")
    return str(tokenizer.apply_chat_template(messages, tokenize=False))
