"""Figures of the demo report, drawn from its results alone."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvfold.report.formats import bytes_text, factor_text, number_text

Record = Mapping[str, Any]

INK, MUTED, GRID, PAPER = "#1a1d21", "#5c6670", "#dfe3e8", "#fdfdfc"
SERIES = ("#3b4148", "#0072b2", "#d55e00", "#009e73", "#aa4499")
"""Colours of the rows in order, distinct for the colour-blind; markers and labels tell them apart as well."""
MARKERS = ("o", "D", "s", "^", "v")
CSS_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {
    colour: f"series-{position}" for position, colour in enumerate(SERIES)
}
"""In the page, colours are CSS variables, so that figures follow its light or dark theme."""
CONTEXT = 8192
"""Tokens for which the size of a cache is drawn."""
STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "text.parse_math": False,  # a $ in a name is a $
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "svg.fonttype": "none",  # text stays text: it scales, can be selected and read aloud
    "svg.hashsalt": "kvfold",  # the same results give the same file
}


def draw(results: Record) -> dict[str, Figure]:
    """All figures that the results have numbers for, by file name; `results` as in `render_demo`."""
    with matplotlib.rc_context(STYLE):
        figures = {name: plot(results) for name, plot in FIGURES.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def svg(figure: Figure) -> str:
    """The figure as an SVG element to put into a page that defines the CSS variables."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)  # the family is the page's
    for colour, name in CSS_NAMES.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def save_png(figure: Figure, path: Path) -> None:
    """The figure as a PNG on light ground, for places that show no page."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=160, facecolor=PAPER)


def quality_figure(results: Record) -> Figure:
    """Perplexity (log axis) against the share of the cache that is kept."""
    rows = results["rows"]
    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    values = [row["perplexity"] for row in rows]
    low, high = min(values) / 1.35, max(values) * 1.35
    axes.set(xlim=(0, 108), ylim=(low, high), yscale="log")
    axes.set_xlabel("cache kept, % of the original's bytes")
    axes.set_ylabel("perplexity, lower is better (log scale)")
    ticks = _log_ticks(low, high)
    axes.set_yticks(ticks, [number_text(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xticks(range(0, 101, 25))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.axhline(rows[0]["perplexity"], color=SERIES[0], linewidth=1, linestyle=(0, (4, 4)))
    for position, row in enumerate(rows):
        axes.plot(
            row["cache_percent"],
            row["perplexity"],
            marker=MARKERS[position % len(MARKERS)],
            markersize=9,
            color=_colour(position),
            markeredgecolor=PAPER,
            linestyle="none",
            clip_on=False,
            zorder=3,
        )
    _label_points(axes, rows)
    return figure


def _label_points(axes: Axes, rows: Sequence[Record]) -> None:
    """Names beside their points: to the left near the right edge, higher where a line or another name is in the way."""
    low, high = axes.get_ylim()
    heights = [math.log(row["perplexity"] / low) / math.log(high / low) for row in rows]
    taken: dict[bool, float] = {}  # the highest name so far, on either side
    for position in sorted(range(len(rows)), key=heights.__getitem__):
        row, left = rows[position], rows[position]["cache_percent"] > 60
        near_line = abs(heights[position] - heights[0]) < 0.08
        height = max(heights[position] + (0.1 if near_line else 0), taken.get(left, -1.0) + 0.15)
        taken[left] = height
        axes.text(
            row["cache_percent"] + (1.5 if left else -1 if near_line else 2.2),
            low * (high / low) ** height,
            f"{row['name']}\n{row['perplexity']:.4g} at {number_text(row['cache_percent'])} %",
            ha="right" if left else "left",
            va="center",
            color=_colour(position),
            linespacing=1.35,
        )


def cache_figure(results: Record) -> Figure:
    """Size of the cache of one sequence."""
    rows = [(row["name"], row["cache_bytes_per_token"] * CONTEXT / 2**20) for row in results["rows"]]
    texts = [f"{bytes_text(mib * 2**20)}" for _, mib in rows]
    return _bars(rows, texts, f"cache of one sequence of {CONTEXT:,} tokens, MiB")


def speed_figure(results: Record) -> Figure | None:
    """Decode speed of the rows that have one."""
    timed = [row for row in results["rows"] if row.get("tokens_per_second") is not None]
    if len(timed) < 2:
        return None
    rows = [(row["name"], row["tokens_per_second"]) for row in timed]
    texts = [f"{number_text(row['tokens_per_second'])}  ({factor_text(row['decode_ratio'])})" for row in timed]
    return _bars(rows, texts, "decode, tokens per second (ratio to the original)")


def layer_figure(results: Record) -> Figure | None:
    """One line per list of `per_layer`, over the layers."""
    lines = {name: values for name, values in results.get("per_layer", {}).items() if values}
    if not lines:
        return None
    figure = Figure(figsize=(7.6, 2.9), layout="constrained")
    axes = figure.add_subplot()
    for position, (name, values) in enumerate(lines.items(), start=1):
        colour = _colour(position)
        axes.plot(values, color=colour, marker=MARKERS[position % len(MARKERS)], markersize=4, linewidth=1.6)
        axes.annotate(
            name.replace("_", " "),
            (len(values) - 1, values[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            annotation_clip=False,
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure


FIGURES: dict[str, Callable[[Record], Figure | None]] = {
    "quality": quality_figure,
    "cache": cache_figure,
    "speed": speed_figure,
    "layers": layer_figure,
}


def _bars(rows: Sequence[tuple[str, float]], texts: Sequence[str], title: str) -> Figure:
    figure = Figure(figsize=(7.6, 0.75 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    values = [value for _, value in rows]
    axes.barh(range(len(rows)), values, height=0.62, color=[_colour(position) for position in range(len(rows))])
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.22)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["bottom"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10.5, color=MUTED)
    for position, (value, text) in enumerate(zip(values, texts, strict=True)):
        axes.text(value + max(values) * 0.012, position, text, va="center")
    return figure


def _colour(position: int) -> str:
    return SERIES[position % len(SERIES)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between `low` and `high`: 1, 2, 5 of each power of ten, or also the rest where these are few."""
    powers = [10.0**exponent for exponent in range(-2, 9)]
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [step * power for power in powers for step in steps if low <= step * power <= high]
        if len(ticks) >= 3:
            return ticks
    return [round(low * 1.1, 1), round(high / 1.1, 1)]
