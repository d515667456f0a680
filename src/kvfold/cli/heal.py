"""`kvfold heal`: train a converted model back."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import MODEL_HELP, Command, Result, given_options
from kvfold.cli.training_flags import OUTPUT_OPTIONS, add_data, add_machine, add_output, add_schedule, add_stopping
from kvfold.progress import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL_HELP)
    parser.add_argument(
        "run", metavar="RUN", type=str, help="the folder of the run; the model comes to lie in RUN/model"
    )
    parser.add_argument(
        "--config", action="config", metavar="FILE", help="a YAML recipe with any of the flags below; flags override it"
    )
    add_data(parser)
    add_schedule(parser, "AdamW with a linear warm-up, a constant rate and a decay; the defaults are MHA2MLA's")
    _add_loss(parser)
    add_stopping(parser)
    add_machine(parser)
    add_output(parser)


def _add_loss(parser: ArgumentParser) -> None:
    loss = parser.add_argument_group("what is learnt")
    loss.add_argument(
        "--trains", type=str, metavar="PART", help="all, only the attention, or lora, updates of it (default: all)"
    )
    loss.add_argument("--lora-rank", type=int, metavar="N", help="of these updates (default: 16)")
    loss.add_argument(
        "--teacher",
        type=str,
        metavar="MODEL",
        help="follow the predictions of MODEL too, which must have the same tokenizer",
    )
    loss.add_argument(
        "--distill-weight",
        type=float,
        metavar="F",
        help="what the divergence from the teacher counts beside the cross entropy (default: 1)",
    )
    loss.add_argument("--temperature", type=float, metavar="F", help="of both predictions in it (default: 1)")
    loss.add_argument(
        "--teacher-top-k",
        type=int,
        metavar="K",
        help="ask the teacher once and keep its K likeliest tokens on disk (default: 0, ask it in every step)",
    )
    loss.add_argument(
        "--hidden-weight",
        type=float,
        metavar="F",
        help="what the distance from the teacher's hidden states counts, layer by layer (default: 0)",
    )


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.train import heal

    return heal(
        options.model,
        options.run,
        resume=options.resume,
        overwrite=options.overwrite,
        progress=progress,
        **given_options(options, (name for name in vars(options) if name not in OUTPUT_OPTIONS)),
    ).to_dict()


def show(result: Result) -> None:
    from kvfold.report.tables import show_training

    show_training(result)


COMMAND = Command(
    name="heal",
    summary="train a converted model back, with or without a teacher",
    usage="MODEL RUN --data SOURCE ... [options]",
    description=(
        "Train MODEL on text and write the run to the folder RUN: the loss of every step (curve.jsonl), checkpoints, "
        "and in the end the healed model (RUN/model). A killed run goes on with --resume, with the same result."
    ),
    example=(
        "kvfold heal smollm2-mla healed --data default --held-out default --steps 50 --batch 2\n"
        "kvfold heal smollm2-mla healed --data novel.txt --teacher smollm2 --trains attention\n"
        "kvfold evaluate healed/model --text other.txt"
    ),
    add_arguments=add_arguments,
    run=run,
    show=show,
)
