"""Print the tables of README and docs from results/*.json.

Run: python benchmarks/tables.py
"""

import json
import math
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from kvfold.report.formats import accuracy_text

RESULTS = Path(__file__).parent.parent / "results"


def main() -> None:
    for table in TABLES:
        try:
            print(f"{table()}\n")
        except FileNotFoundError as missing:
            print(f"({Path(missing.filename).name} has not been made)\n")


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


TEXTS = ("wikitext2", "psychology", "novel")


WHOLE = "mixed per layer"
"""Begins the names of the rows that were scored on all windows."""


def best_starts() -> str:
    """Perplexity over the original's, text by text."""
    rows = rows_of("best_start")
    chosen = sorted((name for name in rows if name.startswith(WHOLE)), key=_by_method_and_cache)
    cells = [(name, *_ratios(rows, name), f"{loss(rows, name):.3f}") for name in chosen]
    return markdown(("cache kept", *TEXTS, "nats lost, mean"), cells)


def _by_method_and_cache(name: str) -> tuple[str, float]:
    """A row's method, and its cache so that the largest comes first."""
    method, _, kept = name.rpartition(", ")
    return method, -float(kept.removesuffix("%"))


def rotary() -> str:
    """Folds of one pass at equal budgets, and the nats that they lose."""
    rows = rows_of("best_start")
    chosen = [name for name in rows if name.endswith("%") and not name.startswith(WHOLE)]
    chosen.sort(key=lambda name: _by_method_and_cache(name)[1])
    cells = [(name, *_ratios(rows, name), f"{loss(rows, name):.3f}") for name in chosen]
    return markdown(("one shot, cache kept", *TEXTS, "nats lost, mean"), cells)


def ablation() -> str:
    """Mean nats lost by rotary strategy (rows) and factorisation (columns)."""
    rows = rows_of("best_start")
    names = [name.removeprefix("ablation: ").split(" + ") for name in rows if name.startswith("ablation: ")]
    if not names:
        return "(the ablation has not been measured)"
    methods = list(dict.fromkeys(method for _, method in names))
    strategies = dict.fromkeys(strategy for strategy, _ in names)
    cells = [
        (name, *(f"{loss(rows, f'ablation: {name} + {method}'):.2f}" for method in methods)) for name in strategies
    ]
    return markdown(("nats lost at 31.25 %, mean of three texts", *methods), cells)


def _ratios(rows: Any, name: str) -> list[str]:
    base = _original(rows, name)
    return [f"{math.exp(rows[name]['nats'][text] - base[text]):.2f}" for text in TEXTS]


def loss(rows: Any, name: str) -> float:
    """Nats more than the original on the same windows, mean of the texts."""
    base = _original(rows, name)
    return sum(rows[name]["nats"][text] - base[text] for text in TEXTS) / len(TEXTS)


def _original(rows: Any, name: str) -> Any:
    if name.startswith("ablation"):
        return rows["original, ablation"]["nats"]
    return rows["original, whole" if name.startswith(WHOLE) else "original, folded"]["nats"]


