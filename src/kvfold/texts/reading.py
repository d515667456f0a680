"""From a text file to token ids, with clear errors for what is missing or too short."""

from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.errors import CheckpointError, TextError


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        TextError: the file is missing, unreadable, not UTF-8 or holds only white space.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"text file {path} is not UTF-8 (byte {error.start}): convert it to UTF-8 first.") from None
    except OSError as error:
        raise TextError(
            f"cannot read text file {path}: {error.strerror}. Give the path of a plain text file."
        ) from None
    if not text.strip():
        raise TextError(f"text file {path} is empty: give a file with some text in it.")
    return text


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
