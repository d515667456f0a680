"""The exact promises on SmolLM2: lossless settings are lossless, and the cache holds what is printed.

Run: python benchmarks/promises.py
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from result_file import ResultFile
from transformers.cache_utils import QuantizedCache

import kvfold
from kvfold.evaluate import measure_cache
from kvfold.texts import EVALUATION, read_text, token_ids

PROMPT = "The history of the Roman Empire began"
PAPER: dict[str, Any] = {"layout": "per_head", "rope": "2-norm", "qk_rope_head_dim": 8, "d_kv": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/promises.json"))
    arguments = parser.parse_args()
    results = ResultFile(arguments.out, model="smollm2", dtype="float32")
    for layout in ("shared", "per_head"):
        results.row(f"lossless, {layout}", lambda name=layout: lossless(name))
    for method in ("svd_joint", "svd_split"):
        results.row(f"paper's layout, {method}", lambda name=method: cache_sizes(name))


def lossless(layout: str) -> dict[str, Any]:
    """Largest logit difference on 512 tokens, and whether 200 greedy tokens agree."""
    original, tokenizer = kvfold.load_model("smollm2")
    ids = token_ids(tokenizer, read_text(EVALUATION), minimum=512)[None, :512]
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        kvfold.convert("smollm2", f"{folder}/out", layout=layout, lossless=True)
        converted, _ = kvfold.load_model(f"{folder}/out")
        difference = (original(ids).logits - converted(ids).logits).abs().max()
        first, second = (
            model.generate(**prompt, max_new_tokens=200, min_new_tokens=200, do_sample=False)
            for model in (original, converted)
        )
    return {
        "max_logit_difference": float(difference),
        "greedy_tokens": second.shape[1] - prompt["input_ids"].shape[1],
        "greedy_identical": bool(torch.equal(first, second)),
    }


def cache_sizes(method: str) -> dict[str, Any]:
    """Elements per token and layer in three cache classes, counted from their tensors."""
    with tempfile.TemporaryDirectory() as folder:
        kvfold.convert("smollm2", f"{folder}/out", factorize=method, calibration_tokens=2048, **PAPER)
        model, _ = kvfold.load_model(f"{folder}/out")
        weights = sum(path.stat().st_size for path in Path(folder, "out").glob("*.safetensors"))
    options = {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1, "q_group_size": 8}
    caches = {
        "DynamicCache": "dynamic",
        "StaticCache": "static",
        "QuantizedCache": QuantizedCache(config=model.config, **options),
    }
    counted = {name: measure_cache(model, cache).elements_per_token_and_layer for name, cache in caches.items()}
    return {"elements_per_token_and_layer": counted, "weight_bytes": weights}


if __name__ == "__main__":
    main()
