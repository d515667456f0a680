"""`kill -9` of a running command: at OUT there is then the finished folder or none, and the next run goes on."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold import load_model
from kvfold.cli import main as cli

HasCome = Callable[[Path], bool]

# The moments to kill at, each with what tells from outside that it has come. Weights wait in memory until the end.
MOMENTS: dict[str, HasCome] = {
    "folder made": lambda place: (place / ".out.partial" / "model").exists(),
    "weights written": lambda place: any(place.glob(".out.partial/model/*.safetensors")),
    "folder in place": lambda place: (place / "out").exists(),
}


def _run(command: Sequence[str]) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        sys.exit(cli.main(command))


def kill(command: Sequence[str], place: Path, has_come: HasCome, later: float = 0.0) -> None:
    """Run a command in a process of its own and kill that `later` seconds after a moment has come."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(command,))
    process.start()
    while process.is_alive() and not has_come(place):
        time.sleep(0.0005)
    time.sleep(later)
    process.kill()
    process.join()


@pytest.fixture
def save_model(tmp_path, tokenizer, randomise) -> Callable[..., Path]:
    def save(**sizes) -> Path:
        config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, num_key_value_heads=2)
        randomise(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_leaves_the_finished_folder_or_none(save_model, tmp_path, capsys, moment):
    """The model is large enough for writing it to take a while."""
    model = save_model(hidden_size=128, intermediate_size=256, num_hidden_layers=4, vocab_size=50000)
    place = tmp_path / "place"
    place.mkdir()
    command = ["convert", str(model), str(place / "out"), "--cache-ratio", "0.5", "--calibration-tokens", "0"]
    kill(command, place, MOMENTS[moment])
    left = os.listdir(place)
    assert set(left) <= {"out", ".out.partial"}
    if "out" in left:
        load_model(place / "out")
    assert cli.main([*command, "--overwrite"]) == 0
    assert os.listdir(place) == ["out"]
    load_model(place / "out")
    capsys.readouterr()


METHODS = {
    "refit": (),
    "polish": ("--polish-steps", "3"),
    "per layer": ("--per-layer", "--polish-steps", "2"),
    "weights alone": ("--calibration-tokens", "0"),
}


def steps_finished(count: int) -> HasCome:
    """Whether the journal holds so many steps; the state of the layers so far is one of them."""

    def has_come(place: Path) -> bool:
        index = place / ".out.partial/journal/journal.json"
        return index.exists() and len(json.loads(index.read_text())["journal"]["entries"]) >= count

    return has_come


@pytest.mark.parametrize("method", METHODS)
def test_killed_again_and_again_it_ends_with_the_same_weights(save_model, tmp_path, capsys, method):
    """Killed while text is read, at the beginning or in the middle of one layer after another, and at the end."""
    model = save_model(hidden_size=32, intermediate_size=24, num_hidden_layers=4, vocab_size=32)
    text = tmp_path / "text.txt"
    letters = torch.randint(26, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    text.write_text(" ".join(chr(ord("a") + letter) for letter in letters))
    calibration = ("--calibration", str(text), "--calibration-tokens", "256", "--calibration-window", "32")
    options = ("--cache-ratio", "0.4", *calibration, *METHODS[method], "--overwrite")
    whole, place = tmp_path / "whole", tmp_path / "place"
    place.mkdir()
    command = ["convert", str(model), str(place / "out"), *options]
    kill(command, place, MOMENTS["folder made"], later=0.01)
    for count, later in ((1, 0.0), (2, 0.01), (3, 0.005), (4, 0.0), (5, 0.0)):
        kill(command, place, steps_finished(count), later)
    finished = (place / "out").exists()  # only where the killer was kept waiting
    assert cli.main(command) == 0
    assert os.listdir(place) == ["out"]
    assert finished or json.loads((place / "out/kvfold.json").read_text())["resumed_from"] is not None
    assert cli.main(["convert", str(model), str(whole), *options]) == 0
    checksums = [hashlib.sha256((out / "model.safetensors").read_bytes()).digest() for out in (place / "out", whole)]
    assert checksums[0] == checksums[1]
    capsys.readouterr()


def test_a_healing_that_is_killed_again_and_again_has_the_same_losses(save_model, tmp_path, capsys, monkeypatch):
    """Killed before the first checkpoint, while one is written, and between two."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = save_model(hidden_size=32, intermediate_size=24, num_hidden_layers=2, vocab_size=32)
    text = tmp_path / "text.txt"
    text.write_text(" ".join("abcdefg" * 60))
    place = tmp_path / "place"
    settings = ("--data", str(text), "--steps", "24", "--batch", "2", "--sequence-length", "16", "--save-steps", "4")
    command = ["heal", str(model), str(place / "run"), *settings, "--resume"]
    moments: tuple[HasCome, ...] = (
        lambda place: (place / "run/curve.jsonl").exists(),
        lambda place: any(place.glob("run/.checkpoint-*")),
        lambda place: (place / "run/checkpoint-8").exists(),
        lambda place: any(place.glob("run/.checkpoint-16*")),
        lambda place: any(place.glob("run/.model*")),
    )
    for has_come in moments:
        kill(command, place, has_come)
    assert cli.main([*command, "--json"]) == 0
    assert cli.main(["heal", str(model), str(tmp_path / "whole"), *settings]) == 0
    capsys.readouterr()
    curves = [
        [json.loads(line)["loss"] for line in (run / "curve.jsonl").read_text().splitlines()]
        for run in (place / "run", tmp_path / "whole")
    ]
    assert len(curves[0]) == 24 and curves[0] == curves[1]
    weights = [(run / "model/model.safetensors").read_bytes() for run in (place / "run", tmp_path / "whole")]
    assert weights[0] == weights[1]
