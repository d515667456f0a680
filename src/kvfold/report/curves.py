"""What the trade-off figure draws, as numbers: the curves, where the axes end, and their ticks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.registry import lookup
from kvfold.report.figures import INK

Record = Mapping[str, Any]
Point = tuple[float, float, str]
"""Bytes per token, perplexity over the original's, kind of cache."""

ORIGINAL = "original"
"""The name of the points that are the original's own, in a quantised cache."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#a07800", "#4f9fd8", "#7b3f00")
"""Of the methods in their order, distinct for the colour-blind; names stand beside the curves as well."""
MARKERS = {"bfloat16": "o", "int8": "s", "int4": "^"}
"""By the kind of cache."""
PLAIN = "bfloat16"
RATIOS = (
    *(step * 10**power for step in (1, 2, 5, 1.5, 3, 7, 4) for power in range(6)),
    *(1.2, 1.1, 1.3, 1.7, 2.5, 1.05, 1.15),
)
"""Ticks for perplexity over the original's, in the order in which they are taken while there is room."""
FAR_OFF = 10.0
"""What is this many times the largest ratio of the best method does not stretch the axis."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points of one method in one kind of cache, by size; the original's are one curve over all kinds."""

    name: str
    colour: str
    measured: bool
    plain: bool
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        """The name with what sets the curve apart from others of this name."""
        parts = (self.name, "" if self.plain else self.points[0][2], "" if self.measured else "predicted")
        return ", ".join(filter(None, parts))

    def up_to(self, top: float) -> list[Point]:
        return [point for point in self.points if point[1] <= top]

    def beyond(self, top: float) -> list[Point]:
        return [point for point in self.points if point[1] > top]


def curves(result: Record) -> list[Curve]:
    """The points of `result` (see `draw_tradeoff`) as curves: the original's first, then method by method."""
    base = result["original"]
    names = [name for name in dict.fromkeys(point["name"] for point in result["points"]) if name != ORIGINAL]
    colours = {ORIGINAL: INK} | {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    groups: dict[tuple[str, bool, str], list[Point]] = {(ORIGINAL, True, ""): [(base["bytes_per_token"], 1.0, PLAIN)]}
    for point in result["points"]:
        lookup(MARKERS, point["cache"], "cache")
        # How far quantising alone goes is one curve, from the plain cache on.
        cache = "" if point["name"] == ORIGINAL else point["cache"]
        for measured, key in ((False, "predicted_perplexity"), (True, "perplexity")):
            if point[key] is not None:
                group = groups.setdefault((point["name"], measured, cache), [])
                group.append((point["bytes_per_token"], point[key] / base["perplexity"], point["cache"]))
    order = list(colours)
    return [
        Curve(
            name=name, colour=colours[name], measured=measured, plain=cache in ("", PLAIN), points=tuple(sorted(points))
        )
        for (name, measured, cache), points in sorted(groups.items(), key=lambda item: order.index(item[0][0]))
    ]


def ratio_limits(found: Sequence[Curve]) -> tuple[float, float]:
    """Ends of the axis of ratios: around all that are not far off, which would squeeze the others into a corner."""
    ratios = [(curve.name, ratio) for curve in found for _, ratio, _ in curve.points if math.isfinite(ratio)]
    largest = {name: max(ratio for own, ratio in ratios if own == name) for name, _ in ratios}
    best = min((ratio for name, ratio in largest.items() if name != ORIGINAL), default=largest[ORIGINAL])
    top = max(max(ratio for _, ratio in ratios if ratio <= FAR_OFF * best) ** 1.08, 1.1)
    return min(ratio for _, ratio in ratios) / top**0.05, top


def ratio_ticks(bottom: float, top: float) -> list[float]:
    """Plain numbers between the ends of the axis."""
    return _spread([tick for tick in RATIOS if bottom <= tick <= top], math.log(top / bottom) / 13)


def share_ticks(found: Sequence[Curve], base: float) -> list[float]:
    """Shares of the `base` bytes: the budgets in the plain cache, and halvings where these leave gaps."""
    budgets = {size / base for curve in found for size, _, cache in curve.points if cache == PLAIN}
    smallest = min(size for curve in found for size, _, _ in curve.points) / base
    octaves = max(-math.log2(smallest), 1.0)
    chosen = _spread([1.0, *sorted(budgets, reverse=True)], 0.1 * octaves * math.log(2))
    halvings = [2.0**-power for power in range(1, int(octaves + 0.3) + 1)]
    return chosen + [
        half for half in halvings if all(abs(math.log2(half / share)) > 0.17 * octaves for share in chosen)
    ]


def _spread(values: Iterable[float], least: float) -> list[float]:
    """Those of `values`, in their order, whose logarithms are at least `least` apart from those taken before."""
    chosen: list[float] = []
    for value in values:
        if all(abs(math.log(value / other)) >= least for other in chosen):
            chosen.append(value)
    return chosen
