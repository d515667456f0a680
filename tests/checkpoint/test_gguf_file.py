"""Reading GGUF files: the real SmolLM2, and tiny ones written here and broken."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvfold.checkpoint import GgufCheckpoint, open_checkpoint, resolve_model
from kvfold.errors import CheckpointError, UnsupportedModelError

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers.": "blk.",
}


def pairs_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The row order of llama.cpp: a rotary pair's two rows are neighbours."""
    head_dim = weight.shape[0] // heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[order]


def write_gguf(path: Path, model, arch: str, *, extra=None, fields=None, omit: str | None = None) -> Path:
    """A GGUF file without tokenizer that holds `model`; plus `extra` tensors and string `fields`, less `omit`."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, value in (fields or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint16(key, value)
    for name, tensor in model.state_dict().items():
        if arch == "llama" and "q_proj" in name:
            tensor = pairs_together(tensor, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            tensor = pairs_together(tensor, config.num_key_value_heads)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if name != omit and not (name == "output.weight" and config.tie_word_embeddings):
            writer.add_tensor(name, tensor.float().numpy())
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path, model) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", model, "llama")


def assert_same(checkpoint, model) -> None:
    wanted = model.state_dict()
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert set(checkpoint.names()) == set(wanted)
    for name, tensor in wanted.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        torch.testing.assert_close(checkpoint.read(name), tensor, rtol=0, atol=1e-6)


def test_llama(file, model):
    checkpoint = open_checkpoint(str(file))
    assert isinstance(checkpoint, GgufCheckpoint)
    assert (checkpoint.source, checkpoint.path, checkpoint.dtype) == (str(file), file, torch.float32)
    assert checkpoint.generation_config is None
    assert not checkpoint.config.tie_word_embeddings
    assert checkpoint.nbytes() == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert_same(checkpoint, model)


@pytest.mark.parametrize("tied", [True, False])
def test_qwen2(tmp_path, tied):
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", model, "qwen2"))
    assert checkpoint.config.model_type == "qwen2"
    assert_same(checkpoint, model)


@pytest.mark.real_model
def test_smollm2_equals_the_load_of_transformers():
    checkpoint = open_checkpoint("smollm2")
    assert checkpoint.config.tie_word_embeddings
    assert checkpoint.config.num_key_value_heads == 3
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint.config)
    # What from_pretrained(..., gguf_file=..., GgufConfig(dequantize=True)) calls, after parsing the file twice more.
    wanted = load_gguf_checkpoint(resolve_model("smollm2"), return_tensors=True, model_to_load=model)["tensors"]
    assert set(checkpoint.names()) == set(wanted) == set(model.state_dict()) - {"lm_head.weight"}
    for name, tensor in wanted.items():
        assert torch.equal(checkpoint.read(name), tensor), name


@pytest.mark.real_model
def test_smollm2_tokenizer_round_trip(tmp_path):
    checkpoint = open_checkpoint("smollm2")
    first = checkpoint.load_tokenizer()
    checkpoint.load_tokenizer = lambda: first
    checkpoint.save_tokenizer(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "Hello, world! 1234 éü 中文  \n\t<|im_start|>"
    assert first(text)["input_ids"] == again(text)["input_ids"]
    assert first.chat_template == again.chat_template
    assert first.eos_token == again.eos_token == "<|im_end|>"


def test_reading_maps_nothing_and_changed_files_are_opened_anew(file, model, tmp_path):
    name = "model.norm.weight"
    assert open_checkpoint(file).read(name)[0] == 1
    torch.nn.init.constant_(model.model.norm.weight, 2.0)
    write_gguf(tmp_path / "new.gguf", model, "llama", fields={"general.note": "longer"}).replace(file)
    assert open_checkpoint(file).read(name)[0] == 2


def test_fingerprint(file, model, tmp_path):
    before = open_checkpoint(file).fingerprint()
    assert open_checkpoint(file).fingerprint() == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    write_gguf(file, model, "llama")
    assert open_checkpoint(file).fingerprint() != before


def test_config_is_not_shared(file):
    open_checkpoint(file).config.hidden_size = 1
    assert open_checkpoint(file).config.hidden_size == 16


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        GgufCheckpoint(tmp_path / "none.gguf", source="none")


@pytest.mark.parametrize("keep", [0, 3, 10, 40, 300, 700, 0.5, -1, -40])
def test_truncated(file, keep, one_line):
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match="is truncated or no GGUF file") as error:
        open_checkpoint(file)
    assert str(file) in one_line(error)


def test_no_gguf(file, one_line):
    file.write_bytes(b"PK\x03\x04" + file.read_bytes()[4:])
    with pytest.raises(CheckpointError, match="GGUF magic invalid") as error:
        open_checkpoint(file)
    one_line(error)


def test_truncated_after_opening(file, one_line):
    checkpoint = open_checkpoint(file)
    file.with_suffix(".new").write_bytes(file.read_bytes()[:2000])
    file.with_suffix(".new").replace(file)
    with pytest.raises(CheckpointError, match=r"cannot read tensor 'lm_head\.weight'") as error:
        checkpoint.read("lm_head.weight")
    one_line(error)


def test_not_finite(tmp_path, model, one_line):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.inf
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", model, "llama"))
    with pytest.raises(CheckpointError, match="holds NaN or Inf") as error:
        checkpoint.read("model.layers.1.mlp.up_proj.weight")
    assert "model.layers.1.mlp.up_proj.weight" in one_line(error)


def test_missing_tensor(tmp_path, model, one_line):
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", omit="blk.1.attn_v.weight")
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'blk\.1\.attn_v\.weight'") as error:
        open_checkpoint(path)
    one_line(error)


def test_shape_that_contradicts_the_metadata(tmp_path, model, one_line):
    bad = np.zeros((5, 16), dtype=np.float32)
    path = write_gguf(
        tmp_path / "tiny.gguf", model, "llama", omit="blk.1.attn_v.weight", extra={"blk.1.attn_v.weight": bad}
    )
    with pytest.raises(CheckpointError, match=r"with shape \(5, 16\), its metadata say \(8, 16\)") as error:
        open_checkpoint(path)
    one_line(error)


def test_unknown_architecture(tmp_path, model, one_line):
    path = write_gguf(tmp_path / "tiny.gguf", model, "gemma3")
    with pytest.raises(UnsupportedModelError, match="architecture 'gemma3'") as error:
        open_checkpoint(path)
    assert "llama, qwen2" in one_line(error)


def test_tensor_without_a_place(tmp_path, model, one_line):
    extra = {"blk.0.attn_q_norm.weight": np.ones(4, dtype=np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", extra=extra)
    with pytest.raises(UnsupportedModelError, match="attn_q_norm") as error:
        open_checkpoint(path)
    one_line(error)


@pytest.mark.parametrize(
    ("extra", "fields", "part"),
    [
        ({"rope_freqs.weight": np.ones(2, dtype=np.float32)}, {}, "rope_freqs.weight"),
        ({}, {"llama.rope.scaling.type": "yarn"}, "yarn"),
    ],
)
def test_scaled_rotary_frequencies(tmp_path, model, extra, fields, part, one_line):
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", extra=extra, fields=fields)
    with pytest.raises(UnsupportedModelError, match="scales its rotary frequencies") as error:
        open_checkpoint(path)
    assert part in one_line(error)


def test_one_part_of_several(tmp_path, model, one_line):
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", fields={"split.count": 3})
    with pytest.raises(UnsupportedModelError, match="is one of 3 parts; merge them first") as error:
        open_checkpoint(path)
    one_line(error)


def test_missing_tokenizer(file, one_line):
    with pytest.raises(CheckpointError, match="has no tokenizer that transformers can rebuild") as error:
        open_checkpoint(file).load_tokenizer()
    one_line(error)
