"""`kvfold ablate`: train several attention variants under matched conditions."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import Command, Result
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=str, help="the folder of the sweep, a folder for every run in it")
    parser.add_argument(
        "--config",
        dest="recipe",
        type=str,
        metavar="FILE",
        help="YAML: model, variants, match, train, seeds",
    )
    parser.add_argument("--only", nargs="+", metavar="RUN", help="only these runs, VARIANT/seed-N (default: all)")
    parser.add_argument(
        "--workers", type=int, metavar="N", default=1, help="runs at a time, sharing the cores (default: 1)"
    )
    parser.add_argument("--list", action="store_true", help="print one command line for every run, for a scheduler")


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.errors import OptionError
    from kvfold.lab import ablate
    from kvfold.lab.ablate import commands

    if options.recipe is None:
        raise OptionError("missing --config: give the recipe of a sweep, such as recipes/lab/tiny.yaml.")
    if options.list:
        return {"commands": commands(options.recipe, options.out)}
    only, workers = options.only or (), options.workers
    return ablate(options.recipe, options.out, only=only, workers=workers, progress=progress)


def show(result: Result) -> None:
    if "commands" in result:
        print("\n".join(result["commands"]))
        return
    from kvfold.report.lab_tables import show_sweep

    show_sweep(result)


COMMAND = Command(
    name="ablate",
    summary="train several attention variants under matched conditions",
    usage="OUT --config FILE [--workers N] [--only RUN ...] [--list] [--json]",
    description=(
        "Train every variant of a recipe with every seed: equal parameters, the same text in the same order, the same "
        "schedule, the same first weights where tensors are the same. Finished runs are skipped and begun ones go on: "
        "the same command continues a sweep. In the end it prints losses with their spread, and paired differences."
    ),
    example=(
        "kvfold match recipes/lab/double_heads.yaml\n"
        "kvfold ablate sweep --config recipes/lab/double_heads.yaml --workers 2\n"
        "kvfold plot sweep --x tokens --out differences.png"
    ),
    add_arguments=add_arguments,
    run=run,
    show=show,
)
