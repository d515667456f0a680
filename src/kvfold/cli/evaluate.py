"""`kvfold evaluate`: perplexity, cache bytes and decode speed of one model."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import MODEL_HELP, Command, Result
from kvfold.cli.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL_HELP)
    parser.add_argument("--text", type=str, metavar="FILE", required=True, help="plain text to score (required)")
    parser.add_argument("--context", type=int, metavar="N", default=512, help="tokens per window (default: 512)")
    parser.add_argument("--windows", type=int, metavar="N", help="windows to score (default: all that the text fills)")


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.evaluate import evaluate

    return evaluate(
        options.model, options.text, context=options.context, windows=options.windows, progress=progress
    ).to_dict()


def show(result: Result) -> None:
    from kvfold.report.tables import show_evaluation

    show_evaluation(result)


COMMAND = Command(
    name="evaluate",
    summary="measure perplexity, cache bytes per token and decode speed",
    usage="MODEL --text FILE [--context N] [--windows N] [--json]",
    description=(
        "Measure the perplexity on FILE in separate windows, the cache bytes per token, counted from the tensors that "
        "the cache holds, and the decode speed in tokens per second."
    ),
    example="kvfold evaluate smollm2-mla --text novel.txt --context 512 --windows 16",
    add_arguments=add_arguments,
    run=run,
    show=show,
)
