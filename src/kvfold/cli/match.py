"""`kvfold match`: sizes of attention variants with equal parameters, and what each of them costs."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import Command, Result
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", type=str, help="YAML of kvfold ablate: model, variants and match")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens that FLOPs and intensity are for (default: the positions)"
    )


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.errors import OptionError
    from kvfold.lab import read_matches

    if options.context is not None and options.context < 1:
        raise OptionError(f"--context must be 1 or more, got {options.context}.")
    matches = read_matches(options.recipe)
    context = options.context or matches[0].architecture.max_position_embeddings
    return {"context": context, "variants": [found.to_dict(context) for found in matches]}


def show(result: Result) -> None:
    from kvfold.report.lab_tables import show_match

    show_match(result)


COMMAND = Command(
    name="match",
    summary="solve the sizes of attention variants for equal parameters",
    usage="RECIPE [--context N] [--json]",
    description=(
        "Solve the feed-forward width (or heads, or layers, as the recipe says) of every variant of a sweep so that "
        "its parameters agree with the reference's, and show what each costs: parameters, FLOPs of one token, cached "
        "bytes of one token on one of 1, 2, 4 or 8 tensor-parallel devices (bf16), and FLOPs per cached byte when "
        "decoding."
    ),
    example="kvfold match recipes/lab/tiny.yaml",
    add_arguments=add_arguments,
    run=run,
    show=show,
)
