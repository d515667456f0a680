"""The fingerprint of a model: another one when anything of it is replaced, the same wherever it lies."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.checkpoint import open_checkpoint
from kvfold.checkpoint.fingerprint import fingerprint
from kvfold.errors import CheckpointError

MIB = 1024 * 1024


def fingerprint_of(folder: Path) -> str:
    return open_checkpoint(folder).fingerprint()


def rewrite(path: Path, data: bytes) -> None:
    """Replace what a file holds, but not the time at which it was changed."""
    state = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_is_the_same_wherever_the_model_lies(sharded, tmp_path):
    shutil.copytree(sharded, tmp_path / "copy")  # with the files' times, as `cp -a`
    (tmp_path / "link").symlink_to(sharded)
    assert len({fingerprint_of(folder) for folder in (sharded, tmp_path / "copy", tmp_path / "link", sharded)}) == 1


def test_other_files_in_the_folder_do_not_count(folder):
    before = fingerprint_of(folder)
    (folder / "README.md").write_text("")
    (folder / "other.safetensors").write_bytes(b"")
    assert fingerprint_of(folder) == before


@pytest.mark.parametrize("kind", ["folder", "sharded"])
def test_changes_with_the_weights(kind, request):
    folder = request.getfixturevalue(kind)
    before = fingerprint_of(folder)
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1
    state = file.stat()
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert file.stat().st_size == state.st_size
    assert fingerprint_of(folder) != before


def test_changes_with_the_shapes(folder):
    before = fingerprint_of(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"extra": torch.ones(1)}, file, metadata={"format": "pt"})
    assert fingerprint_of(folder) != before


@pytest.mark.parametrize(
    ("name", "old", "new"), [("config.json", '"silu"', '"gelu"'), ("tokenizer.json", "<unk>", "<UNK>")]
)
def test_changes_with_config_and_tokenizer(folder, tokenizer, name, old, new):
    tokenizer.save_pretrained(folder)
    before = fingerprint_of(folder)
    text = (folder / name).read_text()
    assert old in text
    rewrite(folder / name, text.replace(old, new).encode())
    assert fingerprint_of(folder) != before


def test_the_time_counts_where_a_change_falls_between_the_samples(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(3 * MIB))
    before = fingerprint([file], "")
    data = bytearray(3 * MIB)
    data[100_000] = 1
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))
    assert fingerprint([file], "") != before


@pytest.mark.parametrize("size", [1, 65_536, 65_537, 700_001, MIB])
def test_a_small_file_is_covered_whole(tmp_path, size):
    file = tmp_path / "weights"
    file.write_bytes(bytes(size))
    before = fingerprint([file], "")
    for position in {0, size // 3, size // 2, size - 1}:
        data = bytearray(size)
        data[position] = 1
        rewrite(file, bytes(data))
        assert fingerprint([file], "") != before
    rewrite(file, bytes(size))
    assert fingerprint([file], "") == before
    assert fingerprint([file], "other shapes") != before


def test_a_file_that_has_gone(folder, one_line):
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot read .*model.safetensors: ") as error:
        checkpoint.fingerprint()
    one_line(error)
