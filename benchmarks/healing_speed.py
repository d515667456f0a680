"""Speed and peak memory of healing: a conversion beside the original in the same Trainer, in alternating runs.

Run: python benchmarks/healing_speed.py TEXT [--rounds N]

Every run is a process of its own, whose peak memory is taken; its speed leaves out the first steps.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_file import ResultFile

MODEL = "smollm2"
CONVERSIONS: dict[str, dict[str, Any]] = {
    "kvfold, 31.25%": {"cache_ratio": 0.3125, "one_shot": True, "calibration_tokens": 4096},
    "MHA2MLA's layout, 31.25%": {
        "layout": "per_head",
        "rope": "uniform",
        "factorize": "svd_joint",
        "qk_rope_head_dim": 8,
        "d_kv": 32,
        "calibration_tokens": 0,
        "one_shot": True,
    },
}
HEAL: dict[str, Any] = {"steps": 8, "batch": 2, "sequence_length": 512, "save_steps": 1000}
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/healing_speed.json"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)  # the process that is measured
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measured(*arguments.child, arguments.text)))
        return
    results = ResultFile(arguments.out, model=MODEL, heal=HEAL, conversions=CONVERSIONS, rounds=arguments.rounds)
    for name, options in CONVERSIONS.items():
        results.row(name, lambda o=options: beside_original(o, arguments.text, arguments.rounds))


def beside_original(options: dict[str, Any], text: Path, rounds: int) -> dict[str, Any]:
    """Ratios of a conversion to the original."""
    import kvfold

    with tempfile.TemporaryDirectory() as folder:
        kvfold.convert(MODEL, Path(folder) / "converted", **options)
        pairs = [
            [
                run(model, f"{folder}/run-{number}-{place}", text)
                for place, model in enumerate((MODEL, f"{folder}/converted"))
            ]
            for number in range(rounds)
        ]
    speeds = [converted["tokens_per_second"] / original["tokens_per_second"] for original, converted in pairs]
    return {
        "speed_ratio": statistics.median(speeds),
        "speed_ratio_range": [min(speeds), max(speeds)],
        "memory_ratio": max(pair[1]["peak_bytes"] for pair in pairs) / max(pair[0]["peak_bytes"] for pair in pairs),
        "original": pairs[0][0],
        "converted": pairs[0][1],
    }


def run(model: str, out: str, text: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, str(text), "--child", model, out]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def measured(model: str, out: str, text: Path) -> dict[str, Any]:
    from kvfold.train import heal
    from kvfold.train.curve import read_curve

    heal(model, out, data=str(text), **HEAL)
    seconds = [row["seconds"] for row in read_curve(Path(out))]
    steps = len(seconds) - WARM_UP
    return {
        "tokens_per_second": steps * HEAL["batch"] * HEAL["sequence_length"] / (seconds[-1] - seconds[WARM_UP - 1]),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
