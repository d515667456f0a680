"""Paired differences of training losses over several seeds, as a figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kvfold.registry import lookup
from kvfold.report.figures import GRID, MUTED, PAPER, STYLE
from kvfold.report.losses import AXES, SETTLED, SMALL, count_text, save_figure, smoothed

Record = Mapping[str, Any]

COLOURS = {
    "teal": "#0f8b8d",
    "blue": "#2b62b8",
    "grey": "#8b9199",
    "orange": "#c9781b",
    "purple": "#6a4ca8",
    "pink": "#d0558f",
    "green": "#4f6d1e",
}
"""By name, in the order in which curves take them: the first three are those of the published figure."""
ROOM = 0.04
"""Of the axis, between the legend and the curves."""


def draw_differences(record: Record, paths: Sequence[str | Path]) -> None:
    """Write the figure to each path, in the format of its suffix; arguments and errors as of `draw_losses`.

    Args:
        record: as of `differences_figure`.
    """
    # These colours are readable on dark paper as well.
    save_figure(lambda: differences_figure(record), str(record["title"]), {}, paths)


def differences_figure(record: Record) -> Figure:
    """Of every curve the mean over its seeds, a band of one standard deviation of the seeds, and each seed faint.

    Args:
        record: JSON-able, with the keys
            `title`; `axis`: what `x` is, `step` or `tokens`; `label`: of the differences; `log`: whether x is on a log
            scale; `smooth`: share of the points in one mean, see `smoothed`;
            `curves`: dicts of `name`, `x`, `differences` (a list for every seed, as long as `x`) and perhaps `colour`,
            a name of `COLOURS`.

    Raises:
        UnknownNameError: no such colour.
    """
    colours = list(COLOURS.values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        FigureCanvasAgg(figure)  # it measures the legend
        axes = figure.add_subplot()
        bands = []
        for place, curve in enumerate(record["curves"]):
            own = lookup(COLOURS, curve["colour"], "colour") if "colour" in curve else colours[place % len(colours)]
            bands.append(_draw_curve(axes, curve, own, record["smooth"]))
        axes.axhline(0, color=MUTED, linewidth=0.9, linestyle=(0, (4, 4)), zorder=1)
        axes.set(xlabel=AXES[record["axis"]], ylabel=record["label"], ylim=_limits(bands))
        if record["log"]:
            axes.set_xscale("log")
        else:
            axes.set_xlim(0, max(curve["x"][-1] for curve in record["curves"]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
        axes.set_title(record["title"], loc="left", fontsize=10.5, color=MUTED)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        frame = {"frameon": True, "framealpha": 0.85, "edgecolor": "none", "facecolor": PAPER}
        axes.legend(loc="upper left", fontsize=SMALL, **frame)
        figure.draw_without_rendering()
        _raise_for_legend(axes)
    return figure


def _draw_curve(axes: Axes, curve: Record, colour: str, smooth: float) -> np.ndarray:
    """Draw it and return the ends of its band, (2, points)."""
    seeds = np.array([smoothed(differences, smooth) for differences in curve["differences"]])
    mean, deviation = seeds.mean(0), seeds.std(0, ddof=1) if len(seeds) > 1 else np.zeros(seeds.shape[1])
    if len(seeds) > 1:
        axes.plot(curve["x"], seeds.T, color=colour, linewidth=0.6, alpha=0.35)
        axes.fill_between(curve["x"], mean - deviation, mean + deviation, color=colour, alpha=0.16, linewidth=0)
    axes.plot(curve["x"], mean, color=colour, linewidth=1.9, label=curve["name"], zorder=3)
    return np.array((mean - deviation, mean + deviation))


def _limits(bands: Sequence[np.ndarray]) -> tuple[float, float]:
    """Ends of the axis: what the bands do after the wild first steps, and zero."""
    settled = np.concatenate([band[:, int(SETTLED * band.shape[1]) :].ravel() for band in bands] + [np.zeros(1)])
    room = 0.1 * (settled.max() - settled.min()) or 0.01
    return float(settled.min() - room), float(settled.max() + room)


def _raise_for_legend(axes: Axes) -> None:
    """Add room above the curves for the legend; it needs the layout."""
    legend = axes.get_legend()
    assert legend is not None
    box = legend.get_window_extent().transformed(axes.transAxes.inverted())
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, bottom + (top - bottom) / max(box.y0 - ROOM, 0.3))
