"""Text files as token ids, with errors that say what is missing."""

from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.errors import TextError


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        TextError: the file is missing, is not text, or is empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"cannot read the text {str(path)!r}: {error}.") from error
    if not text.strip():
        raise TextError(f"the text {str(path)!r} is empty.")
    return text


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, minimum: int, name: str) -> Int[Tensor, " tokens"]:
    """The text as token ids, without special tokens.

    Raises:
        TextError: fewer than `minimum` tokens; `name` says in the message which text it was.
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    if len(ids) < minimum:
        raise TextError(f"{name} has {len(ids)} tokens, {minimum} are needed: give more text or ask for fewer tokens.")
    return ids
