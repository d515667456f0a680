"""The folder of a healed model: weights in the dtype of the original folder, what that had beside them, and a card."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.checkpoint import Checkpoint, new_folder, write_text

CARD_FILE = "README.md"
KEPT_FILES = ("modeling_kvfold_stub.py", "recipe.yaml", "kvfold.json")
"""What a folder takes over from the model that is healed, where it is there."""


def write_model(
    place: Path,
    network: Any,
    state: dict[str, Tensor],
    source: Checkpoint,
    healed: str,
    *,
    complete: Callable[[Path], None],
) -> None:
    """Write the network with the weights in `state`; it is in the dtype of `source` afterwards.

    Args:
        healed: paragraph of the card that says how.
        complete: called with the folder, to write what a model folder has beside config, weights and card.

    Raises:
        OutputError: the folder cannot be written.
    """
    tied = network.all_tied_weights_keys
    network.to(source.dtype)
    with new_folder(place) as folder:
        kept = {name: _cast(tensor, source.dtype) for name, tensor in state.items() if name not in tied}
        network.save_pretrained(folder, state_dict=kept)
        complete(folder)
        write_text(folder / CARD_FILE, card(source.path / CARD_FILE, healed))


def write_rest(folder: Path, tokenizer: PreTrainedTokenizerBase, source: Path) -> None:
    """Put into `folder` what a model folder has beside config, weights and card."""
    tokenizer.save_pretrained(folder)
    for name in KEPT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def card(before: Path, healed: str) -> str:
    """The model card of what was healed, if it has one, and how it was healed."""
    old = before.read_text("utf-8").rstrip() + "\n\n" if before.is_file() else ""
    return f"{old}## Healing\n\n{healed}\n"


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
