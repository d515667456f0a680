"""How good the start is before any training: strategies, factorisations and budgets on SmolLM2, on three texts.

Run: python benchmarks/best_start.py TRAIN_FOLDER VALID_FOLDER [--rows PART ...]

Calibrated on all texts of TRAIN_FOLDER; perplexity divided by the original's on WikiText-2 raw test, a psychology
textbook (near the calibration text) and a novel, in windows of 512 tokens: 24 of each for whole conversions, fewer for
the rows that only compare folds and share one pass over the calibration text. Rows that are in the result file already
are not measured again; PARTs pick those whose names contain one.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from result_file import ResultFile
from torch import Tensor

import kvfold
from kvfold.attention import Attention
from kvfold.checkpoint import open_checkpoint
from kvfold.convert import (
    ConvertOptions,
    calibration_ids,
    plan_per_layer,
    prepare,
    probe_ids,
    profile_checkpoint,
    sources,
)
from kvfold.convert.calibration import LayerRunner, Observation
from kvfold.convert.layers import LayerConverter
from kvfold.convert.weights import LayerWeights
from kvfold.evaluate import perplexity
from kvfold.evaluate.cache import CacheFactory
from kvfold.evaluate.quantized import packed_bytes, quantized_cache_factory
from kvfold.texts import read_text, token_ids

MODEL = "smollm2"
CONTEXT = 512
WINDOWS = {"whole": 24, "folded": 8, "ablation": 3}
RANDOM = 2.0
"""Weight of random tokens, each text having 1, where nothing is fitted on the converted prefix."""
CALIBRATION_TOKENS = 16384
FIT_TOKENS = 98304
"""Calibration tokens where something is fitted; half of them sampled from the model itself."""
TEXTS = {
    "wikitext2": "wikitext2-test.raw.txt",
    "psychology": "psychology.txt",
    "novel": "agatha-christie_the-mysterious-affair-at-styles.txt",
}
RATIOS = (0.5, 0.3125, 0.1875, 0.125)
POLISH_MINUTES = 10.0
EXPORTABLE = ("assigned", "stride", "fastest")
ROROPE = ("rorope", "rorope-2", "rorope-4")
PER_HEAD = ("rotation_error", "2-norm", "high", "low", "uniform")
FACTORIZATIONS = ("attention_aware", "svd_whitened", "pca_balanced", "svd_joint", "svd_split")
PAPER = {"layout": "per_head", "rope": "2-norm", "factorize": "svd_joint"}
ABLATION = "ablation: "
PER_LAYER = "mixed per layer, one shot"


def whole_conversions() -> dict[str, dict[str, Any]]:
    """Options by row name."""
    return {
        f"mixed per layer, refit and polish, {ratio:.2%}": {
            "cache_ratio": ratio,
            "per_layer": True,
            "polish_minutes": POLISH_MINUTES,
            "calibration_tokens": FIT_TOKENS,
        }
        for ratio in RATIOS
    }


def folds() -> dict[str, dict[str, Any]]:
    """Options by row name, of what needs nothing but the original on the calibration text."""
    table: dict[str, dict[str, Any]] = {
        f"{PER_LAYER}, {ratio:.2%}": {"cache_ratio": ratio, "per_layer": True} for ratio in RATIOS
    }
    for ratio in RATIOS:
        for name in ("mixed", *EXPORTABLE):
            table[f"{name}, {ratio:.2%}"] = {"cache_ratio": ratio, "rope": name}
        for name in ROROPE:
            table[f"{name} + pca_balanced, {ratio:.2%}"] = {
                "cache_ratio": ratio,
                "rope": name,
                "factorize": "pca_balanced",
            }
        table[f"2-norm + svd_joint, {ratio:.2%}"] = PAPER | {"cache_ratio": ratio}
    for layout, names in (("shared", ("mixed", *EXPORTABLE, *ROROPE)), ("per_head", PER_HEAD)):
        for name in names:
            for method in FACTORIZATIONS:
                options = {"cache_ratio": 0.3125, "layout": layout, "rope": name, "factorize": method}
                table[f"{ABLATION}{name} + {method}"] = options
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="folder of the calibration texts")
    parser.add_argument("valid", type=Path, help="folder of the texts to report on")
    parser.add_argument("--rows", metavar="PART", nargs="+", default=[""], help="only rows whose names contain one")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="keep whole conversions there")
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
        random_tokens=RANDOM,
        calibration_tokens=CALIBRATION_TOKENS,
        fit_tokens=FIT_TOKENS,
    )
    network, tokenizer = kvfold.load_model(MODEL, dtype=torch.float32)
    texts = load_texts(tokenizer, arguments.valid)
    for kind in WINDOWS:
        results.row(f"original, {kind}", lambda kind=kind: {"nats": score(network, texts, kind)})
    for bits in (8, 4):
        results.row(f"original, int{bits}", lambda bits=bits: quantised(network, texts, bits))
    folded = mixed_with(calibration, "random", RANDOM) | {"calibration_tokens": CALIBRATION_TOKENS}
    fitted = mixed_with(calibration, "sampled", float(len(calibration)))
    sources.sample_from = once(sources.sample_from)

    def picked(name: str) -> bool:
        return any(part in name for part in arguments.rows)

    for name, options in whole_conversions().items():
        if picked(name):
            results.row(name, lambda name=name, o=options: convert(name, fitted | o, o, texts, arguments.keep))
    wanted = {name: options for name, options in folds().items() if picked(name) and name not in results}
    attentions = fold_all({name: folded | options | {"one_shot": True} for name, options in wanted.items()})
    for name, options in wanted.items():
        for layer, attention in zip(network.model.layers, attentions.pop(name), strict=True):
            layer.self_attn = attention
        kind = "ablation" if name.startswith(ABLATION) else "whole" if name.startswith(PER_LAYER) else "folded"
        results.row(name, lambda o=options, kind=kind: {"options": o, "nats": score(network, texts, kind)})


def load_texts(tokenizer: Any, folder: Path) -> dict[str, Tensor]:
    """Token ids of what is reported on."""
    most = max(WINDOWS.values()) * CONTEXT
    return {
        name: token_ids(tokenizer, read_text(folder / file), minimum=most, name=file) for name, file in TEXTS.items()
    }


def mixed_with(texts: list[Path], entry: str, weight: float) -> dict[str, Any]:
    """Calibration on all of `texts` alike, and on one more entry."""
    return {"calibration": [*map(str, texts), entry], "calibration_weights": [1.0] * len(texts) + [weight]}


def once(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Sample from the model in the first conversion only: it gives the same in all of them."""
    kept: list[Tensor] = []

    def remembered(*arguments: Any, **options: Any) -> Tensor:
        if not kept:
            kept.append(sample(*arguments, **options))
        return kept[0]

    return remembered


