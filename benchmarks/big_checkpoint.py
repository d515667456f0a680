"""Convert a checkpoint of Llama-2-7B's shape: peak memory and the time of each stage, and a killed run that resumes.

Run: python benchmarks/big_checkpoint.py FOLDER [--layers N] (about 25 GB of disk; the checkpoint is made if it is not
there)

The weights are random: what is measured is the machinery, not the quality. One layer is in memory at a time, so fewer
layers tell the same peak in less time.
"""

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from result_file import ResultFile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from kvfold.checkpoint import OutputFolder
from kvfold.texts import CALIBRATION, EVALUATION, read_text

OPTIONS: dict[str, dict[str, Any]] = {
    "weights only": {
        "layout": "per_head",
        "rope": "uniform",
        "qk_rope_head_dim": 16,
        "d_kv": 64,
        "factorize": "svd_joint",
        "calibration_tokens": 0,
    },
    "calibrated": {"cache_ratio": 0.3125, "calibration_tokens": 8192, "one_shot": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32, help="layers of the checkpoint (default: 32)")
    parser.add_argument("--rows", metavar="PART", default="", help="only rows whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("results/big_checkpoint.json"))
    parser.add_argument("--convert", choices=OPTIONS, help=argparse.SUPPRESS)  # the child that is measured
    arguments = parser.parse_args()
    source = arguments.folder / f"llama-7b-random-{arguments.layers}-layers"
    out = arguments.folder / "converted"
    if arguments.convert:
        convert(source, out, OPTIONS[arguments.convert])
        return
    if not source.exists():
        write_random(source, arguments.layers)
    results = ResultFile(arguments.out, shape="Llama-2-7B", options=OPTIONS)
    for name in OPTIONS:
        row = f"{name}, {arguments.layers} layers"
        if arguments.rows in row:
            child = [sys.executable, __file__, str(arguments.folder), "--layers", str(arguments.layers)]
            command = [*child, "--convert", name]
            results.row(row, lambda command=command, name=name: measure(command, source, out, name == "calibrated"))


def measure(command: list[str], source: Path, out: Path, kill: bool) -> dict[str, Any]:
    """One run of the child, and with `kill` a second one that is killed half-way and started again."""
    row = _run(command)
    row["checkpoint_bytes"] = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    if kill:
        expected = checksums(out)
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(row["seconds"]["total"] / 2)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        again = _run(command)
        row["resumed"] = {"from": again["resumed_from"], "seconds": again["seconds"]["total"]}
        row["resumed"]["identical"] = checksums(out) == expected
    return row


def _run(command: list[str]) -> dict[str, Any]:
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def convert(source: Path, out: Path, options: dict[str, Any]) -> None:
    import kvfold

    start = time.perf_counter()
    conversion = kvfold.convert(source, out, overwrite=True, **options)
    row = {
        "seconds": conversion.seconds | {"total": round(time.perf_counter() - start, 1)},
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "estimated_memory_bytes": conversion.plan.estimated_memory_bytes,
        "kept": conversion.plan.kept,
        "resumed_from": conversion.resumed_from,
    }
    print(json.dumps(row))


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of the weights, by file name."""
    sums = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def write_random(folder: Path, layers: int) -> None:
    """A sharded bf16 checkpoint with normal weights, written tensor by tensor."""
    # The defaults of the class are Llama-2-7B's shape.
    config = LlamaConfig(dtype="bfloat16", architectures=["LlamaForCausalLM"], num_hidden_layers=layers)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    with OutputFolder(folder, source=None, max_shard_bytes=5 * 10**9) as out:
        for name, shape in shapes.items():
            out.add(name, torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator))
        config.save_pretrained(out.path)
        tokenizer(config.vocab_size).save_pretrained(out.path)


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """The words of the shipped texts, as many as there is room for."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = dict.fromkeys(["[UNK]", *(read_text(CALIBRATION) + read_text(EVALUATION)).split()])
    vocabulary = {word: index for index, word in enumerate(list(words)[:size])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


if __name__ == "__main__":
    main()