def tasks() -> str:
    rows = rows_of("commonsense_tasks")
    names = list(dict.fromkeys(task for row in rows.values() for task in row["tasks"]))
    cells = []
    for name, row in rows.items():
        scores = [row["tasks"][task] for task in names]
        mean = accuracy_text(row["average"], row["average_standard_error"])
        cells.append((name, f"{row['cache_elements']:.0f}", *(f"{100 * score['score']:.1f}" for score in scores), mean))
    return markdown(
        ("accuracy, %", "cached elements", *(name.removeprefix("offline_") for name in names), "average"), cells
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


def healing() -> str:
    """Healing a conversion beside healing the original."""
    cells = [
        (
            name,
            f"{row['speed_ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*row["speed_ratio_range"]),
            f"{row['memory_ratio']:.2f}",
        )
        for name, row in rows_of("healing_speed").items()
    ]
    return markdown(("healing", "speed, converted / original", "range", "peak memory"), cells)


def attention_steps() -> str:
    """Training steps of each attention beside Llama's."""
    cells = [
        (
            name,
            *(f"{row[f'{part}_ratio']:.2f}" for part in ("forward", "backward", "step")),
            "{:.2f} to {:.2f}".format(*row["step_ratio_range"]),
        )
        for name, row in rows_of("attention_step").items()
    ]
    return markdown(("time, over that of transformers' Llama", "forward", "backward", "step", "range"), cells)


def small_curves() -> str:
    return _curves("curves_small")


def smollm2_curves() -> str:
    return _curves("curves_smollm2")


def _curves(file: str) -> str:
    """Where healing curves begin and end, and how far above the first curve of their model they end."""
    rows, cells = rows_of(file), []
    for name, row in rows.items():
        model = name.partition(": ")[0]
        base = next(row for other, row in rows.items() if other.startswith(f"{model}: "))
        first, last = row["held_out"][0][1], row["held_out"][-1][1]
        losses = (row["first_loss"], row["last_loss"], row["last_loss"] - base["last_loss"], first, last)
        cells.append((name, *(f"{value:.3f}" for value in losses)))
    header = ("first step", "end", "end, over the baseline's", "held-out text, start", "held-out text, end")
    return markdown(("nats per token", *header), cells)


def our_starts() -> str:
    """Tokens until our start is as good on the held-out text as the paper's in the end; what is left at the end."""
    result = json.loads((RESULTS / "curves_smollm2.json").read_text())
    starts, rows, cells = result["facts"]["recipe"]["starts"], result["rows"], []
    base = rows[f"{starts['model']}: {starts['baseline']}"]["held_out"][-1][1]
    for budget, names in starts["budgets"].items():
        ours, paper = (rows[f"{starts['model']}: {names[side]}"]["held_out"] for side in ("ours", "paper"))
        needed = next((f"{tokens:,}" for tokens, nats in ours if nats <= paper[-1][1]), "more")
        ends = (paper[0][1], paper[-1][1], ours[0][1], ours[-1][1], paper[-1][1] - base, ours[-1][1] - base)
        cells.append((budget, *(f"{value:.3f}" for value in ends), needed))
    return markdown(
        (
            "cache kept",
            *("MHA2MLA's start", "healed", "kvfold's start", "healed", "MHA2MLA over the baseline", "kvfold over it"),
            "tokens until as good",
        ),
        cells,
    )


def healed() -> str:
    """Perplexities over the original's, and the commonsense tasks."""
    rows = rows_of("healed_models")
    base, cells = rows["original"]["nats_per_token"], []
    for name, row in rows.items():
        ratios = [f"{math.exp(nats - base[text]):.2f}" for text, nats in row["nats_per_token"].items()]
        tasks = row["tasks"]
        mean = "" if tasks is None else accuracy_text(tasks["average"], tasks["average_standard_error"])
        cells.append((name, f"{row['cache_bytes_per_token']:,.0f}", *ratios, mean))
    return markdown(("", "cache bytes per token", *TEXTS, "six tasks, %"), cells)


def double_heads() -> str:
    """What twice the query heads change, paired over the seeds."""
    return markdown(
        ("twice the heads minus the base", "training loss", "held-out text"),
        [
            (difference["name"], *(_mean_and_error(difference[loss], "+.3f") for loss in ("loss", "held_out")))
            for difference in rows_of("lab_double_heads")["sweep"]["differences"]
        ],
    )


def lab_variants(sweep: str) -> str:
    """Shapes of a sweep's variants, and their losses with the standard error over the seeds."""
    cells = [
        (
            row["name"],
            *(f"{row[key]:,}" for key in ("num_attention_heads", "intermediate_size", "parameters")),
            f"{row['cache_bytes_per_device']['1']:,}",
            *(_mean_and_error(row[loss], ".3f") for loss in ("loss", "held_out")),
            f"{row['perplexity']:.1f}",
        )
        for row in rows_of(sweep)["sweep"]["variants"]
    ]
    sizes = ("heads", "feed-forward width", "parameters", "cache bytes per token")
    return markdown(("", *sizes, "training loss", "held-out text", "its perplexity"), cells)


def _mean_and_error(over_seeds: dict[str, Any], digits: str) -> str:
    return f"{over_seeds['mean']:{digits}} ± {over_seeds['standard_error']:.3f}"


def runtimes() -> str:
    """What the doctor found in each runtime."""
    cells = []
    for name, row in rows_of("runtimes").items():
        for check in row.get("checks", ()):
            cached = f"{check['cached_elements']:.1f} of {row['original_elements']}"
            differences = (f"{check[kind]:.1e}" for kind in ("prefill", "decode", "mean"))
            ids = "the same" if check["same_tokens"] else "others"
            cells.append((f"{name} {check['version']}", f"`{check['settings']}`", *differences, cached, ids))
    header = ("settings", "prompt", "decoding", "mean of both", "cached elements", "token ids")
    return markdown(("log-probabilities, largest difference, nats", *header), cells)


def constant_directions() -> str:
    """How nearly constant hidden states are in one direction."""
    errors = rows_of("runtimes")["constant direction"]["errors_by_layer"]
    cells = [(name, f"{median(found):.3f}", f"{max(found):.3f}") for name, found in errors.items()]
    return markdown(("", "error of what is taken for one, median of the layers", "largest"), cells)


def gguf_perplexities() -> str:
    found = {name: row["perplexity"] for name, row in rows_of("runtimes").items() if "perplexity" in row}
    exact = found["perplexity in llama.cpp, f32"]
    cells = [(name.rpartition(" ")[2], f"{value:.2f}", f"{value / exact:.4f}") for name, value in found.items()]
    return markdown(("type of weights", "perplexity in llama.cpp", "over f32"), cells)


def llamacpp_speeds() -> str:
    rows = rows_of("llamacpp_speed")
    memory = rows.pop("memory")
    return markdown(
        ("SmolLM2 in llama.cpp", "model", "speed, over the original", "range", "cache bytes", "peak memory"),
        [
            (
                depth,
                name,
                f"{row['speed_ratio']:.2f}",
                "{:.2f} to {:.2f}".format(*row["range"]),
                f"{row['cache_ratio']:.3f}",
                f"{memory[depth][name]['peak_memory_ratio']:.2f}",
            )
            for depth, models in rows.items()
            for name, row in models.items()
            if name != "original"
        ],
    )


def big() -> str:
    cells = []
    for name, row in rows_of("big_checkpoint").items():
        times = [f"{row['seconds'][stage]:.0f}" for stage in ("calibrate", "fold", "total")]
        resumed = f"identical: {row['resumed']['identical']}" if "resumed" in row else ""
        cells.append((name, f"{row['peak_memory_bytes'] / 2**30:.2f} GiB", *times, resumed))
    return markdown(
        ("Llama-2-7B shape", "peak memory", "seconds, calibrate", "fold", "total", "killed and resumed"), cells
    )


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


TABLES = (
    demo,
    best_starts,
    rotary,
    ablation,
    tasks,
    starts,
    speeds,
    healing,
    attention_steps,
    small_curves,
    smollm2_curves,
    our_starts,
    healed,
    double_heads,
    partial(lab_variants, "lab_double_heads"),
    partial(lab_variants, "lab_tiny"),
    runtimes,
    gguf_perplexities,
    constant_directions,
    llamacpp_speeds,
    big,
    promises,
)

if __name__ == "__main__":
    main()
