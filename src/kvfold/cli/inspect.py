"""`kvfold inspect`: what attention a model has, what it caches and whether it can be converted."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import MODEL_HELP, Command, Result
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL_HELP)


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.families import inspect_model

    return inspect_model(options.model).to_dict()


def show(result: Result) -> None:
    from kvfold.report.tables import show_inspection

    show_inspection(result)


COMMAND = Command(
    name="inspect",
    summary="show a model's attention, its cache and whether it can be converted",
    usage="MODEL [--json]",
    description=(
        "Show the attention kind and heads of each layer, the cached elements and bytes per token, the parameters, "
        "and whether the model can be converted, with the reason if not. No weights are read."
    ),
    example="kvfold inspect smollm2",
    add_arguments=add_arguments,
    run=run,
    show=show,
)
