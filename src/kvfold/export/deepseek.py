"""A latent model as a folder of a dense DeepSeek-V3, which stock runtimes load without code of ours."""

from pathlib import Path

import torch
from transformers import DeepseekV3Config

from kvfold.checkpoint import OutputFolder, write_json, write_text
from kvfold.errors import OptionError
from kvfold.export.facts import EXPORT_FILE
from kvfold.export.model import LatentModel
from kvfold.progress import Progress


def write_deepseek(
    model: LatentModel, out: Path, facts: dict[str, object], *, overwrite: bool, progress: Progress
) -> None:
    """Write the folder, whole or not at all.

    Args:
        facts: about the export, kept beside the weights.

    Raises:
        OutputError: it cannot be written.
    """
    checkpoint = model.checkpoint
    with OutputFolder(out, source=model.path, overwrite=overwrite) as folder:
        for name, tensor in model.tensors(checkpoint.dtype, progress):
            folder.add(name, tensor)
        deepseek_config(model).save_pretrained(folder.path)
        checkpoint.load_tokenizer().save_pretrained(folder.path)
        if checkpoint.generation_config is not None:
            checkpoint.generation_config.save_pretrained(folder.path)
        write_json(folder.path / EXPORT_FILE, facts)
        write_text(folder.path / "README.md", _card(model))


def check_dtype(model: LatentModel) -> None:
    """Refuse a dtype that loses the tiny rows with which the norm on the latent does nothing.

    Raises:
        OptionError: the model is in fp16.
    """
    if model.checkpoint.dtype == torch.float16 and not model.spec.latent_norm:
        raise OptionError(
            "the model is in float16, which cannot hold the small numbers that switch off DeepSeek's norm on the "
            "latent: convert it with --dtype bfloat16 or float32, or export to GGUF."
        )


def deepseek_config(model: LatentModel) -> DeepseekV3Config:
    """Every layer is dense."""
    base, spec = model.base, model.spec
    config = DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=base.intermediate_size,
        num_hidden_layers=base.num_hidden_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_attention_heads,
        kv_lora_rank=model.widths.kv_lora_rank,
        q_lora_rank=spec.q_lora_rank,
        qk_rope_head_dim=model.widths.qk_rope_head_dim,
        qk_nope_head_dim=spec.qk_nope_head_dim,
        v_head_dim=spec.v_head_dim,
        first_k_dense_replace=base.num_hidden_layers,
        num_mtp_layers=0,
        hidden_act=base.hidden_act,
        max_position_embeddings=base.max_position_embeddings,
        rms_norm_eps=base.rms_norm_eps,
        tie_word_embeddings=model.tied,
        rope_parameters={"rope_type": "default", "rope_theta": model.theta},
        rope_interleave=True,
        attention_bias=model.has_biases,
        bos_token_id=base.bos_token_id,
        eos_token_id=base.eos_token_id,
        pad_token_id=base.pad_token_id,
    )
    config.dtype = model.checkpoint.dtype
    return config


def _card(model: LatentModel) -> str:
    padded = " (padded with zeros to a width that the runtime takes)" if model.padded else ""
    return f"""---
library_name: transformers
tags: [kvfold, mla, deepseek_v3]
---

# {model.path.name} for {model.runtime.name}

A dense `DeepseekV3ForCausalLM`, made by `kvfold export` from a conversion to multi-head latent attention. It loads in
{model.runtime.name} without custom code and caches {model.cached_elements} elements per token and layer{padded}.
"""
