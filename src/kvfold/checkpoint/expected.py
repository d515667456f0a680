"""The model that a config promises, built without memory: its tensors by name and shape."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvfold.checkpoint.configs import CONFIG_ERRORS
from kvfold.checkpoint.reasons import reason
from kvfold.errors import CheckpointError


def model_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The transformers model of `config`, without memory for its weights.

    Raises:
        CheckpointError: the config has a value that the model refuses.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except CONFIG_ERRORS as error:
        raise CheckpointError(
            f"the config gives no {config.model_type} model ({reason(error)}); restore config.json from the original"
        ) from error


def shapes_of_config(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model; an output layer tied to the embedding is absent.

    Raises:
        CheckpointError: the config has a value that the model refuses.
    """
    tensors = model_on_meta(config).state_dict()
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
