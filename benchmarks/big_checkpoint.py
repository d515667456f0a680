"""Convert a checkpoint of Llama-2-7B's shape, weights only, and record peak memory and the time of each stage.

Run: python benchmarks/big_checkpoint.py FOLDER (about 25 GB of disk; the checkpoint is made if it is not there)

The weights are random: what is measured is the machinery, not the quality.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from result_file import ResultFile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from kvfold.checkpoint import OutputFolder

# The defaults of the class are Llama-2-7B's shape.
CONFIG = LlamaConfig(dtype="bfloat16", architectures=["LlamaForCausalLM"])
OPTIONS = {"layout": "per_head", "rope": "uniform", "qk_rope_head_dim": 16, "d_kv": 64, "factorize": "svd_joint"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/big_checkpoint.json"))
    parser.add_argument("--convert", action="store_true", help=argparse.SUPPRESS)  # the child that is measured
    arguments = parser.parse_args()
    if arguments.convert:
        convert(arguments.folder)
        return
    source = arguments.folder / "llama-7b-random"
    if not source.exists():
        write_random(source)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    results = ResultFile(arguments.out, shape="Llama-2-7B", checkpoint_bytes=size, options=OPTIONS)
    command = [sys.executable, __file__, str(arguments.folder), "--convert"]
    results.row("convert", lambda: json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def convert(folder: Path) -> None:
    import kvfold

    start = time.perf_counter()
    conversion = kvfold.convert(folder / "llama-7b-random", folder / "converted", overwrite=True, **OPTIONS)
    plan = conversion.plan
    row = {
        "seconds": conversion.seconds | {"total": round(time.perf_counter() - start, 1)},
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "estimated_memory_bytes": plan.estimated_memory_bytes,
        "kept": plan.kept,
    }
    print(json.dumps(row))


def write_random(folder: Path) -> None:
    """A sharded bf16 checkpoint with normal weights, written tensor by tensor."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(CONFIG).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    with OutputFolder(folder, source=None, max_shard_bytes=5 * 10**9) as out:
        for name, shape in shapes.items():
            out.add(name, torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator))
        CONFIG.save_pretrained(out.path)
        tokenizer().save_pretrained(out.path)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{index}": index for index in range(CONFIG.vocab_size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")))


if __name__ == "__main__":
    main()
