"""Reading model folders, whole and broken."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from kvfold.checkpoint import SafetensorsCheckpoint, open_checkpoint
from kvfold.errors import CheckpointError, KvfoldError, UnsupportedModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def message_of(one_line):
    def message(folder: Path, kind: type[KvfoldError] = CheckpointError) -> str:
        with pytest.raises(kind) as error:
            open_checkpoint(str(folder))
        return one_line(error)

    return message


def edit_config(folder: Path, **entries) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def change_tensors(file: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["folder", "sharded"])
def test_reads_every_tensor(kind, model, request):
    path = request.getfixturevalue(kind)
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    wanted = model.state_dict()
    assert set(checkpoint.names()) == set(wanted)
    for name, tensor in wanted.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name), tensor)
    assert checkpoint.nbytes() == sum(tensor.nbytes for tensor in wanted.values())


def test_knows_its_origin(folder):
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.source, checkpoint.path, checkpoint.dtype) == (str(folder), folder, torch.float32)
    assert isinstance(checkpoint.config, LlamaConfig)
    assert checkpoint.generation_config is not None


def test_no_generation_config(folder):
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).generation_config is None


def test_broken_generation_config(folder, message_of):
    (folder / "generation_config.json").write_text("[")
    assert "generation_config.json is not valid JSON" in message_of(folder)


def test_dtype_is_that_of_most_bytes(folder, model):
    model.to(torch.bfloat16).save_pretrained(folder)
    change_tensors(folder / WEIGHTS, model__norm__weight=torch.ones(16))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.read("model.norm.weight").dtype == torch.float32
    assert checkpoint.read(Q_PROJ).dtype == torch.bfloat16


def test_tied_output_layer_is_absent(folder):
    assert "lm_head.weight" in open_checkpoint(folder).names()
    edit_config(folder, tie_word_embeddings=True)
    assert "lm_head.weight" not in open_checkpoint(folder).names()


def test_rotary_buffers_of_old_checkpoints_are_absent(folder):
    change_tensors(folder / WEIGHTS, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(2))
    assert not any("rotary" in name for name in open_checkpoint(folder).names())


def test_no_file_stays_mapped(folder):
    checkpoint = open_checkpoint(folder)
    tensor = checkpoint.read(Q_PROJ)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    (folder / WEIGHTS).write_bytes(b"")
    assert torch.isfinite(tensor).all()


def test_missing_folder(tmp_path, message_of):
    assert f"{str(tmp_path / 'none')!r} does not exist" in message_of(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", [".", WEIGHTS, "config.json"])
def test_what_may_not_be_read(folder, message_of, name):
    mode = (folder / name).stat().st_mode
    (folder / name).chmod(0)
    message = message_of(folder)
    (folder / name).chmod(mode)
    assert "cannot read" in message
    assert "Permission denied" in message


def test_missing_config(folder, message_of):
    (folder / "config.json").unlink()
    assert f"{folder} has no config.json" in message_of(folder)


@pytest.mark.parametrize(("text", "part"), [("{", "is not valid JSON"), ("[]", "holds a JSON list")])
def test_config_is_no_json_object(folder, text, part, message_of):
    (folder / "config.json").write_text(text)
    assert part in message_of(folder)


def test_config_without_model_type(folder, message_of):
    (folder / "config.json").write_text("{}")
    assert "config.json has no model_type" in message_of(folder)


def test_config_of_wrong_type(folder, message_of):
    edit_config(folder, hidden_size="wide")
    message = message_of(folder)
    assert "is not a valid llama config" in message
    assert "hidden_size" in message


def test_unknown_model_type(folder, message_of):
    edit_config(folder, model_type="llamma", auto_map={"AutoConfig": "code.Config"})
    assert "model_type 'llamma'" in message_of(folder, UnsupportedModelError)


def test_quantised(folder, message_of):
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    message = message_of(folder, UnsupportedModelError)
    assert "quantization_config: fp8" in message
    assert "give the unquantised model" in message


def test_quantised_without_saying_so(folder, message_of):
    change_tensors(folder / WEIGHTS, model__norm__weight=torch.ones(16).to(torch.float8_e4m3fn))
    message = message_of(folder, UnsupportedModelError)
    assert "'model.norm.weight'" in message
    assert "F8_E4M3" in message


def test_no_weights(folder, message_of):
    (folder / WEIGHTS).unlink()
    assert f"has neither {WEIGHTS} nor {INDEX}" in message_of(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_only(folder, name, message_of):
    (folder / WEIGHTS).rename(folder / name)
    message = message_of(folder)
    assert f"pickled weights only ({name})" in message
    assert "can run arbitrary code" in message
    assert "convert it to safetensors" in message


def test_pickle_beside_safetensors_is_ignored(folder):
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert open_checkpoint(folder).names()


def test_gguf_in_a_folder(tmp_path, message_of):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert f"give its GGUF file itself: {tmp_path / 'model.gguf'}" in message_of(tmp_path)


def test_missing_shard(sharded, message_of):
    shard = shards_of(sharded)[1]
    shard.unlink()
    message = message_of(sharded)
    assert f"lacks the shard {shard.name}" in message
    assert "download it again" in message


def test_tensor_in_index_but_not_in_shard(sharded, message_of):
    shard = next(file for file in shards_of(sharded) if Q_PROJ in load_file(file))
    save_file({"other": torch.ones(1)}, shard)
    message = message_of(sharded)
    assert "is not in" in message
    assert shard.name in message


@pytest.mark.parametrize(
    ("index", "part"),
    [
        ("{}", "has no weight_map"),
        ("nonsense", "is not valid JSON"),
        (json.dumps({"weight_map": {"a": "../model.safetensors"}}), "which is not a file name"),
        (json.dumps({"weight_map": {"a": 1}}), "which is not a file name"),
    ],
)
def test_broken_index(sharded, index, part, message_of):
    (sharded / INDEX).write_text(index)
    assert part in message_of(sharded)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated(folder, keep, message_of):
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:keep])
    message = message_of(folder)
    assert f"{file} is truncated or corrupt" in message


def test_longer_than_its_header_says(folder, message_of):
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes() + b"more")
    assert f"{file} is truncated or corrupt" in message_of(folder)


def test_corrupt_header(folder, message_of):
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:8] + b"\xff" + file.read_bytes()[9:])
    assert f"{file} is truncated or corrupt" in message_of(folder)


def test_truncated_after_opening(folder, one_line):
    checkpoint = open_checkpoint(folder)
    (folder / WEIGHTS).write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot read tensor") as error:
        checkpoint.read(Q_PROJ)
    assert Q_PROJ in one_line(error)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_not_finite(folder, value, dtype, one_line):
    bad = torch.zeros(16, 16, dtype=dtype)
    bad[7, 3] = value
    change_tensors(folder / WEIGHTS, **{Q_PROJ: bad})
    with pytest.raises(CheckpointError, match="holds NaN or Inf") as error:
        open_checkpoint(folder).read(Q_PROJ)
    assert Q_PROJ in one_line(error)


def test_unknown_tensor(folder):
    checkpoint = open_checkpoint(folder)
    for ask in (checkpoint.read, checkpoint.shape):
        with pytest.raises(CheckpointError, match="has no tensor 'lm_heat'"):
            ask("lm_heat")


def test_empty_and_integer_tensors(folder):
    change_tensors(folder / WEIGHTS, empty=torch.zeros(0, 3), count=torch.tensor(7))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.read("empty").shape == (0, 3)
    assert checkpoint.read("count").item() == 7


def test_tokenizer_round_trip(folder, tokenizer, tmp_path):
    tokenizer.save_pretrained(folder)
    open_checkpoint(folder).save_tokenizer(tmp_path)
    edit = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(edit))
    (tmp_path / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
    again = open_checkpoint(tmp_path).load_tokenizer()
    assert again("a b a")["input_ids"] == [1, 2, 1]
    assert again.chat_template == tokenizer.chat_template


def test_missing_tokenizer(folder, one_line):
    with pytest.raises(CheckpointError, match=r"has no tokenizer; copy tokenizer\.json") as error:
        open_checkpoint(folder).load_tokenizer()
    one_line(error)


def test_broken_tokenizer(folder, tokenizer, one_line):
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be loaded") as error:
        open_checkpoint(folder).load_tokenizer()
    one_line(error)


def test_complete(folder, sharded):
    open_checkpoint(folder).check_complete()
    open_checkpoint(sharded).check_complete()


INCOMPLETE = {
    "missing": ({Q_PROJ: None}, f"has no tensor '{Q_PROJ}'"),
    "shape": ({Q_PROJ: torch.ones(4, 16)}, f"tensor {Q_PROJ} has shape (4, 16), its config says (16, 16)"),
    "surplus": ({f"{Q_PROJ}_scale": torch.ones(1)}, f"has the tensor {Q_PROJ}_scale, for which the llama model"),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_does_not_fit_its_config(folder, name, one_line):
    changes, message = INCOMPLETE[name]
    change_tensors(folder / WEIGHTS, **changes)
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        open_checkpoint(folder).check_complete()
    one_line(error)


def test_config_that_gives_no_model(folder, one_line):
    edit_config(folder, hidden_act="gelid")
    with pytest.raises(CheckpointError, match="gives no llama model .*gelid") as error:
        open_checkpoint(folder).check_complete()
    one_line(error)


def test_stored_output_layer_must_be_the_one_it_is_tied_to(folder, one_line):
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    edit_config(folder, tie_word_embeddings=True)
    change_tensors(folder / WEIGHTS, lm_head__weight=embedding.clone())
    open_checkpoint(folder).check_complete()
    for other in (embedding.flip(0), embedding[:-1].clone(), embedding.half()):
        change_tensors(folder / WEIGHTS, lm_head__weight=other)
        with pytest.raises(CheckpointError, match="another lm_head.weight than model.embed_tokens.weight") as error:
            open_checkpoint(folder).check_complete()
        one_line(error)
