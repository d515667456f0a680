"""Tables for the terminal, made of the dicts that the commands print as JSON."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvfold.report.checks import verification_facts
from kvfold.report.formats import accuracy_text, bytes_text, factor_text, label, number_text, value_text

Record = Mapping[str, Any]


def show_inspection(result: Record) -> None:
    """Print what `inspect_model` found: one line per run of layers that are alike, then the model as a whole."""
    table = plain_table(
        "layers", "attention", *map(right, ("heads", "KV heads", "window", "elements/token", "bytes/token"))
    )
    for first, last, layer in _runs(result["layers"]):
        table.add_row(
            _span(first, last),
            layer["attention"],
            number_text(layer["query_heads"]),
            number_text(layer["kv_heads"]),
            value_text("sliding_window", layer["sliding_window"]),
            number_text(layer["cached_elements"]),
            number_text(layer["cached_bytes"]),
        )
    table.caption = "heads, window in tokens, and what one token caches, per layer"
    facts = {
        "type": result["model_type"],
        "dtype": result["dtype"],
        "parameters": result["parameters"],
        "cache per token": f"{number_text(result['cached_elements_per_token'])} elements, "
        f"{bytes_text(result['cached_bytes_per_token'])}",
        "convertible": "yes" if result["convertible"] else f"no: {result['reason']}",
    }
    show_tables(result["model"], _facts(facts), *([table] if result["layers"] else []))


def show_plan(result: Record) -> None:
    """Print what a conversion will do."""
    show_tables(f"Plan for {result['source']}", *_plan_tables(result))


def show_conversion(result: Record) -> None:
    """Print a finished conversion, or the plan that `--dry-run` gives instead."""
    if "plan" not in result:
        show_plan(result)
        return
    tables = _plan_tables(result["plan"])
    if result["stage_errors"]:
        tables.append(_stage_table(result))
    total = sum(result["seconds"].values())
    tables.append(_facts({f"{label(stage)}_seconds": time for stage, time in result["seconds"].items()}))
    show_tables(f"Converted {result['plan']['source']} to {result['out']} in {total:.1f} s", *tables)


def _stage_table(result: Record) -> Table:
    losses = result["stage_losses"]
    table = plain_table("stage", *map(right, ("loss", "over the original", "error of attention", "worst")))
    table.add_row("original", f"{losses['original']:.3f}")
    for stage, errors in result["stage_errors"].items():
        table.add_row(
            stage,
            f"{losses[stage]:.3f}",
            f"{losses[stage] - losses['original']:+.3f}",
            f"{sum(errors) / len(errors):.3f}",
            f"{max(errors):.3f}, layer {errors.index(max(errors))}",
        )
    table.caption = "loss in nats per token on a little held-out text; error relative, mean over the layers"
    return table


def show_verification(result: Record) -> None:
    """Print the comparison of a converted model with its original."""
    show_tables(f"{result['converted']} against {result['original']}", _facts(verification_facts(result)))


def show_evaluation(result: Record) -> None:
    """Print perplexity, cache, speed and benchmark scores of one model, as far as they were measured."""
    facts = {}
    if result["text"] is not None:
        facts["perplexity"] = result["perplexity"]
        facts["scored on"] = f"{result['windows']:,} windows of {result['context']:,} tokens of {result['text']}"
    facts["cache per token"] = (
        f"{number_text(result['cache_elements_per_token_and_layer'])} elements per layer, "
        f"{bytes_text(result['cache_bytes_per_token'])} in all ({result['dtype']})"
    )
    if result["text"] is not None:
        speed = f"{number_text(result['tokens_per_second'])} tokens/s"
        facts["decode"] = f"{speed} (batch 1, {result['context']:,} tokens cached)"
    show_tables(result["model"], _facts(facts), *([] if result["tasks"] is None else [_scores(result["tasks"])]))


def _scores(result: Record) -> Table:
    table = plain_table("task", *map(right, ("items", "acc", "acc_norm", "score", "±")))
    average = {"score": result["average"], "standard_error": result["average_standard_error"]}
    for name, score in {**result["tasks"], "average": average}.items():
        fractions = (score.get(key) for key in ("accuracy", "acc_norm", "score", "standard_error"))
        cells = ("–" if value is None else f"{100 * value:.2f}" for value in fractions)
        table.add_row(name, number_text(score["items"]) if "items" in score else "", *cells)
    table.caption = "per cent; the score is acc_norm where there is one; ± standard error"
    return table


def show_comparison(result: Record) -> None:
    """Print what `Comparison.to_dict` gives: perplexities of all models, then their benchmarks."""
    rows, tables = result["rows"], []
    if texts := list(rows[0]["ratio"]):
        table = plain_table(Column("", no_wrap=True), *map(right, ("bytes", "%", *texts)))
        table.caption = (
            f"cached bytes per token (bf16); perplexity, times the first row's, on {result['windows']:,} windows of "
            f"{result['context']:,} tokens"
        )
        for row in rows:
            scores = (f"{row['perplexity'][text]:,.2f} ({factor_text(row['ratio'][text])})" for text in texts)
            sizes = (number_text(row[key]) for key in ("cache_bytes_per_token", "cache_percent"))
            table.add_row(row["name"], *sizes, *scores)
        tables.append(table)
    if rows[0]["tasks"] is not None:
        table = plain_table(Column("", no_wrap=True), *map(right, ("bytes", *rows[0]["tasks"]["tasks"], "average")))
        table.caption = "accuracy in per cent ± standard error; acc_norm where there is one"
        for row in rows:
            if row["tasks"] is not None:
                scores = [*row["tasks"]["tasks"].values()]
                cells = (accuracy_text(score["score"], score["standard_error"]) for score in scores)
                average = accuracy_text(row["tasks"]["average"], row["tasks"]["average_standard_error"])
                table.add_row(row["name"], number_text(row["cache_bytes_per_token"]), *cells, average)
        tables.append(table)
    show_tables(f"{rows[0]['name']} and what was made of it", *tables)


def show_export(result: Record) -> None:
    """Print what an export caches, and what the runtime's widths cost."""
    cached, original = result["cached_elements"], result["original_elements"]
    facts = {
        "runtime": result["runtime"],
        "cached elements": f"{cached} per token and layer",
        "rope theta": result["rope_theta"],
        "weights": result["type"],
    }
    if result["padded"]:
        facts["padded"] = f"from {result['source_elements']} elements, which {result['runtime']} does not take"
    if result["losses"] is not None:
        exact, approximate = (result["losses"][kind] for kind in ("exact", "approximate"))
        facts["biases"] = f"approximated: {approximate:.4f} nats per token instead of {exact:.4f}"
    if original is not None:
        facts["of the original's"] = f"{100 * cached / original:.2f} % of {original}"
        if cached >= original:
            facts["NOTHING GAINED"] = f"{result['runtime']} caches no more of the original, which is better: serve that"
    show_tables(f"{result['source']} exported to {result['out']}", _facts(facts))


