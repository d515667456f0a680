"""`kvfold evaluate`: perplexity, cache bytes, decode speed and benchmark scores of one model."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import MODEL_HELP, Command, Result
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL_HELP)
    parser.add_argument("--text", type=str, metavar="FILE", help="plain text to score")
    parser.add_argument("--context", type=int, metavar="N", default=512, help="tokens per window (default: 512)")
    parser.add_argument("--windows", type=int, metavar="N", help="windows to score (default: all that the text fills)")
    add_tasks(parser)


def add_tasks(parser: ArgumentParser) -> None:
    """The flags of benchmarks."""
    parser.add_argument("--tasks", type=str, nargs="+", metavar="NAME", help="tasks of lm-evaluation-harness to score")
    parser.add_argument(
        "--task-folder", type=str, metavar="DIR", help="folder of YAML task files (default: the harness's own tasks)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="items per task, evenly spread (default: all)")


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.errors import OptionError
    from kvfold.evaluate import evaluate

    if options.text is None and not options.tasks:
        raise OptionError("missing --text or --tasks. See kvfold evaluate --help")
    for name in ("task_folder", "limit"):
        if options[name] is not None and not options.tasks:
            raise OptionError(f"--{name.replace('_', '-')} needs --tasks: name the tasks to score.")
    return evaluate(
        options.model,
        options.text,
        context=options.context,
        windows=options.windows,
        tasks=options.tasks or (),
        task_folder=options.task_folder,
        limit=options.limit,
        progress=progress,
    ).to_dict()


def show(result: Result) -> None:
    from kvfold.report.tables import show_evaluation

    show_evaluation(result)


COMMAND = Command(
    name="evaluate",
    summary="measure perplexity, cache bytes, decode speed and benchmark scores",
    usage="MODEL [--text FILE] [--tasks NAME ...] [options]",
    description=(
        "Measure the cache bytes per token, counted from the tensors that the cache holds; with --text, the perplexity "
        "on FILE in separate windows and the decode speed in tokens per second; with --tasks, the accuracy on "
        "benchmarks, by lm-evaluation-harness (pip install 'kvfold[eval]'). At least one of the two is needed."
    ),
    example=(
        "kvfold evaluate smollm2-mla --text novel.txt --context 512 --windows 16\n"
        "kvfold evaluate smollm2-mla --tasks piqa arc_easy --limit 200"
    ),
    add_arguments=add_arguments,
    run=run,
    show=show,
)
