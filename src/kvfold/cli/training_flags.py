"""The flags of every training run: data, schedule, held-out text, machine, output."""

from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentParser

HEALING: dict[str, Any] = {
    "learning_rate": 1e-4,
    "warmup": 0.1,
    "decay": "1/6",
    "decay_type": "1-sqrt",
    "floor": 0,
    "weight_decay": 0,
}
"""The defaults that help texts tell; they are those of `TrainOptions`."""

SCHEDULE = {
    "learning_rate": "the highest",
    "warmup": "share of the steps it rises in",
    "decay": "share of the steps it falls in",
    "decay_type": "how it falls: 1-sqrt, linear or cosine",
    "floor": "share of the rate that it falls to",
    "weight_decay": "AdamW's",
}

OUTPUT_OPTIONS = ("model", "run", "config", "json", "resume", "overwrite")
"""What is no option of the training itself."""


def add_data(parser: ArgumentParser) -> None:
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
    data.add_argument(
        "--seed", type=int, metavar="N", help="of the order of the sequences, and all else that is drawn (default: 0)"
    )


def add_schedule(parser: ArgumentParser, title: str, defaults: Mapping[str, Any] = HEALING) -> None:
    schedule = parser.add_argument_group("schedule", title)
    schedule.add_argument("--steps", type=int, metavar="N", help="optimiser steps (default: 200)")
    schedule.add_argument("--batch", type=int, metavar="N", help="sequences per step (default: 8)")
    for name, text in SCHEDULE.items():
        flag, kind = f"--{name.replace('_', '-')}", str if name == "decay_type" else float
        metavar = "NAME" if kind is str else "F"
        schedule.add_argument(flag, type=kind, metavar=metavar, help=f"{text} (default: {defaults[name]})")
    schedule.add_argument("--clip", type=float, metavar="F", help="largest norm of the gradient (default: 1)")


def add_stopping(parser: ArgumentParser) -> None:
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


def add_machine(parser: ArgumentParser) -> None:
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
    machine.add_argument(
        "--report-to",
        nargs="+",
        metavar="NAME",
        help="trackers of the Hugging Face Trainer to tell of every step: tensorboard, trackio, wandb, ...",
    )


def add_output(parser: ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--save-steps", type=int, metavar="N", help="steps between checkpoints (default: 50)")
    output.add_argument(
        "--resume", action="store_true", help="go on with the run in RUN, if there is one; give the same options"
    )
    output.add_argument("--overwrite", action="store_true", help="throw away the run in RUN and start anew")