def show_training(result: Record) -> None:
    """Print how far a training run came, and where its model is."""
    facts = {
        "steps": f"{result['steps']:,}, {result['tokens']:,} tokens",
        "loss": f"{result['first_loss']:.3f} to {result['last_loss']:.3f} nats per token "
        f"(means over {result['window']:,} step(s) at either end)",
        "time": f"{result['seconds']:,.0f} s",
    }
    if result["held_out"] is not None:
        facts["held-out loss"] = "{:.3f} to {:.3f} nats per token".format(*result["held_out"])
    if result["goal"] is not None:
        facts["teacher's"] = f"{result['goal']:.3f}"
    if result["cost"] is not None:
        facts["cost"] = f"{result['cost']:.2f}"
    if result["stopped"] is not None:
        facts["stopped"] = result["stopped"]
    if result["resumed_from"] is not None:
        facts["resumed"] = f"after step {result['resumed_from']:,}"
    show_tables(f"{result['out']}/model", _facts(facts))


def show_curves(result: Record) -> None:
    """Print where each curve of a figure begins and ends, and the files of the figure."""
    panels = len({curve["panel"] for curve in result["curves"]}) > 1
    table = plain_table(Column("", no_wrap=True), *map(right, (result["axis"], "first loss", "last loss")))
    for curve in result["curves"]:
        name = f"{curve['panel']}: {curve['name']}" if panels else curve["name"]
        ends = [f"{curve[key]:.3f}" for key in ("first_loss", "last_loss")]
        table.add_row(name, f"{curve[result['axis']]:,}", *ends)
    show_tables("losses in nats per token", table)
    print(f"\nfigure: {', '.join(result['files'])}")


