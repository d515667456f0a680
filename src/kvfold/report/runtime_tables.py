"""Tables about exports and the runtimes that they are for."""

from collections.abc import Mapping
from typing import Any

from rich.table import Column

from kvfold.report.formats import number_text
from kvfold.report.tables import plain_table, right, show_tables


def show_diagnosis(result: Mapping[str, Any]) -> None:
    """Print what each runtime made of an export."""
    table = plain_table(
        Column("runtime", no_wrap=True),
        Column("settings", overflow="fold"),
        *map(right, ("prefill", "decode", "same top token", "cached elements", "token ids")),
        "verdict",
    )
    for check in result["checks"]:
        version = f" {check['version']}" if check["version"] else ""
        settings = check["settings"] if check["advised"] else f"{check['settings']} (not advised)"
        table.add_row(f"{check['runtime']}{version}", settings, *_found(check), check["verdict"])
    table.caption = (
        "prefill, decode: largest difference of log-probabilities in nats; cached elements: per token and layer"
    )
    title = f"{result['export']} beside {result['model']}: {'passed' if result['passed'] else 'FAILED'}"
    show_tables(title, table)


def _found(check: Mapping[str, Any]) -> list[str]:
    if check["prefill"] is None:
        return [""] * 5
    cached = check["cached_elements"]
    ids = {True: "the same", False: "others", None: ""}[check["same_tokens"]]
    return [
        f"{check['prefill']:.1e}",
        f"{check['decode']:.1e}",
        f"{check['same_most_likely']:.0%}",
        "not told" if cached is None else number_text(round(cached, 1)),
        ids,
    ]
