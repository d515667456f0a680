"""Accuracy of several models on the same items of benchmark tasks: the original, conversions, published starts.

Run: python benchmarks/commonsense_tasks.py TASK_FOLDER --limit 200 original=smollm2 latent=converted/

TASK_FOLDER holds YAML files of lm-evaluation-harness. Models that are in the result file already are not scored again.
"""

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from result_file import ResultFile

import kvfold
from kvfold.evaluate import evaluate_tasks, measure_cache

NAMES = ("arc_challenge", "arc_easy", "hellaswag", "mmlu", "openbookqa", "piqa", "winogrande")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="TASK_FOLDER")
    parser.add_argument("models", nargs="+", type=named, metavar="NAME=MODEL", help="a row's name and its model")
    parser.add_argument("--limit", type=int, default=1000, help="items per task (default: 1000)")
    parser.add_argument("--tasks", nargs="+", default=[f"offline_{name}" for name in NAMES], metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("results/commonsense_tasks.json"))
    arguments = parser.parse_args()
    results = ResultFile(arguments.out, tasks=arguments.tasks, limit=arguments.limit, dtype="bfloat16")
    for name, model in arguments.models:
        results.row(name, lambda model=model: score(model, arguments.tasks, arguments.folder, arguments.limit))


def named(argument: str) -> tuple[str, str]:
    name, sign, model = argument.partition("=")
    if not (name and sign and model):
        raise argparse.ArgumentTypeError(f"{argument!r} is not of the form NAME=MODEL")
    return name, model


def score(model: str, tasks: list[str], folder: Path, limit: int) -> dict[str, Any]:
    network, tokenizer = kvfold.load_model(model, dtype=torch.bfloat16)
    start = perf_counter()
    scores = evaluate_tasks(network, tokenizer, tasks, folder=folder, limit=limit)
    return {
        "cache_elements": measure_cache(network).elements_per_token_and_layer,
        "seconds": perf_counter() - start,
        **scores.to_dict(),
    }


if __name__ == "__main__":
    main()
