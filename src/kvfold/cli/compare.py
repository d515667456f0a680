"""`kvfold compare`: several models on the same texts and benchmarks, in one table and one page."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import Command, Result
from kvfold.cli.evaluate import add_tasks
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "models",
        metavar="NAME=MODEL",
        nargs="+",
        type=str,
        help="a name and a checkpoint folder, .gguf file, Hugging Face id, or smollm2; first the original",
    )
    parser.add_argument("--text", type=str, nargs="+", metavar="FILE", default=[], help="plain texts to score")
    parser.add_argument("--context", type=int, metavar="N", default=512, help="tokens per window (default: 512)")
    parser.add_argument("--windows", type=int, metavar="N", default=24, help="windows of each text (default: 24)")
    add_tasks(parser)
    parser.add_argument("--out", type=str, metavar="FILE", help="also write the comparison to this .html or .json file")


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.checkpoint import write_json, write_text
    from kvfold.errors import OptionError
    from kvfold.evaluate import compare
    from kvfold.provenance import provenance
    from kvfold.report.comparison import render_comparison

    models: dict[str, str] = {}
    for argument in options.models:
        name, sign, model = argument.partition("=")
        if not (name and sign and model):
            raise OptionError(f"{argument!r} is not of the form NAME=MODEL, as in original=smollm2.")
        if name in models:
            raise OptionError(f"two models are called {name}: give one of them another name.")
        models[name] = model
    out = None if options.out is None else Path(options.out).expanduser()
    if out is not None and out.suffix not in (".html", ".json"):
        raise OptionError(f"--out is {options.out}: give a file that ends in .html or .json.")
    result = compare(
        models,
        options.text,
        context=options.context,
        windows=options.windows,
        tasks=options.tasks or (),
        task_folder=options.task_folder,
        limit=options.limit,
        progress=progress,
    ).to_dict() | {"provenance": provenance(seed=0)}
    if out is not None and out.suffix == ".json":
        write_json(out, result)
    elif out is not None:
        write_text(out, render_comparison(result))
    return result | {"out": options.out}


def show(result: Result) -> None:
    from kvfold.report.tables import show_comparison

    show_comparison(result)
    if result["out"] is not None:
        print(f"\nwritten: {result['out']}")


COMMAND = Command(
    name="compare",
    summary="measure several models on the same texts and benchmarks",
    usage="NAME=MODEL [NAME=MODEL ...] [--text FILE ...] [--tasks NAME ...] [options]",
    description=(
        "Measure an original and what was made of it, healed models and the equally trained original among them, on "
        "the same windows of texts and the same items of benchmarks, with the bytes that a token takes in each cache "
        "(in bf16). With texts, the original is measured with an int4 cache, too: what fewer bytes cost without a "
        "conversion. Models run in the dtype of their folders."
    ),
    example=(
        "kvfold compare original=smollm2 converted=smollm2-mla healed=healed/model tuned=baseline/model \\\n"
        "    --text novel.txt --out comparison.html"
    ),
    add_arguments=add_arguments,
    run=run,
    show=show,
)
