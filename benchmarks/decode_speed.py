"""Decode speed and peak memory of SmolLM2 and its conversion to 31.25 % of the cache, in alternating runs.

python benchmarks/decode_speed.py
"""

import argparse
import tempfile
from pathlib import Path

from result_file import ResultFile

import kvfold
from kvfold.evaluate import decode_speed

LENGTHS = (1024, 4096, 8192)
BATCHES = (1, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/decode_speed.json"))
    arguments = parser.parse_args()
    results = ResultFile(arguments.out, model="smollm2", cache_ratio=0.3125, dtype="float32", new_tokens=16, repeats=5)
    with tempfile.TemporaryDirectory() as folder:
        # Speed depends on shapes alone, so the weights-only conversion will do.
        kvfold.convert("smollm2", f"{folder}/converted", cache_ratio=0.3125, calibration_tokens=0)
        models = {"original": kvfold.load_model("smollm2")[0], "converted": kvfold.load_model(f"{folder}/converted")[0]}
    for batch in BATCHES:
        for length in LENGTHS:
            results.row(f"{length} cached tokens, batch {batch}", lambda b=batch, n=length: measure(models, b, n))


def measure(models: dict, batch: int, cached_tokens: int) -> dict:
    original, converted = decode_speed(models, cached_tokens=cached_tokens, batch=batch, new_tokens=16, repeats=5)
    return {
        "speed_ratio": converted.ratio,
        "cache_ratio": converted.cache_bytes / original.cache_bytes,
        "peak_ratio": converted.peak_bytes / original.peak_bytes,
        "original": original.to_dict(),
        "converted": converted.to_dict(),
    }


if __name__ == "__main__":
    main()
