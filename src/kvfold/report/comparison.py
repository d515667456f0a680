"""The page of a comparison: a figure and the tables, in one HTML file that needs nothing but itself."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from markupsafe import Markup

from kvfold.report.figures import svg
from kvfold.report.page import fill
from kvfold.report.tradeoff import tradeoff_figure

Record = Mapping[str, Any]


def render_comparison(result: Record) -> str:
    """The page.

    Args:
        result: what `Comparison.to_dict` gives, and `provenance`.
    """
    first, *others = (_point(row) for row in result["rows"])
    figure = None
    if first["perplexity"] is not None and others:
        record = {"model": result["rows"][0]["name"], "original": first, "points": others}
        figure = Markup(svg(tradeoff_figure(record)))
    return fill("comparison.html.j2", result=result, figure=figure)


def _point(row: Record) -> dict[str, Any]:
    """A row as a point of `tradeoff_figure`, its perplexity the geometric mean of the texts."""
    quantised = row["name"].endswith(", int4 cache")
    nats = row["nats_per_token"].values()
    return {
        "name": "original" if quantised else row["name"],
        "cache": "int4" if quantised else "bfloat16",
        "bytes_per_token": row["cache_bytes_per_token"],
        "predicted_perplexity": None,
        "perplexity": math.exp(fmean(nats)) if nats else None,
    }
