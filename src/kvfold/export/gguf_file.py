"""A latent model as one GGUF file, which llama.cpp runs as a dense DeepSeek-V2."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from torch import Tensor

from kvfold.checkpoint import reason
from kvfold.errors import OutputError
from kvfold.export.facts import GGUF_KEY
from kvfold.export.gguf_tokenizer import add_tokenizer
from kvfold.export.model import LatentModel
from kvfold.progress import Progress, silent

ARCHITECTURE = "deepseek2"
TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
LATENT_DOWN = "attn_kv_a_mqa.weight"
"""Its rows are tiny where the norm on the latent is made to do nothing, too small for fp16 and the scales of blocks."""
BLOCK = 32
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": LATENT_DOWN,
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
"""llama.cpp's names in `blk.N.` of those in `model.layers.N.`."""
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(model: LatentModel, path: Path, kind: str, facts: dict[str, object], progress: Progress) -> None:
    """Write the file under a temporary name, then rename it. The tensors are made twice, one by one: what they are
    stands before all of them.

    Args:
        kind: of the weights, a name of `TYPES`.
        facts: about the export, kept among the metadata.

    Raises:
        OutputError: it cannot be written.
        OptionError: the tokenizer cannot be exported.
    """
    partial = path.with_name(f".{path.name}.partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURE)
    try:
        _add_config(writer, model, FILE_TYPES[kind])
        writer.add_string(GGUF_KEY, json.dumps(facts))
        add_tokenizer(writer, model.checkpoint.load_tokenizer(), model.base.vocab_size)
        for name, tensor in _tensors(model, silent):
            stored = stored_type(name, tensor, kind)
            block, size = gguf.GGML_QUANT_SIZES[stored]
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.numel() // block * size, stored)
        partial.parent.mkdir(parents=True, exist_ok=True)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in _tensors(model, progress):
            writer.write_tensor_data(quantize(tensor.contiguous().numpy(), stored_type(name, tensor, kind)))
        writer.close()
        partial.rename(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {reason(error)}; give a place you can write to") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def stored_type(name: str, tensor: Tensor, kind: str) -> gguf.GGMLQuantizationType:
    """One that can hold the tensor: fp32 for norms, for the latent's rows where a small exponent would lose them."""
    small = name.endswith(LATENT_DOWN) and kind in ("f16", "q8_0")
    if tensor.ndim == 1 or small or (kind == "q8_0" and tensor.shape[-1] % BLOCK):
        return TYPES["f32"]
    return TYPES[kind]


def _add_config(writer: gguf.GGUFWriter, model: LatentModel, file_type: gguf.LlamaFileType) -> None:
    """All keys that llama.cpp asks for, those of experts as well, of which there are none."""
    base, spec, widths = model.base, model.spec, model.widths
    writer.add_name(model.path.name)
    writer.add_file_type(file_type)
    writer.add_context_length(base.max_position_embeddings)
    writer.add_embedding_length(base.hidden_size)
    writer.add_block_count(base.num_hidden_layers)
    writer.add_leading_dense_block_count(base.num_hidden_layers)
    writer.add_feed_forward_length(base.intermediate_size)
    writer.add_expert_feed_forward_length(base.intermediate_size)
    writer.add_expert_shared_count(0)
    writer.add_vocab_size(base.vocab_size)
    writer.add_layer_norm_rms_eps(base.rms_norm_eps)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(spec.q_lora_rank or 0)
    writer.add_kv_lora_rank(widths.kv_lora_rank)
    writer.add_key_length(widths.kv_lora_rank + widths.qk_rope_head_dim)
    writer.add_value_length(widths.kv_lora_rank)
    writer.add_key_length_mla(spec.qk_nope_head_dim + widths.qk_rope_head_dim)
    writer.add_value_length_mla(spec.v_head_dim)
    writer.add_rope_dimension_count(widths.qk_rope_head_dim)
    writer.add_rope_freq_base(model.theta)


def _tensors(model: LatentModel, progress: Progress) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as llama.cpp wants them: keys' and values' projections apart, the keys' transposed."""
    for name, tensor in model.tensors(torch.float32, progress):
        if name in OUTSIDE:
            yield OUTSIDE[name], tensor
            continue
        layer, inner = name.removeprefix("model.layers.").split(".", maxsplit=1)
        if inner != "self_attn.kv_b_proj.weight":
            yield f"blk.{layer}.{LAYER[inner]}", tensor
            continue
        by_head = tensor.unflatten(0, (model.spec.num_attention_heads, -1))
        keys, values = by_head.split((model.spec.qk_nope_head_dim, model.spec.v_head_dim), dim=1)
        yield f"blk.{layer}.attn_k_b.weight", keys.transpose(1, 2)
        yield f"blk.{layer}.attn_v_b.weight", values
