"""`kvfold doctor`: run an export in real runtimes and compare."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import Command, Result
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("export", metavar="EXPORT", type=str, help="a folder or .gguf file that kvfold export made")
    parser.add_argument(
        "--runtime",
        type=str,
        nargs="+",
        metavar="NAME",
        help="transformers, llamacpp, vllm: where to run it (default: what it was exported for)",
    )
    parser.add_argument(
        "--model",
        type=str,
        metavar="MODEL",
        help="folder of the conversion that it was made from (default: where the export says that it was)",
    )
    parser.add_argument("--text", type=str, metavar="FILE", help="a text file (default: a novel shipped with kvfold)")
    parser.add_argument(
        "--python",
        type=str,
        metavar="PATH",
        help="interpreter of the environment in which the runtime is installed, such as venv/bin/python (default: "
        "this one)",
    )


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.doctor import doctor

    return doctor(
        options.export,
        model=options.model,
        runtimes=options.runtime,
        text=options.text,
        python=options.python,
        progress=progress,
    ).to_dict()


def show(result: Result) -> None:
    from kvfold.report.runtime_tables import show_diagnosis

    show_diagnosis(result)


COMMAND = Command(
    name="doctor",
    summary="run an export in the real runtimes and compare it with its model",
    usage="EXPORT [--runtime NAME ...] [--model MODEL] [--text FILE] [--python PATH]",
    description=(
        "Load EXPORT in each runtime, in a process without kvfold, and compare with its model in fp32: "
        "log-probabilities on a text, of the prompt and of tokens computed one by one; what the runtime itself says "
        "that it caches; and token ids. Prints a verdict for each way to run it. Exit code 1 if one that kvfold "
        "advises computes something else."
    ),
    example=(
        "kvfold doctor smollm2-deepseek\n"
        "kvfold doctor smollm2-mla.gguf\n"
        "kvfold doctor smollm2-vllm --python vllm-env/bin/python"
    ),
    add_arguments=add_arguments,
    run=run,
    show=show,
    passed=lambda result: result["passed"],
)
