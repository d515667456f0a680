"""`kill -9` of a real process: at OUT there is then the finished folder or none, and the next run cleans up."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold import load_model
from kvfold.cli import main as cli

# The moments to kill at, each with what tells from outside that it has come. Weights wait in memory until the end.
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "folder made": lambda place: (place / ".out.partial" / "model").exists(),
    "weights written": lambda place: any(place.glob(".out.partial/model/*.safetensors")),
    "folder in place": lambda place: (place / "out").exists(),
}


@pytest.fixture
def model(tmp_path, tokenizer, randomise) -> Path:
    """Large enough for writing it to take a while."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", **sizes, num_key_value_heads=2, vocab_size=50000)
    randomise(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_kill_leaves_the_finished_folder_or_none(model, tmp_path, capsys):
    options = ("--cache-ratio", "0.5", "--calibration-tokens", "0")
    for name, has_come in MOMENTS.items():
        place = tmp_path / name
        place.mkdir()
        command = ["convert", str(model), str(place / "out"), *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "kvfold.cli.main", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and not has_come(place):
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        left = sorted(path.name for path in place.iterdir())
        assert set(left) <= {"out", ".out.partial"}
        if "out" in left:
            load_model(place / "out")
        assert cli.main([*command, "--overwrite"]) == 0
        assert os.listdir(place) == ["out"]
        load_model(place / "out")
    capsys.readouterr()
