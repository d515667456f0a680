"""`kvfold plan`: what each cache budget would cost in perplexity, before anything is converted."""

from os.path import basename, expanduser, realpath
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import MODEL_HELP, Command, Result, given_options
from kvfold.cli.convert import METHOD_OPTIONS, add_calibration, add_method
from kvfold.errors import BudgetError
from kvfold.progress import Progress

RATIOS = (0.5, 0.3125, 0.1875, 0.125)
"""Shares of the original cache that are compared by default."""
RESULT_FILE = "tradeoff.json"
"""It also tells an earlier plan, which may be replaced, from a folder of something else."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL_HELP)
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=float,
        metavar="F",
        default=list(RATIOS),
        help="shares of the original cache to compare, above 0 and up to 1 "
        f"(default: {' '.join(f'{ratio:g}' for ratio in RATIOS)})",
    )
    parser.add_argument(
        "--out",
        type=str,
        metavar="FOLDER",
        help="the folder for tradeoff.png, tradeoff.svg and tradeoff.json; an earlier plan is replaced "
        "(default: the model's name with -plan after it)",
    )
    add_method(parser)
    add_calibration(parser)


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.checkpoint import OutputFolder, write_json
    from kvfold.evaluate import tradeoff
    from kvfold.provenance import provenance
    from kvfold.report.tradeoff import draw_tradeoff

    ratios = checked_ratios(options.ratios)
    out = Path(options.out or default_folder(options.model))
    # Around all of it, so that a folder that cannot be written is reported before the work and not after it.
    with OutputFolder(out, source=None, overwrite=True, marker=RESULT_FILE) as output:
        found = tradeoff(options.model, ratios=ratios, progress=progress, **given_method(options)).to_dict()
        result = found | {"provenance": provenance(seed=options.seed or 0)}
        draw_tradeoff(result, output.path / Path(RESULT_FILE).stem)
        write_json(output.path / RESULT_FILE, result)
    return result | {"out": str(output.path)}


def checked_ratios(ratios: list[float]) -> tuple[float, ...]:
    """The ratios from the largest to the smallest, each once.

    Raises:
        BudgetError: one of them is no share.
    """
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise BudgetError(f"--ratios must be above 0 and up to 1, not {ratio:g}")
    return tuple(sorted(set(ratios), reverse=True))


def default_folder(model: str) -> str:
    """`NAME-plan` in the current folder for a model that is a name, a hub id, a folder or a .gguf file."""
    return f"{basename(realpath(expanduser(model))).removesuffix('.gguf')}-plan"


def given_method(options: Namespace) -> dict[str, Any]:
    """The options of `convert` that the user gave; those of the budget are no flags of this command."""
    return given_options(Namespace(**{name: options.get(name) for name in METHOD_OPTIONS}), METHOD_OPTIONS)


def show(result: Result) -> None:
    from kvfold.report.tables import show_tradeoff

    show_tradeoff(result)
    print(f"\nfigure: {Path(result['out'], 'tradeoff.png')}")


COMMAND = Command(
    name="plan",
    summary="predict perplexity for several cache budgets, as a table and a figure",
    usage="MODEL [--ratios F ...] [--out FOLDER] [options]",
    description=(
        "Predict the perplexity of a conversion of MODEL for each cache budget, beside int8 and int4 caches of the "
        "original and of the conversion at their real bytes, scales included. Nothing is converted: a table is "
        "printed, a figure and the numbers are written. For the shapes of one conversion, see convert --dry-run."
    ),
    example=(
        "kvfold plan smollm2\nkvfold plan smollm2 --ratios 0.5 0.25 0.125 --out budgets --calibration textbook.txt"
    ),
    add_arguments=add_arguments,
    run=run,
    show=show,
)
