"""Train a converted model back: one run, from the options to a finished model folder."""

import contextlib
import importlib.util
import json
import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.allocator import keep_freed_memory
from kvfold.checkpoint import alone, open_checkpoint, write_json
from kvfold.errors import OptionError
from kvfold.modeling import load_model
from kvfold.progress import Progress, silent
from kvfold.texts import DEFAULT_TEXT
from kvfold.train import training
from kvfold.train.curve import read_curve
from kvfold.train.data import WindowReader
from kvfold.train.held_out import HELD_OUT_FILE, loss_on, reason_to_stop
from kvfold.train.model_folder import write_model, write_rest
from kvfold.train.options import HealOptions
from kvfold.train.run_folder import begin_run, find_run, step_of
from kvfold.train.teacher import followed_windows, load_teacher
from kvfold.train.training import Material, train, uses_bf16

MODEL_FOLDER, RESULT_FILE = "model", "result.json"
MOVED = {"all": "all weights", "attention": "the attention", "lora": "the attention, by low-rank updates"}
LONGEST_WAIT = timedelta(days=2)
"""Of the other processes for the one that reads the data."""


@dataclass(frozen=True, kw_only=True)
class Healing:
    """A finished run. Losses in nats per token, each the mean over the first or last `window` steps.

    `held_out` has the losses on the held-out text at the start and at the end, `goal` the teacher's on it where that
    was asked for, `stopped` why the run ended before its last step, `cost` is in the currency of the price.
    """

    out: Path
    steps: int
    tokens: int
    first_loss: float
    last_loss: float
    window: int
    held_out: tuple[float, float] | None
    goal: float | None
    stopped: str | None
    seconds: float
    cost: float | None
    resumed_from: int | None
    options: HealOptions

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out), "options": self.options.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Healing":
        held_out = values["held_out"] and tuple(values["held_out"])
        options = HealOptions.from_dict(values["options"])
        return cls(**values | {"out": Path(values["out"]), "held_out": held_out, "options": options})


