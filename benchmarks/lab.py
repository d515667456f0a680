"""A sweep of the lab on texts of one's own, and its results and curves in one file.

Run: python benchmarks/lab.py recipes/lab/NAME.yaml TRAIN_FOLDER HELD_OUT.txt --work FOLDER [--workers N]

Trains on all texts of TRAIN_FOLDER instead of the recipe's data. Runs are kept in FOLDER: begun ones go on, finished
ones are not made again. Writes results/lab_NAME.json, which `python benchmarks/figures.py` draws.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from result_file import ResultFile

from kvfold.checkpoint import write_text
from kvfold.cli.progress import Reporter
from kvfold.lab import ablate, read_sweep
from kvfold.lab.summary import difference_curves, loss_curves

POINTS = 400
"""At most so many of a curve are kept, each a mean of steps that follow each other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("train", type=Path, metavar="TRAIN_FOLDER")
    parser.add_argument("held_out", type=Path, metavar="HELD_OUT.txt")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time (default: 1)")
    arguments = parser.parse_args()
    content = yaml.safe_load(arguments.recipe.read_text())
    texts = sorted(map(str, arguments.train.glob("*.txt")))
    facts = {"recipe": content, "texts": [Path(text).name for text in texts], "held_out": arguments.held_out.name}
    content = content | {"train": content["train"] | {"data": texts, "held_out": str(arguments.held_out)}}
    arguments.work.mkdir(parents=True, exist_ok=True)
    recipe, out = arguments.work / "recipe.yaml", arguments.work / "runs"
    write_text(recipe, yaml.safe_dump(content, sort_keys=False))
    results = ResultFile(Path("results") / f"lab_{arguments.recipe.stem}.json", **facts)
    results.row("sweep", lambda: found(recipe, out, arguments.workers))


def found(recipe: Path, out: Path, workers: int) -> dict[str, Any]:
    with Reporter() as progress:
        summary = ablate(recipe, out, workers=workers, progress=progress)
    del summary["provenance"]  # the result file has its own
    sweep = read_sweep(recipe)
    differences, losses = difference_curves(sweep, out, "tokens"), loss_curves(sweep, out, "tokens")
    return summary | {
        "differences_by_step": [thinned(curve) for curve in differences],
        "losses_by_step": [thinned(curve) for curve in losses],
    }


def thinned(curve: dict[str, Any]) -> dict[str, Any]:
    """A curve with fewer points."""
    size = -(-len(curve["x"]) // POINTS)
    thin = curve | {"x": curve["x"][size - 1 :: size]}  # as many as `means` gives
    if "differences" in curve:
        return thin | {"differences": [means(values, size) for values in curve["differences"]]}
    return thin | {"losses": means(curve["losses"], size)}


def means(values: list[float], size: int) -> list[float]:
    whole = len(values) // size * size
    return np.asarray(values[:whole]).reshape(-1, size).mean(1).round(5).tolist()


if __name__ == "__main__":
    main()
