"""Draw docs/figures/best_start.png and .svg from results/best_start.json.

Run: python benchmarks/figures.py
"""

import math
import re
from pathlib import Path
from typing import Any

from tables import loss, rows_of

from kvfold.report.tradeoff import draw_tradeoff

BYTES = 30 * 384 * 2
"""Of one token in SmolLM2's bf16 cache."""
METHODS = {
    "kvfold, one shot": r"mixed per layer, one shot, ",
    "kvfold, refit and polish": r"mixed per layer, refit and polish, ",
    "kvfold, assigned": r"assigned, ",
    "TransMLA's start": r"rorope(-\d)? \+ pca_balanced, ",
    "MHA2MLA's start": r"2-norm \+ svd_joint, ",
}


def main() -> None:
    rows = rows_of("best_start")
    points = [
        point("original", f"int{bits}", rows[f"original, int{bits}"]["kept"], rows, f"original, int{bits}")
        for bits in (8, 4)
    ]
    for method, pattern in METHODS.items():
        best: dict[float, str] = {}
        for name in rows:
            if found := re.fullmatch(pattern + r"(?P<kept>[\d.]+)%", name):
                kept = float(found["kept"]) / 100
                best[kept] = min(best.get(kept, name), name, key=lambda name: loss(rows, name))
        points += [point(method, "bfloat16", kept, rows, name) for kept, name in best.items()]
    folder = Path(__file__).parent.parent / "docs" / "figures"
    folder.mkdir(exist_ok=True)
    original = {"bytes_per_token": BYTES, "perplexity": 1.0}
    title = "SmolLM2-135M-Instruct, mean of three texts, nothing trained end to end"
    draw_tradeoff({"model": title, "original": original, "points": points}, folder / "best_start")


def point(method: str, cache: str, kept: float, rows: Any, name: str) -> dict[str, Any]:
    ratio = math.exp(loss(rows, name))
    return {
        "name": method,
        "cache": cache,
        "bytes_per_token": kept * BYTES,
        "predicted_perplexity": None,
        "perplexity": ratio,
    }


if __name__ == "__main__":
    main()
