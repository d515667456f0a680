"""The folder of a trained model: weights, what belongs beside them, and a card."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.checkpoint import new_folder, write_text

CARD_FILE = "README.md"


def write_model(
    place: Path,
    network: Any,
    state: dict[str, Tensor],
    *,
    dtype: torch.dtype,
    card: str,
    complete: Callable[[Path], None],
) -> None:
    """Write the network with the weights in `state`; it is in `dtype` afterwards.

    Args:
        complete: called with the folder, to write what a model folder has beside config, weights and card.

    Raises:
        OutputError: the folder cannot be written.
    """
    tied = network.all_tied_weights_keys
    network.to(dtype)
    with new_folder(place) as folder:
        kept = {name: _cast(tensor, dtype) for name, tensor in state.items() if name not in tied}
        network.save_pretrained(folder, state_dict=kept)
        complete(folder)
        write_text(folder / CARD_FILE, card)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
