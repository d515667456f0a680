"""The trade-off of a conversion as a figure: perplexity against the bytes that one token takes in the cache."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from kvfold.checkpoint import write_bytes
from kvfold.report.curves import MARKERS, PLAIN, Curve, curves, ratio_limits, ratio_ticks, share_ticks
from kvfold.report.figures import GRID, INK, MUTED, PAPER, STYLE
from kvfold.report.formats import bytes_text, number_text
from kvfold.report.placing import Name, along, place_names

Record = Mapping[str, Any]

SMALL = 9.0
"""Size of all texts but the titles, in points."""
ROW = 0.065
"""Height of a row of the strip for values off the scale, in parts of the height of the axes."""
KEY: dict[str, Any] = {
    "ncols": 5,
    "frameon": False,
    "fontsize": SMALL,
    "labelcolor": MUTED,
    "handlelength": 2.9,
    "columnspacing": 1.6,
}
FILE_STYLE: dict[Any, Any] = STYLE | {"svg.fonttype": "path"}
"""Letters as outlines look the same in every viewer, and so keep clear of what they were placed beside."""
FORMATS: dict[str, dict[str, Any]] = {"png": {"dpi": 200}, "svg": {"metadata": {"Date": None}}}
CACHE_NAMES = {"bfloat16": "bf16 cache", "int8": "int8 cache", "int4": "int4 cache"}


def draw_tradeoff(result: Record, path_stem: str | Path) -> list[Path]:
    """Write the figure as `path_stem` with `.png` and `.svg` after it.

    Args:
        result: JSON-able, with the keys
            `model`: its name;
            `original`: `bytes_per_token` and `perplexity`;
            `points`: dicts of `name` (of the method; `original` for the original in a quantised cache), `cache`
            (`bfloat16`, `int8` or `int4`), `bytes_per_token`, `predicted_perplexity` and `perplexity` (measured), of
            which one or both may be None.
        path_stem: the files' common path; dots in its name are taken as they are.

    Returns:
        The paths of the files, each replaced in one step.

    Raises:
        OutputError: a file cannot be written.
        UnknownNameError: no such kind of cache.
    """
    figure = tradeoff_figure(result)
    paths = []
    with matplotlib.rc_context(FILE_STYLE):
        for suffix, options in FORMATS.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, facecolor=PAPER, **options)
            paths.append(Path(f"{path_stem}.{suffix}"))
            write_bytes(paths[-1], buffer.getvalue())
    return paths


def tradeoff_figure(result: Record) -> Figure:
    """The figure itself: the share of the original's bytes on a log axis, perplexity over the original's on another.

    Methods that are far off do not squeeze the others: their lines leave at the top, where a strip gives their values.
    """
    found = curves(result)
    bottom, top = ratio_limits(found)
    off_scale = sorted((curve for curve in found if curve.beyond(top)), key=lambda curve: -curve.beyond(top)[0][1])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 4.6), layout="constrained")
        FigureCanvasAgg(figure)  # it measures texts
        grid = figure.add_gridspec(2, 1, height_ratios=(max(ROW * len(off_scale), 1e-3), 1), hspace=0)
        axes = figure.add_subplot(grid[1])
        _draw_axes(axes, found, result["original"]["bytes_per_token"], (bottom, top))
        for curve in found:
            _draw_curve(axes, curve)
        figure.suptitle(str(result["model"]), x=0.012, ha="left", fontsize=10.5, color=MUTED)
        figure.legend(handles=_key(found), loc="outside lower center", **KEY)
        rows = _draw_strip(figure.add_subplot(grid[0], sharex=axes), off_scale, top) if off_scale else []
        figure.draw_without_rendering()  # the layout that the names are placed in
        figure.set_layout_engine("none")
        for curve, texts in zip(off_scale, rows, strict=True):
            _name_row(figure.axes[-1], curve, texts)
        _name_curves(axes, found)
    return figure


def _draw_axes(axes: Axes, found: Sequence[Curve], base: float, ends: tuple[float, float]) -> None:
    smallest = min(size for curve in found for size, _, _ in curve.points)
    margin = max((base / smallest) ** 0.06, 1.1)
    axes.set(xscale="log", yscale="log", xlim=(smallest / margin, base * margin), ylim=ends)
    ticks = ratio_ticks(*ends)
    axes.set_yticks(ticks, [number_text(tick) for tick in ticks])
    shares = share_ticks(found, base)
    axes.set_xticks(
        [base * share for share in shares],
        [f"{number_text(100 * share)} %\n{bytes_text(base * share)}" for share in shares],
    )
    axes.minorticks_off()
    axes.tick_params(labelsize=SMALL)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("cache per token, share of the original's")
    axes.set_ylabel("perplexity, times the original's (log scale)")
    axes.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 4)))


def _draw_curve(axes: Axes, curve: Curve) -> None:
    sizes, ratios, caches = zip(*curve.points, strict=True)
    width = 1.8 if curve.plain else 1.1
    axes.plot(sizes, ratios, color=curve.colour, linewidth=width, linestyle=_line(curve.measured), zorder=2.5)
    inside = curve.up_to(axes.get_ylim()[1])
    for cache in dict.fromkeys(caches):
        shown = np.array([point[:2] for point in inside if point[2] == cache]).reshape(-1, 2)
        axes.plot(*shown.T, zorder=3, **_marker(cache, curve.measured, curve.colour))


def _marker(cache: str, measured: bool, colour: str, *, line: bool = False) -> dict[str, Any]:
    return {
        "linestyle": _line(measured) if line else "none",
        "marker": MARKERS[cache],
        "markersize": 7.5 if cache == "int4" else 6.5,
        "markerfacecolor": colour if measured else PAPER,
        "markeredgecolor": PAPER if measured else colour,
        "markeredgewidth": 0.7 if measured else 1.4,
    }


def _draw_strip(axes: Axes, rows: Sequence[Curve], top: float) -> list[list[Text]]:
    """The values beyond the end of the axis below, a row for each curve that has any; returns their texts."""
    axes.set(ylim=(len(rows) - 0.45, -0.55), facecolor=f"{GRID}80")
    axes.set_yticks([(len(rows) - 1) / 2], ["off scale"])
    axes.tick_params(length=0, labelsize=SMALL, labelbottom=False)
    axes.spines[:].set_visible(False)
    style = {"ha": "center", "va": "center", "fontsize": SMALL}
    return [
        [
            axes.text(size, row, number_text(float(f"{ratio:.3g}")), color=curve.colour, **style)
            for size, ratio, _ in curve.beyond(top)
        ]
        for row, curve in enumerate(rows)
    ]


def _name_row(axes: Axes, curve: Curve, texts: Sequence[Text]) -> None:
    """The name of a row of the strip, before its first or behind its last value, where there is more room."""
    first, last, area = texts[0], texts[-1], axes.get_window_extent()
    before = first.get_window_extent().x0 - area.x0 > area.x1 - last.get_window_extent().x1
    axes.annotate(
        curve.label,
        xy=(0, 0.5) if before else (1, 0.5),
        xycoords=first if before else last,
        xytext=(-8 if before else 8, 0),
        textcoords="offset points",
        ha="right" if before else "left",
        va="center",
        fontsize=SMALL,
        weight="bold",
        color=curve.colour,
    )


def _key(found: Sequence[Curve]) -> list[Line2D]:
    """What markers and lines mean, as far as they occur."""
    caches = {cache for curve in found for _, _, cache in curve.points}
    entries = [(CACHE_NAMES[cache], cache, True) for cache in MARKERS if cache in caches]
    if any(not curve.measured for curve in found):
        entries += [("predicted", PLAIN, False), ("measured", PLAIN, True)]
    return [
        Line2D([], [], color=MUTED, linewidth=1.4, label=label, **_marker(cache, measured, MUTED, line=True))
        for label, cache, measured in entries
    ]


def _name_curves(axes: Axes, found: Sequence[Curve]) -> None:
    """Names beside the curves, at a point in the plain cache if there is one, and a measured one if there is one."""
    area, top = axes.get_window_extent(), axes.get_ylim()[1]
    names = []
    for name in dict.fromkeys(curve.name for curve in found):
        own = [curve for curve in found if curve.name == name]
        main = max(own, key=lambda curve: (bool(curve.up_to(top)), curve.plain, curve.measured))
        if inside := [point[:2] for point in main.up_to(top)]:
            lines = [along(axes.transData.transform([point[:2] for point in curve.points]), area) for curve in own]
            anchors = axes.transData.transform(inside)
            names.append(Name(text=name, colour=main.colour, anchors=anchors, curve=np.concatenate(lines)))
    level = axes.transData.transform([(size, 1.0) for size in axes.get_xlim()])
    place_names(axes, names, taken=along(level, area), fontsize=SMALL + 0.5)


def _line(measured: bool) -> Any:
    return "-" if measured else (0, (3.5, 2))
