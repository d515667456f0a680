"""Load an original or a converted model, from any source, ready to evaluate."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from kvfold.checkpoint import Checkpoint, GgufCheckpoint, check_finite, model_on_meta, open_checkpoint
from kvfold.modeling.causal_lm import refuse_incomplete


def load_model(model: str | Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode and its tokenizer.

    Args:
        model: a folder, a GGUF file, a hub id, or `smollm2`.
        dtype: dtype of the weights; None keeps the checkpoint's own.

    Raises:
        CheckpointError: the checkpoint or its tokenizer is missing, damaged or incomplete, or a weight is NaN or Inf.
    """
    checkpoint = open_checkpoint(model)
    tokenizer = checkpoint.load_tokenizer()
    dtype = dtype or checkpoint.dtype
    if isinstance(checkpoint, GgufCheckpoint):
        return _assemble(checkpoint, dtype).eval(), tokenizer
    model_on_meta(checkpoint.config)  # refuses a damaged config in one line
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    network, info = loaded
    refuse_incomplete(checkpoint.path, info)
    for name, weight in network.named_parameters():
        check_finite(checkpoint.path, name, weight)
    return network.eval(), tokenizer


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
