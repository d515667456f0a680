"""Two processes that share every batch compute what one computes, as replicas and sharded by FSDP2."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.lab import pretrain
from kvfold.train import heal
from kvfold.train.curve import read_curve

RUN = {"steps": 6, "batch": 4, "sequence_length": 16, "save_steps": 3, "precision": "float32", "learning_rate": 1e-3}


def torchrun(model: Path | None, out: Path, **options) -> None:
    """Heal the model, or train a new one, in two processes."""
    settings = json.dumps({"model": model and str(model), "out": str(out), "options": options})
    script = str(Path(__file__).with_name("several_processes.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("changes", [{}, {"fsdp": True}, {"fsdp": True, "trains": "lora"}], ids=str)
def test_two_processes_compute_what_one_does_and_go_on_where_they_were(converted, text, other_text, tmp_path, changes):
    options = RUN | {"data": text, "held_out": other_text, "held_out_steps": 3}
    one, two = tmp_path / "one", tmp_path / "two"
    heal(converted, one, **options | {name: value for name, value in changes.items() if name != "fsdp"})
    torchrun(converted, two, **options | changes)
    check_same(one, two)
    for finished in ("model", "checkpoint-6"):
        shutil.rmtree(two / finished)
    torchrun(converted, two, resume=True, **options | changes)
    check_same(one, two)


def test_two_processes_train_from_scratch_as_one_does(text, other_text, tmp_path):
    shape = {"attention": "gla", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    shape |= {"intermediate_size": 48, "vocab_size": 300, "tokenizer": "bpe"}
    options = RUN | shape | {"data": text, "held_out": other_text, "held_out_steps": 3}
    one, two = tmp_path / "one", tmp_path / "two"
    pretrain(one, **options)
    torchrun(None, two, **options, fsdp=True)
    check_same(one, two)


def check_same(one: Path, two: Path) -> None:
    for name in ("curve.jsonl", "held_out.jsonl"):
        expected, found = ([row["loss"] for row in read_curve(run, name)] for run in (one, two))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for place in ("checkpoint-6", "model"):
        weights = kvfold.load_model(one / place)[0].state_dict()
        for name, tensor in kvfold.load_model(two / place)[0].state_dict().items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-4)
    assert not list(two.glob(".*"))
