"""What healing won back: several models on three texts and the commonsense tasks, and the original with an int4 cache.

Run: python benchmarks/healed_models.py TASK_FOLDER VALID_FOLDER --limit 300 original=smollm2 healed=run/model ...

The first model is the original. Models that are in the result file already are not scored again.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from best_start import CONTEXT, TEXTS, WINDOWS, load_texts, score
from commonsense_tasks import NAMES, named
from commonsense_tasks import score as task_scores
from result_file import ResultFile

import kvfold
from kvfold.evaluate import measure_cache
from kvfold.evaluate.quantized import quantized_cache_factory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path, metavar="TASK_FOLDER")
    parser.add_argument("valid", type=Path, metavar="VALID_FOLDER")
    parser.add_argument("models", nargs="+", type=named, metavar="NAME=MODEL", help="a row's name and its model")
    parser.add_argument("--limit", type=int, default=1000, help="items per task (default: 1000)")
    parser.add_argument("--out", type=Path, default=Path("results/healed_models.json"))
    arguments = parser.parse_args()
    names = [f"offline_{name}" for name in NAMES]
    results = ResultFile(arguments.out, texts=TEXTS, windows=WINDOWS["whole"], context=CONTEXT, limit=arguments.limit)
    original = arguments.models[0][1]
    results.row("int4 cache", lambda: with_int4_cache(original, arguments.valid))
    for name, model in arguments.models:
        results.row(name, lambda m=model: on_texts(m, arguments.valid) | on_tasks(m, names, arguments))


def on_texts(model: str, valid: Path) -> dict[str, Any]:
    network, tokenizer = kvfold.load_model(model, dtype=torch.float32)
    return {"nats": score(network, load_texts(tokenizer, valid), "whole")}


def on_tasks(model: str, names: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    return task_scores(model, names, arguments.tasks, arguments.limit)


def with_int4_cache(model: str, valid: Path) -> dict[str, Any]:
    """As many bytes as a conversion to 31.25 % has in bf16; texts alone."""
    network, tokenizer = kvfold.load_model(model, dtype=torch.float32)
    factory = quantized_cache_factory(network.config, nbits=4)
    return {
        "cache_elements": measure_cache(network).elements_per_token_and_layer,
        "nats": score(network, load_texts(tokenizer, valid), "whole", factory),
    }


if __name__ == "__main__":
    main()