def show_demo(result: Record) -> None:
    """Print the rows of the demo (see `render_demo` for their keys), the ratios being to the first row."""
    columns = ("elements", "bytes", "cache %", "perplexity", "tokens/s")
    table = plain_table(Column("", no_wrap=True), *map(right, columns))
    table.caption = "elements per token and layer, bytes per token, ratios to the first row"
    for row in result["rows"]:
        table.add_row(
            row["name"],
            number_text(row["cache_elements"]),
            number_text(row["cache_bytes_per_token"]),
            number_text(row["cache_percent"]),
            f"{row['perplexity']:,.2f} ({factor_text(row['perplexity_ratio'])})",
            f"{value_text('tokens_per_second', row['tokens_per_second'])} ({factor_text(row['decode_ratio'])})",
        )
    show_tables(f"{result['model']}, before and after", table)


def show_tradeoff(result: Record) -> None:
    """Print the original and the points of a trade-off (see `draw_tradeoff`), by falling size of the cache."""
    base = result["original"]
    original = {"name": "original", "cache": "bfloat16", "predicted_perplexity": None} | base
    columns = ("rotary", "latent", "bytes", "%", "predicted", "measured")
    table = plain_table("", "cache", *map(right, columns))
    table.caption = "cached bytes per token, % of the original's; perplexity, ratio to the original's"
    for point in sorted((original, *result["points"]), key=lambda point: -point["bytes_per_token"]):
        table.add_row(
            point["name"],
            point["cache"].replace("bfloat16", "bf16"),
            value_text("", point.get("qk_rope_head_dim")),
            value_text("", point.get("kv_lora_rank")),
            number_text(point["bytes_per_token"]),
            f"{100 * point['bytes_per_token'] / base['bytes_per_token']:.2f}",
            *(_perplexity(point[key], base["perplexity"]) for key in ("predicted_perplexity", "perplexity")),
        )
    show_tables(f"Trade-off of {result['model']}", _facts(result["text"]), table)


def _perplexity(value: float | None, original: float) -> str:
    return "–" if value is None else f"{value:,.2f} ({factor_text(value / original)})"


def _plan_tables(plan: Record) -> list[Table]:
    columns = ("from", "to", "rotary", "latent", "elements before", "after")
    table = plain_table("layers", *map(right, columns))
    for group in plan["layers"]:
        target = group["target"]
        table.add_row(
            _span(group["first"], group["last"]) if group["count"] > 1 else str(group["first"]),
            group["source"]["name"],
            target["name"],
            f"{target['rotary_heads']} x {target['qk_rope_head_dim']}",
            number_text(target["kv_lora_rank"]),
            number_text(group["elements_before"]),
            number_text(group["elements_after"]),
        )
    table.caption = "cached elements per token and layer"
    text = f"{plan['calibration_tokens']:,} tokens" if plan["calibration_tokens"] else "none"
    before, after = (bytes_text(plan[f"bytes_{when}"]) for when in ("before", "after"))
    facts = {
        "method": f"layout {plan['layout']}, rope {plan['rope']}, factorize {plan['factorize']}",
        "calibration": text,
        "cache per token": f"{before} to {after} ({plan['kept']:.2%}, {plan['dtype']})",
        "attention parameters": f"{plan['attention_parameters_before']:,} to {plan['attention_parameters_after']:,}",
        "memory needed": f"about {bytes_text(plan['estimated_memory_bytes'])}",
    }
    return [_facts(facts), table]


def _runs(layers: Iterable[Record]) -> Iterable[tuple[int, int, Record]]:
    """First and last index of neighbouring layers that differ in their number only."""
    for _, group in groupby(layers, key=lambda layer: {**layer, "layer": None}):
        run = list(group)
        yield run[0]["layer"], run[-1]["layer"], run[0]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def right(name: str) -> Column:
    return Column(name, justify="right")


def plain_table(*columns: str | Column) -> Table:
    return Table(*columns, box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0), caption_justify="left")


def _facts(facts: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in facts.items():
        table.add_row(label(key), Text(value_text(key, value)))
    return table


def show_tables(title: str, *tables: Table | Text) -> None:
    console = Console()  # looked up here, so that a redirected stdout is respected
    console.print(Text(title, style="bold underline"))
    for table in tables:
        console.print()
        console.print(table)
