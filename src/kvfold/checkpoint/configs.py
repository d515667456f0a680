"""The JSON files of a model folder: its config and its generation defaults."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig

from kvfold.checkpoint.reasons import reason
from kvfold.errors import CheckpointError, UnsupportedModelError

# What transformers raises for config values that it cannot take.
CONFIG_ERRORS = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, OSError, StrictDataclassError)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: the file is missing or holds something else.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}; copy it from the original model")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({reason(error)}); restore it from the original") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(value).__name__}, not an object; restore it from the original"
        )
    return value


def read_config(folder: Path) -> PreTrainedConfig:
    """The config of a model folder. Code that a folder brings along is never run.

    Raises:
        CheckpointError: `config.json` is missing, not JSON, or has values that its class refuses.
        UnsupportedModelError: transformers does not know the model type, or the weights are quantised.
    """
    path = folder / "config.json"
    entries = read_object(path)
    model_type = entries.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(
            f"{path} has no model_type, so the architecture is unknown; is this a transformers model?"
        )
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{path} has model_type {model_type!r}, unknown to the installed transformers; update transformers "
            "(models that bring their own code are not supported)"
        )
    if entries.get("quantization_config"):
        raise UnsupportedModelError(
            f"{folder} stores quantised weights (quantization_config: {_method(entries['quantization_config'])}); "
            "give the unquantised model"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except CONFIG_ERRORS as error:
        raise CheckpointError(f"{path} is not a valid {model_type} config: {reason(error)}") from error


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """The generation defaults of a model folder, or None where it has no `generation_config.json`.

    Raises:
        CheckpointError: the file is not JSON or has values that transformers refuses.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    read_object(path)
    try:
        return GenerationConfig.from_pretrained(folder)
    except CONFIG_ERRORS as error:
        raise CheckpointError(f"{path} is not a valid generation config: {reason(error)}") from error


def _method(quantization: Any) -> str:
    return str(quantization.get("quant_method", "unnamed")) if isinstance(quantization, dict) else "unnamed"
