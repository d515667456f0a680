"""`kvfold verify`: compare a converted model with its original, and with what it promises."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import MODEL_HELP, Command, Result
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=str, help=f"the original: {MODEL_HELP}")
    parser.add_argument("out", metavar="OUT", type=str, help="the converted folder")


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.evaluate import verify

    return verify(options.model, options.out).to_dict()


def show(result: Result) -> None:
    from kvfold.report.tables import show_verification

    show_verification(result)


COMMAND = Command(
    name="verify",
    summary="compare a converted model with its original, and with what it promises",
    usage="MODEL OUT [--json]",
    description=(
        "Compare the logits of both models (largest and mean difference, KL, top-1 agreement), name the first module "
        "that diverges, and check that cached equals uncached, absorbed equals expanded and printed bytes equal "
        "measured bytes. Exit code 1 if one of those checks fails."
    ),
    example="kvfold verify smollm2 smollm2-mla",
    add_arguments=add_arguments,
    run=run,
    show=show,
    passed=lambda result: result["passed"],
)
