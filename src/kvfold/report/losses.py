"""Loss curves of training runs over each other, in one panel or several."""

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvfold.checkpoint import write_bytes
from kvfold.registry import lookup
from kvfold.report.figures import GRID, INK, MUTED, PAPER, STYLE, svg
from kvfold.report.page import fill

Record = Mapping[str, Any]

LINES = (INK, "#45217c", "#9a78d6", "#e06ca3", "#0f8b8d", "#c9781b", "#4f6d1e")
"""Of the curves in their order: the first one is what the others are held against."""
DARK = ("#7d5fd3", "#c3aef0", "#f09ac2", "#4cc3c5", "#eba552", "#a2c46a")
"""The same without the first, which is the page's own ink, on a dark page."""
STROKES = ("-", "--", ":")
"""Where there are more curves than colours, the colours come again in the next of these."""
PENS = tuple(product(STROKES, LINES))
FORMATS = (".png", ".svg", ".html")
AXES = {"step": "#Step", "tokens": "training tokens"}
SMOOTH = 0.02
"""Share of the points that one point of a smoothed curve is a mean of."""
SETTLED = 0.1
"""Share of a curve after which its loss must be inside the panel."""
NEAR = 2.0
"""A start or a spike that is not so many times as far up is shown, too."""
CROWDED = 6
"""From so many curves on, the legend has two columns."""
LEAST_PART = 0.6
"""Of a panel's height that the curves keep where the legend would be over them."""
FEW = 12
"""Up to so many points are marked, so that what lies between is not taken for measured."""
SMALL = 9.0
LEGEND: dict[str, Any] = {
    "fontsize": SMALL,
    "frameon": True,
    "framealpha": 0.85,
    "edgecolor": "none",
    "facecolor": PAPER,
}


def draw_losses(record: Record, paths: Sequence[str | Path]) -> None:
    """Write the figure to each path, in the format of its suffix (`.png`, `.svg`, `.html`).

    Args:
        record: as of `losses_figure`.

    Raises:
        OutputError: a file cannot be written.
        UnknownNameError: no such format.
    """
    panels = record["panels"]
    title = ", ".join(panel["title"] or ", ".join(curve["name"] for curve in panel["curves"]) for panel in panels)
    save_figure(lambda: losses_figure(record), title, dict(zip(LINES[1:], DARK, strict=True)), paths)


def save_figure(
    draw: Callable[[], Figure], title: str, colours: Mapping[str, str], paths: Sequence[str | Path]
) -> None:
    """Write a figure to each path, as `draw_losses` says.

    Args:
        draw: makes it, once the paths are known to be good.
        title: of the page.
        colours: of the curves, with what each becomes on a dark page.
    """
    for path in map(Path, paths):
        lookup(dict.fromkeys(FORMATS), path.suffix, "suffix of a figure")
    figure = draw()
    style: dict[Any, Any] = STYLE | {"svg.fonttype": "path"}
    for path in map(Path, paths):
        buffer = io.BytesIO()
        if path.suffix == ".html":
            buffer.write(_page(title, figure, colours).encode())
        else:
            options: dict[str, Any] = {"dpi": 200} if path.suffix == ".png" else {"metadata": {"Date": None}}
            with matplotlib.rc_context(style):
                figure.savefig(buffer, format=path.suffix[1:], facecolor=PAPER, **options)
        write_bytes(path, buffer.getvalue())


def losses_figure(record: Record) -> Figure:
    """Noise faint, the smoothed curve over it; the legend in the upper right corner.

    Args:
        record: JSON-able, with the keys
            `panels`: dicts of `title` and `curves`, from top to bottom; a curve has a `name`, `x` and the `losses`
            there (nats per token), and `line`, its place in the order of colours and strokes, where that is not its
            place among the curves;
            `axis`: what `x` is: `step` or `tokens`;
            `label`: what the losses are, beside their axis;
            `smooth`: share of the points in one mean, see `smoothed`;
            `log`: whether x is on a log scale (may be left out).
    """
    panels = record["panels"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.5 + 3.1 * len(panels)), layout="constrained")
        FigureCanvasAgg(figure)  # it measures the legends
        for place, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(len(panels), 1, place)
            _draw_panel(axes, panel, record["smooth"])
            finish_axes(axes, record, panel)
        figure.draw_without_rendering()
        for axes, panel in zip(figure.axes, panels, strict=True):
            _clear_legend(axes, panel, record["smooth"])
            _tell_cut_off(axes, panel)
    return figure


