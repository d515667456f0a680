"""Healing curves of several conversions of one or more models, on the same text in the same order.

Run: python benchmarks/healing_curves.py recipes/figures/NAME.yaml TRAIN_FOLDER HELD_OUT.txt --work FOLDER

Trains on all texts of TRAIN_FOLDER. Models, conversions and runs are kept in FOLDER: a run that was stopped goes on, a
finished one is not made again. Writes results/curves_NAME.json, which `python benchmarks/figures.py` draws.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from result_file import ResultFile
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

import kvfold
from kvfold.checkpoint import new_folder
from kvfold.lab.tokenizer import BPE, make_tokenizer
from kvfold.train import TrainOptions, heal
from kvfold.train.curve import read_curve
from kvfold.train.held_out import HELD_OUT_FILE

POINTS = 600
"""At most so many of a curve are kept, each a mean of steps that follow each other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("train", type=Path, metavar="TRAIN_FOLDER")
    parser.add_argument("held_out", type=Path, metavar="HELD_OUT.txt")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="PART", help="rows whose names contain one, so that two can run")
    arguments = parser.parse_args()
    recipe = yaml.safe_load(arguments.recipe.read_text())
    texts = sorted(map(str, arguments.train.glob("*.txt")))
    results = ResultFile(
        Path("results") / f"curves_{arguments.recipe.stem}.json",
        recipe=recipe,
        texts=[Path(text).name for text in texts],
        held_out=arguments.held_out.name,
    )
    data = {"data": texts, "held_out": str(arguments.held_out)}
    for model, chosen in recipe["models"].items():
        rows = {f"{model}: {name}": changes for name, changes in chosen["curves"].items()}
        curves = {row: rows[row] for row in rows if any(part in row for part in arguments.only or ("",))}
        if not curves:
            continue
        work = arguments.work / model
        source = chosen.get("checkpoint") or pretrained(work, chosen["shape"], data | recipe["pretrain"], texts)
        for row, changes in curves.items():
            place = work / row.removeprefix(f"{model}: ").replace(" ", "-")
            options = data | recipe["heal"] | changes.get("heal", {})
            conversion = changes.get("convert", {}) and {"calibration": texts} | changes["convert"]
            results.row(row, lambda s=source, p=place, c=conversion, o=options: curve(s, p, c, o))


def pretrained(work: Path, shape: dict[str, Any], options: dict[str, Any], texts: list[str]) -> Path:
    """A model of this shape that was trained from scratch, and its tokenizer that was made for the texts."""
    if not (work / "untrained").exists():
        tokenizer = make_tokenizer(BPE, shape["vocab_size"], TrainOptions(data=tuple(texts)))
        set_seed(0)
        config = LlamaConfig(**shape, bos_token_id=0, eos_token_id=0, initializer_range=0.02)
        with new_folder(work / "untrained") as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    heal(work / "untrained", work / "pretraining", resume=True, progress=told, **options)
    return work / "pretraining" / "model"


def curve(source: Path | str, work: Path, conversion: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Convert, if there is a conversion, heal, and tell the losses."""
    start = source
    if conversion:
        start = work / "start"
        if not start.exists():
            kvfold.convert(source, start, **conversion)
    healing = heal(start, work / "run", resume=True, progress=told, **options)
    rows = read_curve(work / "run")
    size = -(-len(rows) // POINTS)
    parts = [rows[first : first + size] for first in range(0, len(rows), size)]
    return {
        "steps": [part[-1]["step"] for part in parts],
        "losses": [round(float(np.mean([row["loss"] for row in part])), 4) for part in parts],
        "held_out": [[row["tokens"], round(row["loss"], 4)] for row in read_curve(work / "run", HELD_OUT_FILE)],
        "first_loss": rows[0]["loss"],
        "last_loss": healing.last_loss,
        "last_steps": healing.window,
        "step_tokens": healing.tokens // healing.steps,
        "seconds": healing.seconds,
    }


def told(stage: str, done: int, total: int, note: str) -> None:
    if done % max(total // 20, 1) == 0:
        print(f"{stage} {done}/{total} {note}", flush=True)


if __name__ == "__main__":
    main()
