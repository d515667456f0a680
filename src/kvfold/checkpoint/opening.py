"""Opening a model in whichever format it is stored."""

from pathlib import Path

from kvfold.checkpoint.base import Checkpoint
from kvfold.checkpoint.gguf_file import GgufCheckpoint
from kvfold.checkpoint.reasons import reason
from kvfold.checkpoint.safetensors_folder import SafetensorsCheckpoint
from kvfold.checkpoint.source import resolve_model
from kvfold.errors import CheckpointError


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a folder, a `.gguf` file, a hub id or `smollm2`: reads the config and all headers, no weights.

    Raises:
        CheckpointError: the model is missing, incomplete, corrupt, stored as pickles or may not be read.
        UnsupportedModelError: transformers does not know the architecture, or the weights are quantised.
    """
    source = str(model)
    path = resolve_model(source)
    try:
        if path.is_dir():
            return SafetensorsCheckpoint(path, source=source)
        return GgufCheckpoint(path, source=source)
    except PermissionError as error:
        raise CheckpointError(f"cannot read model {source!r}: {reason(error)}; ask for the permission") from error
