"""What healing won back: several models on three texts and the commonsense tasks, and the original with an int4 cache.

Run: python benchmarks/healed_models.py TASK_FOLDER VALID_FOLDER --limit 300 original=smollm2 healed=run/model ...

The first model is the original. Models that are in the result file already are not scored again.
"""

import argparse
from pathlib import Path

import torch
from best_start import CONTEXT, TEXTS, WINDOWS
from commonsense_tasks import NAMES, named
from result_file import ResultFile

from kvfold.evaluate import Examination


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path, metavar="TASK_FOLDER")
    parser.add_argument("valid", type=Path, metavar="VALID_FOLDER")
    parser.add_argument("models", nargs="+", type=named, metavar="NAME=MODEL", help="a row's name and its model")
    parser.add_argument("--limit", type=int, default=1000, help="items per task (default: 1000)")
    parser.add_argument("--out", type=Path, default=Path("results/healed_models.json"))
    arguments = parser.parse_args()
    examination = Examination.of(
        [arguments.valid / name for name in TEXTS.values()],
        context=CONTEXT,
        windows=WINDOWS["whole"],
        tasks=[f"offline_{name}" for name in NAMES],
        task_folder=arguments.tasks,
        limit=arguments.limit,
    )
    facts = {"texts": list(TEXTS.values()), "windows": examination.windows, "context": CONTEXT}
    results = ResultFile(arguments.out, **facts, limit=arguments.limit, dtype="bfloat16")
    _, original = arguments.models[0]
    rows = [(name, model, None) for name, model in arguments.models] + [("int4 cache", original, 4)]
    for name, model, bits in rows:
        results.row(
            name,
            lambda n=name, m=model, b=bits: examination.ask(n, m, cache_bits=b, dtype=torch.bfloat16).to_dict(),
        )


if __name__ == "__main__":
    main()
