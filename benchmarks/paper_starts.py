"""The published method's own starts on SmolLM2, before any training: rotary selection alone, then low rank on top.

Run: python benchmarks/paper_starts.py WIKITEXT2_TEST_RAW.txt

Rotary rows keep 8 dims per KV head and full rank (as many elements as the original); low-rank rows keep 120 of 384.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from result_file import ResultFile

import kvfold
from kvfold.evaluate import measure_cache, perplexity
from kvfold.texts import read_text, token_ids

MODEL = "smollm2"
WINDOWS = 12
CONTEXT = 512
CALIBRATION_TOKENS = 16384
FULL_RANK = 360  # [W_k,nope ; W_v] has 3 * (64 - 8) + 3 * 64 rows

STARTS: dict[str, dict[str, Any]] = {
    "2-norm": {"rope": "2-norm", "kv_lora_rank": FULL_RANK},
    "high": {"rope": "high", "kv_lora_rank": FULL_RANK, "factorize": "svd_joint"},
    "low": {"rope": "low", "kv_lora_rank": FULL_RANK, "factorize": "svd_joint"},
    "uniform": {"rope": "uniform", "kv_lora_rank": FULL_RANK, "factorize": "svd_joint"},
    "2-norm + svd_joint": {"rope": "2-norm", "d_kv": 32, "factorize": "svd_joint"},
    "2-norm + svd_split": {"rope": "2-norm", "d_kv": 32, "factorize": "svd_split"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="WikiText-2 raw, test split")
    parser.add_argument("--out", type=Path, default=Path("results/paper_starts.json"))
    arguments = parser.parse_args()
    results = ResultFile(
        arguments.out,
        model=MODEL,
        text=arguments.text.name,
        windows=WINDOWS,
        context=CONTEXT,
        calibration=f"the shipped text, {CALIBRATION_TOKENS} tokens",
    )
    results.row("original", lambda: score(MODEL, arguments.text))
    for name, options in STARTS.items():
        results.row(name, lambda o=options: start(o | {"layout": "per_head", "qk_rope_head_dim": 8}, arguments.text))


def start(options: dict[str, Any], text: Path) -> dict[str, Any]:
    """Convert with `options` and score the result."""
    out = Path(tempfile.mkdtemp()) / "converted"
    try:
        conversion = kvfold.convert(MODEL, out, calibration_tokens=CALIBRATION_TOKENS, one_shot=True, **options)
        return {"options": options, "seconds": conversion.seconds} | score(out, text)
    finally:
        shutil.rmtree(out.parent)


def score(model: str | Path, text: Path) -> dict[str, Any]:
    network, tokenizer = kvfold.load_model(model)
    ids = token_ids(tokenizer, read_text(text), minimum=WINDOWS * CONTEXT, name=text.name)
    return {
        "cache_elements": measure_cache(network).elements_per_token_and_layer,
        "perplexity": perplexity(network, ids, context=CONTEXT, windows=WINDOWS).value,
    }


if __name__ == "__main__":
    main()