def convert(
    name: str, options: dict[str, Any], shown: dict[str, Any], texts: dict[str, Any], keep: Path | None
) -> dict[str, Any]:
    """Convert with `options` and score the result."""
    with tempfile.TemporaryDirectory() as scratch:
        out = (keep or Path(scratch)) / name.replace(" ", "-")
        began = time.perf_counter()
        conversion = kvfold.convert(MODEL, out, overwrite=True, **options)
        seconds = time.perf_counter() - began
        network, _ = kvfold.load_model(out)
        return {
            "options": shown,
            "seconds": round(seconds, 1),
            "seconds_of_stages": conversion.seconds,
            "polish_steps": conversion.options.polish_steps,
            "kept": conversion.plan.kept,
            "stages": conversion.stage_losses,
            "nats": score(network, texts, "whole"),
        }


class SharedRunner(LayerRunner):
    """The original, run once over the calibration text for many conversions."""

    def run_layer(self, index: int, weights: LayerWeights) -> Observation:
        if getattr(self, "_last", -1) != index:
            self._observation, self._last = super().run_layer(index, weights), index
        return self._observation

    def probe(self, index: int, stage: str, attention: Attention) -> None:
        """The stages of these are not measured."""


def fold_all(rows: dict[str, dict[str, Any]]) -> dict[str, list[Attention]]:
    """The attention of every layer, for the options of every row."""
    if not rows:
        return {}
    checkpoint = open_checkpoint(MODEL)
    options = {name: ConvertOptions.from_dict(given) for name, given in rows.items()}
    any_options = next(iter(options.values()))
    family, _ = prepare(checkpoint, any_options)
    tokenizer = checkpoint.load_tokenizer()
    ids = calibration_ids(checkpoint.path, tokenizer, any_options, lambda *_: None)
    plans = {}
    for name, chosen in options.items():
        plans[name] = prepare(checkpoint, chosen)[1]
        if chosen.per_layer:
            profile = profile_checkpoint(checkpoint, family, tokenizer, ids, plans[name], chosen, lambda *_: None)
            plans[name] = plan_per_layer(plans[name], profile)
    probes = probe_ids(tokenizer, ids.shape[1])
    runner = SharedRunner(checkpoint, family, ids, probes, stages=(), attention=True, follow=False)
    converters = {
        name: LayerConverter(checkpoint, family, plans[name], chosen, runner) for name, chosen in options.items()
    }
    attentions: dict[str, list[Attention]] = {name: [] for name in rows}
    for index in range(checkpoint.config.num_hidden_layers):
        for name, converter in converters.items():
            attentions[name].append(converter.try_layer(index).attention)
        print(f"layer {index}", flush=True)
    return attentions


def quantised(network: Any, texts: dict[str, Any], bits: int) -> dict[str, Any]:
    """The original with its cache in fewer bits. `kept` is of bf16, scales included."""
    width = network.config.head_dim
    kept = packed_bytes(width, bits=bits) / (2 * width)
    factory = quantized_cache_factory(network.config, nbits=bits)
    return {"kept": kept, "nats": score(network, texts, "folded", factory)}


def score(network: Any, texts: dict[str, Any], kind: str, factory: CacheFactory | None = None) -> dict[str, float]:
    """Nats per token on every text."""
    options = {"context": CONTEXT, "windows": WINDOWS[kind], "cache_factory": factory}
    return {name: perplexity(network, ids, **options).nats_per_token for name, ids in texts.items()}


if __name__ == "__main__":
    main()