def heal(
    model: str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> Healing:
    """Train `model` (a converted or an original one) and write the run to the folder `out`.

    `out` holds the settings in `run.json`, the loss of every step in `curve.jsonl`, the last checkpoints, each a
    complete model folder with the state of the optimiser, and in the end `model`. Started by `torchrun` or `accelerate
    launch`, all processes share the sequences of every step.

    Args:
        resume: go on with the run in `out`, if there is one; it must be of the same model and options.
        overwrite: throw away a run in `out`.
        progress: called as `Progress` says.
        options: fields of `HealOptions`.

    Raises:
        KvfoldError: the model, an option, the data or the output does not work; the message says which and why.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise OptionError("healing needs the package accelerate, which is not installed: pip install 'kvfold[train]'.")
    from accelerate import PartialState

    chosen, run = HealOptions.from_dict(options), Path(out)
    if not torch.cuda.is_available():
        keep_freed_memory()
    source = open_checkpoint(model)
    processes = PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)
    _check_processes(chosen, processes.num_processes)
    key = {"model": source.fingerprint(), "options": chosen.to_dict() | {"save_steps": None, "price_per_hour": None}}
    with alone(run) if processes.is_main_process else contextlib.nullcontext():
        last = find_run(run, json.loads(json.dumps(key)), resume=resume, overwrite=overwrite, source=source.path)
        if not overwrite and (run / MODEL_FOLDER).exists():
            return Healing.from_dict(json.loads((run / RESULT_FILE).read_text("utf-8")))
        network, tokenizer = load_model(model, dtype=torch.float32)
        _check_length(chosen, network)
        with processes.main_process_first():
            material = _gather(chosen, network, tokenizer, progress)
        processes.wait_for_everyone()
        if processes.is_main_process:
            begin_run(run, key, overwrite=overwrite)
        processes.wait_for_everyone()
        complete = partial(write_rest, tokenizer=tokenizer, source=source.path)
        if last is not None and _stopped(run, chosen, material.goal):
            network, _ = load_model(last, dtype=torch.float32)
            state = network.state_dict()
        else:
            state = train(network, material, chosen, run, complete=complete, last=last, progress=progress)
        healing = _summary(run, chosen, last, material.goal)
        if processes.is_main_process:
            write_json(run / RESULT_FILE, healing.to_dict())
            write_model(run / MODEL_FOLDER, network, state, source, _healed(healing), complete=complete)
        processes.wait_for_everyone()
    return healing


def _check_processes(options: HealOptions, processes: int) -> None:
    if options.batch % (options.accumulate * processes):
        raise OptionError(
            f"batch is {options.batch}, which {processes} process(es) with accumulate {options.accumulate} cannot "
            "share alike: give a multiple."
        )
    if (options.fsdp or options.deepspeed) and not training.shards_here():
        raise OptionError("fsdp and deepspeed shard over GPUs, of which PyTorch sees none: leave them out.")
    if options.deepspeed and importlib.util.find_spec("deepspeed") is None:
        raise OptionError("deepspeed is not installed: pip install deepspeed, or shard by fsdp.")


def _check_length(options: HealOptions, network: PreTrainedModel) -> None:
    most = network.config.max_position_embeddings
    if options.sequence_length > most:
        raise OptionError(f"sequence_length is {options.sequence_length}, the model has {most} positions: give fewer.")


def _gather(
    options: HealOptions, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> Material:
    """Everything that a run learns from."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold"
    reader = WindowReader(
        tokenizer=tokenizer,
        vocabulary=network.config.vocab_size,
        length=options.sequence_length,
        cache=cache / "tokens",
        progress=progress,
    )
    sources = dict(zip(options.data, options.columns, strict=True))
    windows: Any = reader.mixed(sources, options.steps * options.batch, weights=options.data_weights, seed=options.seed)
    held_out = None if options.held_out is None else reader.first(options.held_out, options.held_out_windows)
    if options.teacher is None:
        return Material(windows=windows, held_out=held_out, teacher=None, goal=None)
    teacher = load_teacher(options, network, tokenizer)
    goal = None if held_out is None else loss_on(teacher, held_out)
    if options.teacher_top_k:
        windows = followed_windows(
            teacher, windows, options, bf16=uses_bf16(options), cache=cache / "teachers", progress=progress
        )
        teacher = None
    return Material(windows=windows, held_out=held_out, teacher=teacher, goal=goal)


def _stopped(run: Path, options: HealOptions, goal: float | None) -> str | None:
    """Why the run has ended early, if it has."""
    if not (run / HELD_OUT_FILE).exists():
        return None
    return reason_to_stop(read_curve(run, HELD_OUT_FILE), options, goal)


def _healed(healing: Healing) -> str:
    """How a model was healed, for its card."""
    options = healing.options
    names = {DEFAULT_TEXT: "the textbook excerpts in the package"}
    sources = ", ".join(names.get(name, Path(name).name if Path(name).is_file() else name) for name in options.data)
    taught = "" if options.teacher is None else f", following `{options.teacher}`"
    lines = [
        f"Trained by `kvfold heal` for {healing.steps:,} steps, {healing.tokens:,} tokens of {sources}{taught}.",
        f"What moved: {MOVED[options.trains]}.",
        f"Loss {healing.first_loss:.3f} to {healing.last_loss:.3f} nats per token (means over {healing.window:,} "
        "step(s) at either end).",
    ]
    if healing.held_out is not None:
        lines.append("On a held-out text: {:.3f} to {:.3f}.".format(*healing.held_out))
    if healing.stopped is not None:
        lines.append(f"Stopped early: {healing.stopped}.")
    return "\n".join([*lines, "What stands above was measured before."])


def _summary(run: Path, options: HealOptions, last: Path | None, goal: float | None) -> Healing:
    rows = read_curve(run)
    window = max(len(rows) // 20, 1)
    first, end = ([row["loss"] for row in part] for part in (rows[:window], rows[-window:]))
    measured = [row["loss"] for row in read_curve(run, HELD_OUT_FILE)] if (run / HELD_OUT_FILE).exists() else []
    return Healing(
        out=run,
        steps=len(rows),
        tokens=rows[-1]["tokens"],
        first_loss=sum(first) / window,
        last_loss=sum(end) / window,
        window=window,
        held_out=(measured[0], measured[-1]) if measured else None,
        goal=goal,
        stopped=_stopped(run, options, goal) if len(rows) < options.steps else None,
        seconds=rows[-1]["seconds"],
        cost=options.cost(rows[-1]["seconds"]),
        resumed_from=None if last is None else step_of(last),
        options=options,
    )
