"""Names beside the curves they belong to, where they cover nothing: a search over a few places around each point."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from kvfold.report.figures import PAPER

DISTANCES = (5.0, 9.0, 14.0, 20.0)
"""From a point to its name, in points of 1/72 inch."""
SIDES = tuple((x, y) for y, x in product((1, -1, 0), (-1, 1, 0)) if (x, y) != (0, 0))
"""Left or right of a point, above or below it; what comes first is preferred."""
CLEARER = 5.0
"""How much nearer a name should be to its own curve than to any other, in points."""
MARKER_RADIUS = 5.0
"""In pixels at the figure's own resolution."""


@dataclass(frozen=True, kw_only=True)
class Name:
    """A text to place near one of `anchors` or between two of them, and all that is drawn of its own curve.

    Both are display coordinates (n, 2).
    """

    text: str
    colour: str
    anchors: np.ndarray
    curve: np.ndarray


def place_names(axes: Axes, names: Sequence[Name], *, taken: np.ndarray, fontsize: float) -> list[Text]:
    """Write each name where it covers no curve, no marker and no other name, and is nearer to its curve than to others.

    The layout of the figure must be final; the texts keep their places at any resolution.

    Args:
        axes: to write on.
        names: in order of importance: each takes the best place that is left.
        taken: other points to keep clear of, in display coordinates (n, 2).
        fontsize: in points.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    unit = figure.dpi / 72  # pixels per point
    room = axes.get_window_extent()
    boxes: list[Bbox] = []
    texts = []
    for name in names:
        others = np.concatenate([taken, *(other.curve for other in names if other is not name)])
        text = axes.text(0, 0, name.text, color=name.colour, fontsize=fontsize, weight="bold", zorder=5)
        text.set(in_layout=False, path_effects=[withStroke(linewidth=2.5, foreground=PAPER)])
        size = text.get_window_extent()
        places = _places(name.anchors, size.width, size.height, unit)
        costs = [
            effort + _cost(box, own=name.curve, others=others, boxes=boxes, room=room, unit=unit)
            for effort, box in places
        ]
        box = places[int(np.argmin(costs))][1]
        boxes.append(box)
        text.set(position=axes.transAxes.inverted().transform(box.p0), transform=axes.transAxes, va="bottom")
        texts.append(text)
    return texts


def _places(anchors: np.ndarray, width: float, height: float, unit: float) -> list[tuple[float, Bbox]]:
    """Candidates with what speaks against each by itself: being far from the point, a later anchor, a later side."""
    places = []
    middles = (anchors[:-1] + anchors[1:]) / 2
    for rank, (x, y) in enumerate(np.concatenate((anchors, middles))):
        for (side, (right, up)), distance in product(enumerate(SIDES), DISTANCES):
            left = x + distance * unit * right - width * (1 - right) / 2
            bottom = y + distance * unit * up - height * (1 - up) / 2
            places.append((0.1 * distance + 0.3 * rank + 0.2 * side, Bbox.from_bounds(left, bottom, width, height)))
    return places


def _cost(box: Bbox, *, own: np.ndarray, others: np.ndarray, boxes: Iterable[Bbox], room: Bbox, unit: float) -> float:
    outside = not (room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1)
    names = sum(box.padded(2 * unit).overlaps(other) for other in boxes)
    to_own, to_others = (_distances(box, points) / unit for points in (own, others))
    covered = (to_own < 1).sum() + (to_others < 1).sum()
    unclear = max(to_own.min() + CLEARER - to_others.min(), 0)
    return 1000.0 * outside + 500.0 * names + 20.0 * covered + 1.0 * unclear


def _distances(box: Bbox, points: np.ndarray) -> np.ndarray:
    """From the border of `box` to each point, 0 inside."""
    outside = np.maximum(np.maximum(box.min - points, points - box.max), 0)
    return np.hypot(*outside.T)


def along(corners: np.ndarray, area: Bbox) -> np.ndarray:
    """Points on the lines between `corners` (n, 2), markers included, as far as they lie in `area`."""
    corners = corners[np.isfinite(corners).all(1)]
    starts, ends = corners[:-1, None], corners[1:, None]
    lines = (starts + (ends - starts) * np.linspace(0, 1, 65)[None, :, None]).reshape(-1, 2)
    angles = np.linspace(0, 2 * np.pi, 8, endpoint=False)
    circle = MARKER_RADIUS * np.stack((np.cos(angles), np.sin(angles)), axis=-1)
    points = np.concatenate((lines, corners, (corners[:, None] + circle).reshape(-1, 2)))
    return points[[area.contains(*point) for point in points]]
