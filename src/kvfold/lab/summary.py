"""What a sweep found: final losses over the seeds, and differences between variants that saw the same text."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from kvfold.errors import CheckpointError
from kvfold.lab.sweep import Sweep, run_name
from kvfold.train.curve import CURVE_FILE, HELD_OUT_FILE, read_curve
from kvfold.train.run import MODEL_FOLDER

LAST_SHARE = 0.1
"""Of the steps, over which final losses are means."""


def summarise(sweep: Sweep, out: Path) -> dict[str, Any]:
    """JSON-able: costs and final losses of every variant, and the final differences, of the runs that are finished.

    A difference is paired: taken between runs of the same seed, which saw the same text in the same order, before its
    mean and standard error over the seeds.
    """
    ends = {name: {seed: _ends(out / run_name(name, seed)) for seed in sweep.seeds} for name in sweep.recipes}
    finished = {name: {seed: end for seed, end in by_seed.items() if end} for name, by_seed in ends.items()}
    variants = []
    for found in sweep.matches:
        by_seed = finished[found.name]
        losses = [end["loss"] for end in by_seed.values()]
        held_out = [end["held_out"] for end in by_seed.values() if end["held_out"] is not None]
        variants.append(
            found.to_dict(sweep.options.sequence_length)
            | {"label": sweep.label(found.name), "seeds": list(by_seed), "loss": spread(losses)}
            | {"held_out": spread(held_out), "perplexity": math.exp(fmean(held_out)) if held_out else None}
        )
    differences = []
    for name, (one, other) in sweep.differences.items():
        common = [seed for seed in finished[one] if seed in finished[other]]
        pairs = [(finished[one][seed], finished[other][seed]) for seed in common]
        differences.append(
            {"name": name, "variants": [one, other], "seeds": common}
            | {key: spread([a[key] - b[key] for a, b in pairs if a[key] is not None]) for key in ("loss", "held_out")}
        )
    steps = sweep.options.steps
    facts = {"title": sweep.title, "steps": steps, "tokens": steps * sweep.options.step_tokens}
    return facts | {"variants": variants, "differences": differences}


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Values of the seeds with their mean, standard deviation and the standard error of the mean; None of no values."""
    if not values:
        return None
    deviation = stdev(values) if len(values) > 1 else None
    error = None if deviation is None else deviation / len(values) ** 0.5
    return {"values": list(values), "mean": fmean(values), "standard_deviation": deviation, "standard_error": error}


def loss_curves(sweep: Sweep, out: Path, axis: str) -> list[dict[str, Any]]:
    """Of every variant the mean over its seeds, as curves of `draw_losses`."""
    curves = []
    for name in sweep.recipes:
        if runs := [rows for seed in sweep.seeds if (rows := _rows(out / run_name(name, seed)))]:
            steps = min(map(len, runs))
            losses = [fmean(run[step]["loss"] for run in runs) for step in range(steps)]
            curves.append({"name": sweep.label(name), "x": [row[axis] for row in runs[0][:steps]], "losses": losses})
    return curves


def difference_curves(sweep: Sweep, out: Path, axis: str) -> list[dict[str, Any]]:
    """Of every pair the differences step by step, a row for each seed, as curves of `draw_differences`."""
    curves = []
    for name, (one, other) in sweep.differences.items():
        pairs = [[_rows(out / run_name(variant, seed)) for variant in (one, other)] for seed in sweep.seeds]
        pairs = [pair for pair in pairs if all(pair)]
        if not pairs:
            continue
        steps = min(len(rows) for pair in pairs for rows in pair)
        differences = [[a["loss"] - b["loss"] for a, b in zip(*pair, strict=False)][:steps] for pair in pairs]
        curve = {"name": _pair_label(sweep, name, one, other), "differences": differences}
        curve["x"] = [row[axis] for row in pairs[0][0][:steps]]
        curves.append(curve | ({"colour": sweep.colours[name]} if name in sweep.colours else {}))
    return curves


def _pair_label(sweep: Sweep, name: str, one: str, other: str) -> str:
    """The name of a pair, or what its variants are where that is a variant's own."""
    shapes = {found.name: found.architecture for found in sweep.matches}
    a, b = shapes[one], shapes[other]
    if a.attention != b.attention:
        return sweep.label(one)
    size = 2 * a.spec().cached_elements() * a.num_hidden_layers
    heads = f"{a.num_attention_heads} over {b.num_attention_heads} heads"
    return f"{name}: {heads}, {size:,} bytes/token, {a.parameters() / 1e6:.2f} M"


def _rows(run: Path) -> list[dict[str, Any]]:
    return read_curve(run) if (run / CURVE_FILE).exists() else []


def _ends(run: Path) -> dict[str, Any] | None:
    """Losses at the end of a run; None of one that is not finished."""
    if not (run / MODEL_FOLDER).exists():
        return None
    rows = read_curve(run)
    if not rows:
        raise CheckpointError(f"the curve of {run} is empty: remove that folder and run it again.")
    last = rows[-max(round(LAST_SHARE * len(rows)), 1) :]
    held_out = read_curve(run, HELD_OUT_FILE)[-1]["loss"] if (run / HELD_OUT_FILE).exists() else None
    return {"loss": fmean(row["loss"] for row in last), "held_out": held_out}