def finish_axes(axes: Axes, record: Record, panel: Record) -> None:
    """All but the curves, the ends of y and the legend: title, labels, ends and ticks of x, grid.

    Args:
        axes: to change.
        record: with `axis`, `label` and perhaps `log`, as of `losses_figure`.
        panel: with `title` and `curves`.
    """
    log, x = bool(record.get("log")), [curve["x"] for curve in panel["curves"]]
    first = max(1, min(values[0] for values in x)) if log else 0
    # Ends before the scale: matplotlib would look for its own and warn where all runs are at their very start.
    last = max(values[-1] for values in x)
    axes.set_xlim(first, last if last > first else max(2 * first, 1))
    if log:
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    axes.set(xlabel=AXES[record["axis"]], ylabel=record["label"])
    axes.set_title(panel["title"], loc="left", fontsize=10.5, color=MUTED)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def smoothed(losses: Sequence[float], share: float) -> np.ndarray:
    """Means over a window of `share` of the points around each, or what there is of it towards the ends."""
    values = np.asarray(losses, dtype=float)
    sums = np.concatenate(([0.0], values.cumsum()))
    places, reach = np.arange(len(values)), round(share * len(values) / 2)
    first, behind = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    return (sums[behind] - sums[first]) / (behind - first)


def ends(losses: Sequence[float], share: float) -> tuple[float, float]:
    """The means over the first and the last `share` of the points."""
    count = max(round(share * len(losses)), 1)
    return float(np.mean(losses[:count])), float(np.mean(losses[-count:]))


def _draw_panel(axes: Axes, panel: Record, smooth: float) -> None:
    curves = [(curve, smoothed(curve["losses"], smooth)) for curve in panel["curves"]]
    lines = []
    for place, (curve, means) in enumerate(curves):
        stroke, colour = PENS[curve.get("line", place) % len(PENS)]
        axes.plot(curve["x"], curve["losses"], color=colour, linewidth=0.6, alpha=0.22)
        marker = "o" if len(means) <= FEW else ""
        lines += axes.plot(curve["x"], means, stroke, marker=marker, markersize=4, color=colour, linewidth=1.7)
    axes.set(ylim=_limits([(np.asarray(curve["losses"]), means) for curve, means in curves]))
    # Named one by one: matplotlib leaves out the names that begin with an underscore.
    names = [curve["name"] for curve, _ in curves]
    axes.legend(lines, names, loc="upper right", ncols=1 + (len(names) >= CROWDED), **LEGEND)


def _clear_legend(axes: Axes, panel: Record, smooth: float) -> None:
    """Raise the end of the axis until no smoothed curve is behind the legend; it needs the layout."""
    legend = axes.get_legend()
    assert legend is not None
    box = legend.get_window_extent().transformed(axes.transAxes.inverted())
    left, highest = box.x0 * axes.get_xlim()[1], -np.inf
    for curve in panel["curves"]:
        x, means = np.asarray(curve["x"]), smoothed(curve["losses"], smooth)
        if x[-1] >= left:
            highest = max(highest, np.interp(left, x, means), means[x >= left].max())
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, max(top, bottom + (highest - bottom) / max(box.y0 - 0.02, LEAST_PART)))


def _tell_cut_off(axes: Axes, panel: Record) -> None:
    largest = [max(curve["losses"]) for curve in panel["curves"]]
    if above := [loss for loss in largest if loss > axes.get_ylim()[1]]:
        note = f"cut off: {len(above)} of {len(largest)}, up to {max(above):.1f}"
        axes.set_title(note, loc="right", fontsize=SMALL, color=MUTED)


def count_text(value: float) -> str:
    """Thousands separated; from a million on in millions or billions, which would run into each other in full."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:,.0f}"


def _limits(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Ends of the axis: from below nearly all noise to what the highest curve has come down to soon after its start."""
    low = min(min(np.percentile(losses, 1), means.min()) for losses, means in curves)
    later = [(losses[int(SETTLED * len(losses)) :], means[int(SETTLED * len(means)) :]) for losses, means in curves]
    settled = max(max(np.percentile(losses, 99), means.max()) for losses, means in later)
    tops = [*(losses.max() for losses, _ in later), *(means.max() for _, means in curves)]
    near = NEAR * (settled - low)
    high = max([settled, *(top for top in tops if top <= low + near)])
    deepest = min([low, *(losses.min() for losses, _ in curves if losses.min() >= settled - near)])
    room = 0.08 * (high - low) or 0.1
    return float(deepest - room), float(high + 2 * room)


def _page(title: str, figure: Figure, colours: Mapping[str, str]) -> str:
    drawn = svg(figure)
    for place, colour in enumerate(colours, start=1):
        drawn = drawn.replace(colour, f"var(--line-{place})")
    return fill("losses.html.j2", title=title, figure=Markup(drawn), colours=colours)
