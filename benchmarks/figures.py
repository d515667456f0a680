"""Draw docs/figures/*.png and .svg from results/best_start.json, curves_*.json and lab_*.json.

Run: python benchmarks/figures.py
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from tables import RESULTS, loss, rows_of

from kvfold.report.differences import difference_label, draw_differences
from kvfold.report.losses import LINES, SMOOTH, draw_losses
from kvfold.report.tradeoff import draw_tradeoff

FOLDER = RESULTS.parent / "docs" / "figures"
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
    FOLDER.mkdir(exist_ok=True)
    draw_best_starts()
    for path in sorted(RESULTS.glob("curves_*.json")):
        draw_curves(path.stem, json.loads(path.read_text()))
    for path in sorted(RESULTS.glob("lab_*.json")):
        draw_sweep(json.loads(path.read_text())["rows"]["sweep"], FOLDER / path.stem)


def draw_best_starts() -> None:
    """The trade-off of each method, with its best variant at each budget."""
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
    original = {"bytes_per_token": BYTES, "perplexity": 1.0}
    title = "SmolLM2-135M-Instruct, mean of three texts, nothing trained end to end"
    draw_tradeoff({"model": title, "original": original, "points": points}, FOLDER / "best_start")


def draw_curves(stem: str, result: dict[str, Any]) -> None:
    """The figures that a recipe of `healing_curves.py` names, of the curves that are there."""
    recipe, rows = result["facts"]["recipe"], result["rows"]
    for figure, panels in recipe["figures"].items():
        record = {
            "axis": "step",
            "label": "Loss",
            "smooth": SMOOTH,
            "panels": [
                {
                    "title": recipe["models"][model]["title"],
                    "curves": [
                        {"name": name, "x": row["steps"], "losses": row["losses"]}
                        for name in names
                        if (row := rows.get(f"{model}: {name}"))
                    ],
                }
                for model, names in panels.items()
            ],
        }
        if all(panel["curves"] for panel in record["panels"]):
            draw_losses(record, [FOLDER / f"{figure}.png", FOLDER / f"{figure}.svg"])
    if "starts" in recipe:
        draw_starts(recipe["starts"], rows, FOLDER / f"{stem}_starts")


def draw_starts(starts: dict[str, Any], rows: Any, stem: Path) -> None:
    """Our starts beside the paper's at the same budgets, on the training text and on the held-out one."""
    chosen = {f"{starts['model']}: {starts['baseline']}": ("original, healed alike", 0)}
    for place, (budget, names) in enumerate(starts["budgets"].items(), start=1):
        chosen[f"{starts['model']}: {names['ours']}"] = (f"kvfold, {budget}", place)
        chosen[f"{starts['model']}: {names['paper']}"] = (f"MHA2MLA's start, {budget}", place + len(LINES))
    if not chosen.keys() <= rows.keys():
        return
    training = [
        {
            "name": label,
            "x": [step * rows[name]["step_tokens"] for step in rows[name]["steps"]],
            "losses": rows[name]["losses"],
            "line": line,
        }
        for name, (label, line) in chosen.items()
    ]
    held_out = []
    for name, (label, line) in chosen.items():
        tokens, losses = zip(*rows[name]["held_out"], strict=True)
        held_out.append({"name": label, "x": tokens, "losses": losses, "line": line})
    panels = [{"title": "training text", "curves": training}, {"title": "held-out text", "curves": held_out}]
    record = {"axis": "tokens", "label": "Loss", "smooth": 4 * SMOOTH, "panels": panels}
    draw_losses(record, [stem.with_suffix(suffix) for suffix in (".png", ".svg")])


def draw_sweep(sweep: dict[str, Any], stem: Path) -> None:
    """The paired differences of a sweep of the lab."""
    label = difference_label(difference["variants"] for difference in sweep["differences"])
    record = {"title": sweep["title"], "axis": "tokens", "label": label, "smooth": 4 * SMOOTH}
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    draw_differences(record | {"curves": sweep["differences_by_step"]}, paths)


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
