"""Load an original or a converted model, from any source, ready to evaluate."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from kvfold.checkpoint import Checkpoint, GgufCheckpoint, open_checkpoint


def load_model(model: str | Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode and its tokenizer.

    Args:
        model: a folder, a GGUF file, a hub id, or `smollm2`.
        dtype: dtype of the weights; None keeps the checkpoint's own.

    Raises:
        CheckpointError: the checkpoint or its tokenizer is missing, damaged or incomplete.
    """
    checkpoint = open_checkpoint(model)
    tokenizer = checkpoint.load_tokenizer()
    dtype = dtype or checkpoint.dtype
    if isinstance(checkpoint, GgufCheckpoint):
        return _assemble(checkpoint, dtype).eval(), tokenizer
    return AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=dtype).eval(), tokenizer


def _assemble(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model and fill it tensor by tensor, so that only one dequantised tensor is held twice."""
    model = AutoModelForCausalLM.from_config(checkpoint.config, dtype=dtype)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in checkpoint.names():
            parameters[name].copy_(checkpoint.read(name))
    model.tie_weights()
    if checkpoint.generation_config is not None:
        model.generation_config = checkpoint.generation_config
    return model
