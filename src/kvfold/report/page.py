"""The report of the demo: one HTML page that needs nothing but itself, figures as PNG, the results as JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvfold.checkpoint import OutputFolder, write_json, write_text
from kvfold.report.checks import verification_facts
from kvfold.report.figures import CONTEXT, draw, save_png, svg
from kvfold.report.formats import accuracy_text, bytes_text, factor_text, label, number_text, value_text

Record = Mapping[str, Any]


def render_demo(results: Record) -> str:
    """The page as one self-contained HTML text.

    Args:
        results: JSON-able, with the keys
            `model`: name of the model;
            `original`: facts about it, shown as they are (for instance attention, layers, parameters);
            `conversion`: facts about the conversion: the recipe as keys and values;
            `evaluation`: `text`, `context`, `windows`, `tokens`: what perplexity was measured on;
            `rows`: the original first, then the converted model, then the baselines; each has `name`, `cache_elements`
            (per token and layer), `cache_bytes_per_token`, `cache_percent` (of the first row's bytes), `perplexity`,
            `perplexity_ratio` and `decode_ratio` (to the first row), `tokens_per_second`; the last two may be None;
            `per_layer`: lists of numbers by name, one number per layer (may be empty);
            `verify`: what `Verification.to_dict` gives;
            `samples`: dicts of `name`, `prompt`, `text`;
            `timings`: seconds by stage;
            `provenance`: what `provenance()` returns.
    """
    return fill(
        "demo.html.j2",
        results=results,
        figures={name: Markup(svg(figure)) for name, figure in draw(results).items()},
        checks=verification_facts(results["verify"]),
        context=CONTEXT,
        verdict=verdict(results["rows"]),
    )


def fill(template: str, **values: Any) -> str:
    """A page of the package's templates."""
    environment = Environment(
        loader=PackageLoader("kvfold.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number_text,
        "bytes": bytes_text,
        "factor": factor_text,
        "label": label,
        "accuracy": accuracy_text,
    }
    return environment.get_template(template).render(flatten=_flatten, **values)


def verdict(rows: list[Record]) -> str:
    """One honest sentence: what the converted model costs, and how the baseline of the nearest size does."""
    original, converted, *baselines = rows
    text = (
        f"{converted['name']} keeps {number_text(converted['cache_percent'])} % of the cache; "
        f"perplexity goes from {original['perplexity']:.4g} to {converted['perplexity']:.4g} "
        f"({factor_text(converted['perplexity_ratio'])})."
    )
    if not baselines:
        return text
    nearest = min(baselines, key=lambda row: abs(row["cache_percent"] - converted["cache_percent"]))
    better = nearest["perplexity"] < converted["perplexity"]
    comparison = "keeps more quality" if better else "loses more quality"
    return (
        f"{text} At {number_text(nearest['cache_percent'])} %, {nearest['name']} {comparison}: "
        f"{nearest['perplexity']:.4g} ({factor_text(nearest['perplexity_ratio'])})."
    )


def save_report(results: Record, folder: str | Path) -> Path:
    """Write `index.html`, `results.json` and one PNG per figure into `folder`, replacing it as a whole at the end.

    Returns:
        The path of the page.

    Raises:
        OutputError: the folder cannot be written, or is not a report but a file.
    """
    out = Path(folder)
    with OutputFolder(out, source=None, overwrite=True, marker="index.html") as output:
        for name, figure in draw(results).items():
            save_png(figure, output.path / f"{name}.png")
        write_json(output.path / "results.json", results)
        write_text(output.path / "index.html", render_demo(results))
    return output.path / "index.html"


def _flatten(record: Record) -> list[tuple[str, str]]:
    """Labels and texts of a dict; the keys of nested ones are prefixed with their parent's."""
    facts: list[tuple[str, str]] = []
    for key, value in record.items():
        if isinstance(value, Mapping):
            facts += [(f"{label(key)}: {name}", text) for name, text in _flatten(value)]
        else:
            facts.append((label(key), value_text(key, value)))
    return facts
