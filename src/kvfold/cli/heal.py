"""`kvfold heal`: train a converted model back."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import MODEL_HELP, Command, Result, given_options
from kvfold.progress import Progress

OUTPUT_OPTIONS = ("model", "run", "config", "json", "resume", "overwrite")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL_HELP)
    parser.add_argument(
        "run", metavar="RUN", type=str, help="the folder of the run; the model comes to lie in RUN/model"
    )
    parser.add_argument(
        "--config", action="config", metavar="FILE", help="a YAML recipe with any of the flags below; flags override it"
    )
    _add_data(parser)
    _add_schedule(parser)
    _add_loss(parser)
    _add_stopping(parser)
    _add_machine(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--save-steps", type=int, metavar="N", help="steps between checkpoints (default: 50)")
    output.add_argument("--resume", action="store_true", help="go on with the run in RUN, if there is one")
    output.add_argument("--overwrite", action="store_true", help="throw away the run in RUN and start anew")


def _add_data(parser: ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        nargs="+",
        metavar="SOURCE",
        help="files (.txt, .md, .jsonl, .json, .parquet), Hugging Face datasets (name or name:configuration), or "
        "default, the textbook excerpts in the package",
    )
    data.add_argument(
        "--data-weights",
        nargs="+",
        type=float,
        metavar="F",
        help="one positive number for each, its share of the sequences (default: all alike)",
    )
    data.add_argument(
        "--column",
        nargs="+",
        metavar="NAME",
        help="of the text in tables, one for all or one for each (default: text, or chats in messages)",
    )
    data.add_argument("--sequence-length", type=int, metavar="N", help="tokens per sequence (default: 512)")
    data.add_argument("--seed", type=int, metavar="N", help="of the order of the sequences (default: 0)")


def _add_schedule(parser: ArgumentParser) -> None:
    schedule = parser.add_argument_group(
        "schedule", "AdamW with a linear warm-up, a constant rate and a decay by 1 - sqrt; the defaults are MHA2MLA's"
    )
    schedule.add_argument("--steps", type=int, metavar="N", help="optimiser steps (default: 200)")
    schedule.add_argument("--batch", type=int, metavar="N", help="sequences per step (default: 8)")
    schedule.add_argument("--learning-rate", type=float, metavar="F", help="the highest (default: 1e-4)")
    schedule.add_argument("--warmup", type=float, metavar="F", help="share of the steps it rises in (default: 0.1)")
    schedule.add_argument("--decay", type=float, metavar="F", help="share of the steps it falls in (default: 1/6)")
    schedule.add_argument("--weight-decay", type=float, metavar="F", help="AdamW's (default: 0)")
    schedule.add_argument("--clip", type=float, metavar="F", help="largest norm of the gradient (default: 1)")


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


def _add_stopping(parser: ArgumentParser) -> None:
    stopping = parser.add_argument_group("held-out text and early stop")
    stopping.add_argument(
        "--held-out",
        type=str,
        metavar="SOURCE",
        help="text to measure the loss on while training, or default, the novel in the package",
    )
    stopping.add_argument("--held-out-windows", type=int, metavar="N", help="sequences of it (default: 24)")
    stopping.add_argument("--held-out-steps", type=int, metavar="N", help="steps between measurements (default: 50)")
    stopping.add_argument(
        "--patience", type=int, metavar="N", help="stop when that loss has not fallen in N measurements"
    )
    stopping.add_argument(
        "--recover",
        type=float,
        metavar="F",
        help="stop when this share of that loss, from the start's to the teacher's, is won back",
    )
    stopping.add_argument(
        "--price-per-hour", type=float, metavar="F", help="of the machine in any currency, to show the cost so far"
    )


def _add_machine(parser: ArgumentParser) -> None:
    machine = parser.add_argument_group("time and memory")
    machine.add_argument(
        "--precision",
        type=str,
        metavar="P",
        help="of products: float32, bfloat16, or auto, bfloat16 where the hardware is fast at it (default: auto)",
    )
    machine.add_argument(
        "--accumulate",
        type=int,
        metavar="N",
        help="passes that share a batch; more need less memory (default: 1)",
    )
    machine.add_argument(
        "--gradient-checkpointing", action="store_true", help="compute activations twice instead of keeping them"
    )
    machine.add_argument("--fsdp", action="store_true", help="shard over the GPUs of torchrun by FSDP2")
    machine.add_argument("--deepspeed", type=str, metavar="FILE", help="shard by DeepSpeed with this configuration")


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
    from kvfold.report.tables import show_healing

    show_healing(result)


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
