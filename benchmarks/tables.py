"""Print the tables of README and docs from results/*.json.

Run: python benchmarks/tables.py
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"


def main() -> None:
    for table in (demo, starts, speeds, big, promises):
        print(f"{table()}\n")


def rows_of(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def demo() -> str:
    """`results/demo.json` is the `results.json` of a run of `make demo`."""
    header = ("cached elements per token and layer", "cache bytes per token (bf16)", "perplexity")
    return markdown(
        ("", *header, "decode speed, 4k tokens"),
        [
            (
                row["name"],
                f"{row['cache_elements']:.0f}",
                f"{row['cache_bytes_per_token']:,.0f} ({row['cache_percent']:.2f} %)",
                f"{row['perplexity']:.2f} ({row['perplexity_ratio']:.2f}x)",
                f"{row['decode_ratio']:.2f}x",
            )
            for row in rows_of("demo")
        ],
    )


def starts() -> str:
    rows = rows_of("paper_starts")
    base = rows["original"]["perplexity"]
    return markdown(
        ("start, no training", "cached elements", "perplexity", "ratio"),
        [
            (name, f"{row['cache_elements']:.0f}", f"{row['perplexity']:,.1f}", f"{row['perplexity'] / base:,.1f}")
            for name, row in rows.items()
        ],
    )


def speeds() -> str:
    return markdown(
        ("decode", "speed, converted / original", "range", "cache bytes", "peak memory"),
        [
            (
                name,
                f"{row['speed_ratio']:.2f}",
                "{:.2f} to {:.2f}".format(*row["converted"]["ratio_range"]),
                f"{row['cache_ratio']:.4f}",
                f"{row['peak_ratio']:.2f}",
            )
            for name, row in rows_of("decode_speed").items()
        ],
    )


def big() -> str:
    row = rows_of("big_checkpoint")["convert"]
    stages = [(f"seconds, {stage}", f"{value:.0f}") for stage, value in row["seconds"].items()]
    peak = ("peak memory", f"{row['peak_memory_bytes'] / 2**30:.2f} GiB")
    return markdown(("Llama-2-7B shape, weights only", ""), [peak, *stages])


def promises() -> str:
    cells = []
    for name, row in rows_of("promises").items():
        if "max_logit_difference" in row:
            what = f"max logit difference {row['max_logit_difference']:.1e}, {row['greedy_tokens']} greedy tokens "
            cells.append((name, what + ("identical" if row["greedy_identical"] else "DIFFERENT")))
        else:
            counted = row["elements_per_token_and_layer"].items()
            cells.append((name, ", ".join(f"{cache} {count:.0f}" for cache, count in counted) + " of 384 elements"))
    return markdown(("promise", "measured"), cells)


if __name__ == "__main__":
    main()
