"""Tables about exports and the runtimes that they are for."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from kvfold.report.formats import number_text
from kvfold.report.tables import plain_table, right, show_tables

ROWS = {
    "prefill": "log-probabilities, prompt",
    "decode": "log-probabilities, decoding",
    "mean": "their mean",
    "tolerance": "tolerance",
    "same_most_likely": "same most likely token",
    "cached_elements": "cached elements",
    "same_tokens": "token ids",
    "verdict": "verdict",
}


def show_diagnosis(result: Mapping[str, Any]) -> None:
    """Print what each runtime made of an export: a table for each, with a column for each way to run it."""
    tables = [_runtime(list(checks)) for _, checks in groupby(result["checks"], key=lambda check: check["runtime"])]
    note = Text(
        "log-probabilities: largest difference from the model, in nats; cache: per token and layer", style="dim"
    )
    title = f"{result['export']} beside {result['model']}: {'passed' if result['passed'] else 'FAILED'}"
    show_tables(title, *tables, note)


def show_runtimes(costs: Sequence[Mapping[str, Any]]) -> None:
    """Print what each runtime would cache of a conversion, see `RuntimeCost`."""
    table = plain_table("runtime", right("elements"), right("%"), Column("", overflow="fold"))
    for cost in costs:
        there = cost["elements"] is not None
        size = (number_text(cost["elements"]), f"{100 * cost['kept']:.2f}") if there else ("none", "")
        table.add_row(cost["runtime"], *size, cost["advice"])
    table.caption = "cached per token and layer once it is exported, % of the original's"
    show_tables("\nIn the runtimes", table)


def _runtime(checks: list[Mapping[str, Any]]) -> Table:
    names = [check["settings"] + ("" if check["advised"] else ", not advised") for check in checks]
    version = checks[0]["version"] or ""
    table = plain_table(
        Column(f"{checks[0]['runtime']} {version}", no_wrap=True), *(Column(name, overflow="fold") for name in names)
    )
    for key, title in ROWS.items():
        cells = [_cell(key, check) for check in checks]
        if any(cells):
            table.add_row(title, *cells)
    return table


def _cell(key: str, check: Mapping[str, Any]) -> str:
    value = check[key]
    if value is None:
        return ""
    if key in ("prefill", "decode", "mean"):
        return f"{value:.1e}"
    if key == "tolerance":
        return f"{value:g}" + (" of the mean" if check["rounded"] else "")
    if key == "same_most_likely":
        return f"{value:.0%}"
    if key == "cached_elements":
        return f"{number_text(round(value, 1))}, expected {number_text(check['expected_elements'])}"
    return {True: "the same", False: "others"}[value] if key == "same_tokens" else value
