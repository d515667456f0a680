"""How good the start is before any training: strategies, factorisations and budgets on SmolLM2, on three texts.

Run: python benchmarks/best_start.py TRAIN_FOLDER VALID_FOLDER [--rows PART]

Calibrated on all texts of TRAIN_FOLDER; perplexity divided by the original's on WikiText-2 raw test, a psychology
textbook (near the calibration text) and a novel, 24 windows of 512 tokens each. Rows that are in the result file
already are not measured again; PART picks those whose name contains it.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from result_file import ResultFile

import kvfold
from kvfold.evaluate import measure_cache, perplexity
from kvfold.texts import read_text, token_ids

MODEL = "smollm2"
CONTEXT, WINDOWS = 512, 24
CALIBRATION_TOKENS = 16384
TEXTS = {
    "wikitext2": "wikitext2-test.raw.txt",
    "psychology": "psychology.txt",
    "novel": "agatha-christie_the-mysterious-affair-at-styles.txt",
}
RATIOS = (0.5, 0.3125, 0.1875, 0.125)
ONE_SHOT = {"one_shot": True}
EXPORTABLE = ("assigned", "stride", "fastest")
ROROPE = ("rorope", "rorope-2", "rorope-4")
PER_HEAD = ("rotation_error", "2-norm", "high", "low", "uniform")
FACTORIZATIONS = ("attention_aware", "svd_whitened", "pca_balanced", "svd_joint", "svd_split")


def rows() -> dict[str, dict[str, Any]]:
    """Options by row name, the headline first."""
    table: dict[str, dict[str, Any]] = {}
    for ratio in RATIOS:
        table[f"mixed, one shot, {ratio:.2%}"] = ONE_SHOT | {"cache_ratio": ratio}
    for ratio in RATIOS:
        table[f"mixed per layer, one shot, {ratio:.2%}"] = ONE_SHOT | {"cache_ratio": ratio, "per_layer": True}
    for ratio in RATIOS:
        table[f"mixed, refit, {ratio:.2%}"] = {"cache_ratio": ratio}
    for ratio in RATIOS:
        table[f"mixed per layer, polish 15 min, {ratio:.2%}"] = {
            "cache_ratio": ratio,
            "per_layer": True,
            "polish_minutes": 15.0,
            "calibration_tokens": 2 * CALIBRATION_TOKENS,
        }
    for ratio in RATIOS:
        for name in EXPORTABLE:
            table[f"{name}, one shot, {ratio:.2%}"] = ONE_SHOT | {"cache_ratio": ratio, "rope": name}
        for name in ROROPE:
            options = {"cache_ratio": ratio, "rope": name, "factorize": "pca_balanced"}
            table[f"{name} + pca_balanced, {ratio:.2%}"] = ONE_SHOT | options
        options = {"cache_ratio": ratio, "layout": "per_head", "rope": "2-norm", "factorize": "svd_joint"}
        table[f"2-norm + svd_joint, {ratio:.2%}"] = ONE_SHOT | options
    for layout, names in (("shared", ("mixed", *EXPORTABLE, *ROROPE)), ("per_head", PER_HEAD)):
        for name in names:
            for method in FACTORIZATIONS:
                options = {"cache_ratio": 0.3125, "layout": layout, "rope": name, "factorize": method}
                table[f"ablation: {name} + {method}"] = ONE_SHOT | options
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="folder of the calibration texts")
    parser.add_argument("valid", type=Path, help="folder of the texts to report on")
    parser.add_argument("--rows", metavar="PART", default="", help="only rows whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("results/best_start.json"))
    arguments = parser.parse_args()
    calibration = sorted(arguments.train.glob("*.txt"))
    results = ResultFile(
        arguments.out,
        model=MODEL,
        texts=TEXTS,
        windows=WINDOWS,
        context=CONTEXT,
        calibration=[path.name for path in calibration],
        calibration_tokens=CALIBRATION_TOKENS,
    )
    original = results.row("original", lambda: score(MODEL, arguments.valid))
    for name, options in rows().items():
        if arguments.rows in name:
            given = {"calibration_tokens": CALIBRATION_TOKENS} | options | {"calibration": list(map(str, calibration))}
            results.row(name, lambda o=given, shown=options: start(o, shown, arguments.valid, original))


def start(options: dict[str, Any], shown: dict[str, Any], texts: Path, original: dict[str, Any]) -> dict[str, Any]:
    """Convert with `options` and score the result."""
    out = Path(tempfile.mkdtemp()) / "converted"
    try:
        began = time.perf_counter()
        conversion = kvfold.convert(MODEL, out, **options)
        seconds = time.perf_counter() - began
        row = {"options": shown, "seconds": round(seconds, 1), "stages": conversion.stage_losses} | score(out, texts)
        row["ratio"] = {text: row["perplexity"][text] / original["perplexity"][text] for text in TEXTS}
        return row
    finally:
        shutil.rmtree(out.parent)


def score(model: str | Path, texts: Path) -> dict[str, Any]:
    network, tokenizer = kvfold.load_model(model)
    values = {}
    for name, file in TEXTS.items():
        ids = token_ids(tokenizer, read_text(texts / file), minimum=WINDOWS * CONTEXT, name=file)
        values[name] = perplexity(network, ids, context=CONTEXT, windows=WINDOWS).value
    return {"cache_elements": measure_cache(network).elements_per_token_and_layer, "perplexity": values}


if __name__ == "__main__":
    main()
