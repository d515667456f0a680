"""How values are written for people: the unit of a number follows from the end of its key."""

import math
from typing import Any

UNIT_SUFFIXES = ("_bytes", "_seconds", "_percent")
"""Ends of keys that say the unit; the value shows it, so the label leaves it out."""


def label(key: str) -> str:
    """`peak_memory_bytes` as `peak memory`: what a row or a column is called."""
    for suffix in UNIT_SUFFIXES:
        key = key.removesuffix(suffix)
    return key.replace("_", " ").strip()


def value_text(key: str, value: Any) -> str:
    """`value` with the unit that its key names.

    Bytes become KiB, MiB or GiB, truth values yes and no, None a dash; lists are joined.
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(value_text(key, item) for item in value) or "–"
    if not isinstance(value, int | float):
        return str(value)
    if key.endswith("_bytes") or key.startswith("bytes_"):
        return bytes_text(value)
    if key.endswith("_seconds"):
        return f"{number_text(value)} s"
    if key.endswith("_percent"):
        return f"{number_text(value)} %"
    return number_text(value)


def number_text(value: float) -> str:
    """Counts in full with thousands separated, other numbers to four digits."""
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if 0.001 <= abs(value) < 10_000:
        return f"{value:.4g}"
    return f"{value:.2e}" if abs(value) < 1 else f"{value:,.0f}"


def bytes_text(count: float) -> str:
    """A size in the largest binary unit that it fills."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def factor_text(ratio: float | None) -> str:
    """A ratio to something named elsewhere: `1.87x`."""
    if ratio is None:
        return "–"
    return f"{ratio:.2f}x" if ratio < 100 else f"{ratio:,.0f}x"


def accuracy_text(fraction: float, standard_error: float | None) -> str:
    """Per cent with the standard error, if there is one: `39.8 ± 1.1`."""
    return f"{100 * fraction:.1f}" + ("" if standard_error is None else f" ± {100 * standard_error:.1f}")
