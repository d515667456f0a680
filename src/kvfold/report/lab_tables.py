"""Tables of the lab for the terminal: matched sizes, and what a sweep found."""

from collections.abc import Mapping
from typing import Any

from rich.table import Column

from kvfold.report.formats import number_text
from kvfold.report.tables import plain_table, right, show_tables

Record = Mapping[str, Any]


def show_match(result: Record) -> None:
    """Print what `kvfold match` found: sizes and costs of every variant."""
    degrees = list(result["variants"][0]["cache_bytes_per_device"])
    columns = ("heads", "layers", "FFN", "parameters", "off by")
    sizes = plain_table(Column("", no_wrap=True), "attention", *map(right, columns))
    columns = ("MFLOPs", *(f"TP {degree}" for degree in degrees), "FLOPs/byte")
    costs = plain_table(Column("", no_wrap=True), *map(right, columns))
    for row in result["variants"]:
        counts = (row[key] for key in ("num_attention_heads", "num_hidden_layers", "intermediate_size", "parameters"))
        sizes.add_row(row["name"], row["attention"], *map(number_text, counts), f"{100 * row['error']:+.3f} %")
        cached = (number_text(size) for size in row["cache_bytes_per_device"].values())
        costs.add_row(row["name"], f"{row['flops_per_token'] / 1e6:,.1f}", *cached, f"{row['decode_intensity']:.1f}")
    costs.caption = (
        f"forward pass of one token at {result['context']:,} tokens; cached bytes (bf16) of one token and device at "
        "tensor-parallel degrees; attention's FLOPs per byte read from the cache when decoding"
    )
    show_tables("Matched variants", sizes, costs)


def show_sweep(result: Record) -> None:
    """Print what a sweep found: losses of every variant over its seeds, and paired differences."""
    columns = ("heads", "bytes", "M", "seeds", "loss", "held-out loss", "perplexity")
    losses = plain_table(Column("", no_wrap=True), *map(right, columns))
    for row in result["variants"]:
        perplexity = "–" if row["perplexity"] is None else f"{row['perplexity']:,.2f}"
        losses.add_row(
            row["name"],
            str(row["num_attention_heads"]),
            number_text(row["cache_bytes_per_device"]["1"]),
            f"{row['parameters'] / 1e6:.2f}",
            str(len(row["seeds"])),
            *(_spread(row[key]) for key in ("loss", "held_out")),
            perplexity,
        )
    losses.caption = (
        "cached bytes per token (bf16), million parameters; nats per token at the end, mean over the seeds ± their "
        "standard deviation"
    )
    differences = plain_table(Column("", no_wrap=True), *map(right, columns[3:-1]))
    for row in result["differences"]:
        one, other = row["variants"]
        cells = (_spread(row[key], key="standard_error", sign="+") for key in ("loss", "held_out"))
        differences.add_row(f"{one} – {other}", str(len(row["seeds"])), *cells)
    differences.caption = "differences between runs of the same seed, mean ± standard error"
    tables = [losses, differences] if result["differences"] else [losses]
    show_tables(f"{result['title'] or 'Sweep'}: {result['steps']:,} steps, {result['tokens']:,} tokens", *tables)


def _spread(values: Record | None, key: str = "standard_deviation", sign: str = "") -> str:
    if values is None:
        return "–"
    return f"{values['mean']:{sign}.4f}" + ("" if values[key] is None else f" ± {values[key]:.4f}")
