"""Paired differences of training losses over several seeds, as a figure."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox, TransformedBbox

from kvfold.registry import lookup
from kvfold.report.figures import MUTED, STYLE
from kvfold.report.losses import FEW, LEGEND, NEAR, SETTLED, SMALL, finish_axes, save_figure, smoothed

Record = Mapping[str, Any]

COLOURS = {
    "teal": "#0a6b66",
    "blue": "#3877f2",
    "grey": "#8d94a0",
    "orange": "#c87029",
    "purple": "#8747b9",
    "pink": "#e9187e",
    "green": "#3e5723",
}
"""By name, in the order in which curves take them: the first three are those of the published figure.

Any two differ for the colour-blind as well, mostly in lightness, and all have a contrast of 3 with the paper.
"""
DARK = {
    "teal": "#42e6ee",
    "blue": "#5599fa",
    "grey": "#6e7985",
    "orange": "#e5861a",
    "purple": "#b094d6",
    "pink": "#e8a0c0",
    "green": "#97de86",
}
"""The same on a dark page."""
ROOM = 0.04
"""Of the axis, between the legend and the curves."""
LEAST_PART = 0.3
"""Of the axis that the curves keep under a long legend."""


def draw_differences(record: Record, paths: Sequence[str | Path]) -> None:
    """Write the figure to each path, in the format of its suffix; arguments and errors as of `draw_losses`.

    Args:
        record: as of `differences_figure`.
    """
    dark = {colour: DARK[name] for name, colour in COLOURS.items()}
    save_figure(lambda: differences_figure(record), str(record["title"]), dark, paths)


def difference_label(pairs: Iterable[Sequence[str]]) -> str:
    """What the y axis says: the baseline too, where all pairs of (variant, baseline) have the same."""
    bases = {base for _, base in pairs}
    return f"Loss minus that of {bases.pop()}, nats" if len(bases) == 1 else "Loss difference, nats"


def differences_figure(record: Record) -> Figure:
    """Of every curve the mean over its seeds, a band of one standard deviation of the seeds, and each seed faint.

    A wild start does not squeeze the rest: it is cut off, below the legend, and told.

    Args:
        record: JSON-able, with the keys
            `title`; `axis`: what `x` is, `step` or `tokens`; `label`: of the differences; `log`: whether x is on a log
            scale (may be left out); `smooth`: share of the points in one mean, see `smoothed`;
            `curves`: dicts of `name`, `x`, `differences` (a list for every seed, as long as `x`) and perhaps `colour`,
            a name of `COLOURS`; without it, a curve takes the next one that no curve names.

    Raises:
        UnknownNameError: no such colour.
    """
    curves = record["curves"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        FigureCanvasAgg(figure)  # it measures the legend
        axes = figure.add_subplot()
        colours = _colours(curves)
        drawn = [_draw_curve(axes, *pair, record["smooth"]) for pair in zip(curves, colours, strict=True)]
        artists = [*axes.lines, *axes.collections]
        axes.axhline(0, color=MUTED, linewidth=1.1, linestyle=(0, (4, 3)), zorder=2.5)
        finish_axes(axes, record, record)
        _set_limits(axes, [rows for _, rows in drawn])
        # Named one by one: matplotlib leaves out the names that begin with an underscore.
        seeds = max(len(curve["differences"]) for curve in curves)
        told = f"mean of {seeds} seeds; band: their standard deviation" if seeds > 1 else None
        axes.legend(
            [line for line, _ in drawn],
            [curve["name"] for curve in curves],
            loc="upper left",
            title=told,
            title_fontsize=SMALL,
            alignment="left",
            **LEGEND,
        )
        figure.draw_without_rendering()
        part = _raise_for_legend(axes)
        for artist in artists:
            artist.set_clip_box(TransformedBbox(Bbox.from_extents(0, 0, 1, part), axes.transAxes))
    return figure


def _colours(curves: Sequence[Record]) -> list[str]:
    named = [curve.get("colour") for curve in curves]
    free = cycle([name for name in COLOURS if name not in named] or COLOURS)
    return [lookup(COLOURS, next(free) if name is None else name, "colour") for name in named]


def _draw_curve(axes: Axes, curve: Record, colour: str, smooth: float) -> tuple[Line2D, np.ndarray]:
    """Draw it; returns the line of its mean, and all that is drawn as rows of points, the mean first."""
    x, seeds = curve["x"], np.array([smoothed(differences, smooth) for differences in curve["differences"]])
    mean = seeds.mean(0)
    rows = mean[None]
    if len(seeds) > 1:
        deviation = seeds.std(0, ddof=1)
        rows = np.stack((mean, mean - deviation, mean + deviation, *seeds))
        axes.plot(x, seeds.T, color=colour, linewidth=0.5, alpha=0.2, zorder=2)
        axes.fill_between(x, *rows[1:3], color=colour, alpha=0.16, linewidth=0, zorder=1.5)
    marker = "o" if len(mean) <= FEW else ""
    style = {"linewidth": 1.7, "marker": marker, "markersize": 4, "solid_joinstyle": "round", "zorder": 3}
    (line,) = axes.plot(x, mean, color=colour, **style)
    return line, rows


def _set_limits(axes: Axes, drawn: Sequence[np.ndarray]) -> None:
    """End y around zero, what the curves do after the wild first steps, and starts of means not far from that."""
    settled = np.concatenate([[0.0], *(rows[:, int(SETTLED * rows.shape[1]) :].ravel() for rows in drawn)])
    low, high = settled.min(), settled.max()
    near = NEAR * (high - low)
    top = max([high, *(rows[0].max() for rows in drawn if rows[0].max() <= low + near)])
    bottom = min([low, *(rows[0].min() for rows in drawn if rows[0].min() >= high - near)])
    room = 0.06 * (top - bottom) or 0.01
    axes.set_ylim(bottom - room, top + room)
    least, most = min(rows.min() for rows in drawn), max(rows.max() for rows in drawn)
    if least < bottom - room or most > top + room:
        cut = f"start cut off, {least:.2f} to {most:.2f}".replace("-", "\N{MINUS SIGN}")
        axes.set_xlabel(f"{axes.get_xlabel()} ({cut})")  # beside a long title there is no room


def _raise_for_legend(axes: Axes) -> float:
    """Add room for the legend above the curves, and return the part of y they keep; it needs the layout."""
    legend = axes.get_legend()
    assert legend is not None
    box = legend.get_window_extent().transformed(axes.transAxes.inverted())
    bottom, top = axes.get_ylim()
    part = max(box.y0 - ROOM, LEAST_PART)
    axes.set_ylim(bottom, bottom + (top - bottom) / part)
    return part + ROOM / 2
