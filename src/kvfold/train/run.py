"""One training run: from a model to begin with and options to a finished model folder."""

import contextlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.allocator import keep_freed_memory
from kvfold.checkpoint import alone, fingerprint, is_finite, open_checkpoint, write_json
from kvfold.errors import CheckpointError, OptionError, TrainingError
from kvfold.modeling import load_model
from kvfold.progress import Progress, silent
from kvfold.registry import lookup
from kvfold.texts import DEFAULT_TEXT
from kvfold.train import training
from kvfold.train.curve import HELD_OUT_FILE, read_curve
from kvfold.train.data import WindowReader, cache_folder
from kvfold.train.held_out import loss_on, reason_to_stop
from kvfold.train.model_folder import write_model
from kvfold.train.options import TrainOptions
from kvfold.train.run_folder import begin_run, checkpoints, find_run, step_of
from kvfold.train.teacher import followed_windows, load_teacher
from kvfold.train.training import Material, train, uses_bf16

MODEL_FOLDER, RESULT_FILE = "model", "result.json"
LONGEST_WAIT = timedelta(days=2)
"""Of the other processes for the one that reads the data."""


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
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
    options: TrainOptions

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out), "options": self.options.to_dict()}

    def story(self) -> list[str]:
        """What a card tells of the run, in sentences; the first one goes on after who trained it."""
        names = {DEFAULT_TEXT: "the textbook excerpts in the package"}
        options = self.options
        sources = ", ".join(names.get(name, Path(name).name if Path(name).is_file() else name) for name in options.data)
        taught = "" if options.teacher is None else f", following `{options.teacher}`"
        lines = [
            f"for {self.steps:,} steps, {self.tokens:,} tokens of {sources}{taught}.",
            f"Loss {self.first_loss:.3f} to {self.last_loss:.3f} nats per token (means over {self.window:,} step(s) at "
            "either end).",
        ]
        if self.held_out is not None:
            lines.append("On a held-out text: {:.3f} to {:.3f}.".format(*self.held_out))
        if self.stopped is not None:
            lines.append(f"Stopped early: {self.stopped}.")
        return lines

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainedRun":
        held_out = values["held_out"] and tuple(values["held_out"])
        options = TrainOptions.from_dict(values["options"])
        return cls(**values | {"out": Path(values["out"]), "held_out": held_out, "options": options})


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run begins with.

    `fingerprint` (JSON-able) says whether a run is of the same model, `load` gives the network in fp32 and its
    tokenizer, `dtype` is that of the finished model and `card` makes its card; `complete` writes into a model folder
    what belongs there beside config, weights, tokenizer and card. `folder` is the model's, which a run must not
    replace, or None.
    """

    fingerprint: Any
    load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]
    dtype: torch.dtype
    folder: Path | None
    complete: Callable[[Path], None]
    card: Callable[[TrainedRun], str]


def carry_out(
    start: Start,
    run: Path,
    options: TrainOptions,
    *,
    resume: bool,
    overwrite: bool,
    progress: Progress = silent,
) -> TrainedRun:
    """Train what `start` has and write the run to the folder `run`.

    It holds the settings in `run.json`, the loss of every step in `curve.jsonl`, the last checkpoints, each a complete
    model folder with the state of the optimiser, and in the end `model`. Started by `torchrun` or `accelerate launch`,
    all processes share the sequences of every step.

    Args:
        resume: go on with the run in `run`, if there is one; it must be of the same model and options.
        overwrite: throw away a run in `run`.
        progress: called as `Progress` says.

    Raises:
        KvfoldError: the model, an option, the data or the output does not work; the message says which and why.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise OptionError("training needs the package accelerate, which is not installed: pip install 'kvfold[train]'.")
    from accelerate import PartialState

    if not torch.cuda.is_available():
        keep_freed_memory()
    _check_trackers(options)
    processes = PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)
    _check_processes(options, processes.num_processes)
    read = [start.folder, *options.files(), options.teacher]
    key = {
        "model": start.fingerprint,
        "options": options.to_dict() | {"save_steps": None, "price_per_hour": None},
        "inputs": _inputs(options),
    }
    with alone(run) if processes.is_main_process else contextlib.nullcontext():
        last = find_run(run, json.loads(json.dumps(key)), resume=resume, overwrite=overwrite, read=read)
        if not overwrite and is_finished(run):
            return replace(_result(run), out=run)
        with processes.main_process_first():
            progress("loading the model", 0, 1)
            network, tokenizer = start.load()
            progress("loading the model", 1, 1)
            _check_length(options, network)
            material = _gather(options, network, tokenizer, progress)
        processes.wait_for_everyone()
        if processes.is_main_process:
            begin_run(run, key, overwrite=overwrite)
        processes.wait_for_everyone()

        def complete(folder: Path) -> None:
            tokenizer.save_pretrained(folder)
            start.complete(folder)

        if last is not None and _stopped(run, options, material.goal, step_of(last)):
            network, _ = load_model(last, dtype=torch.float32)
            state = network.state_dict()
        else:
            try:
                state = train(network, material, options, run, complete=complete, last=last, progress=progress)
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(_how_to_go_on(run))
                raise
        if not all(map(is_finite, state.values())):
            raise TrainingError("the weights are not finite after the last step: lower the learning rate.")
        finished = _summary(run, options, last, material.goal)
        if processes.is_main_process:
            write_json(run / RESULT_FILE, finished.to_dict())
            write_model(
                run / MODEL_FOLDER,
                network,
                state,
                dtype=start.dtype,
                card=start.card(finished),
                complete=complete,
            )
        processes.wait_for_everyone()
    return finished


def is_finished(run: Path) -> bool:
    """Whether a run has its model."""
    return (run / MODEL_FOLDER / "config.json").is_file()


def _result(run: Path) -> TrainedRun:
    try:
        return TrainedRun.from_dict(json.loads((run / RESULT_FILE).read_text("utf-8")))
    except (OSError, ValueError, LookupError, TypeError, OptionError) as error:
        raise CheckpointError(f"{run / RESULT_FILE} is damaged ({error!r}): start anew with --overwrite.") from None


def _inputs(options: TrainOptions) -> dict[str, str]:
    """Fingerprints of the files and of the teacher that a run reads, by name."""
    found = {name: fingerprint([Path(name)], "") for name in options.files()}
    return found | (
        {} if options.teacher is None else {options.teacher: open_checkpoint(options.teacher).fingerprint()}
    )


def _check_processes(options: TrainOptions, processes: int) -> None:
    if options.batch % (options.accumulate * processes):
        raise OptionError(
            f"batch is {options.batch}, which {processes} process(es) with accumulate {options.accumulate} cannot "
            "share alike: give a multiple."
        )
    if (options.fsdp or options.deepspeed) and not training.shards_here():
        raise OptionError("fsdp and deepspeed shard over GPUs, of which PyTorch sees none: leave them out.")
    if options.deepspeed and importlib.util.find_spec("deepspeed") is None:
        raise OptionError("deepspeed is not installed: pip install deepspeed, or shard by fsdp.")


def _how_to_go_on(run: Path) -> str:
    kept = checkpoints(run)
    if not kept:
        return f"{run} has no checkpoint yet: the same command with --resume begins anew"
    return f"the same command with --resume goes on after step {step_of(kept[-1]):,}"


def _check_trackers(options: TrainOptions) -> None:
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    for name in options.report_to:
        lookup(INTEGRATION_TO_CALLBACK, name, "tracker")
        if name not in get_available_reporting_integrations():
            raise OptionError(f"report_to names {name}, whose package is not installed: pip install {name}.")


def _check_length(options: TrainOptions, network: PreTrainedModel) -> None:
    most = network.config.max_position_embeddings
    if options.sequence_length > most:
        raise OptionError(f"sequence_length is {options.sequence_length}, the model has {most} positions: give fewer.")


def _gather(
    options: TrainOptions, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> Material:
    """Everything that a run learns from."""
    cache = cache_folder()
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
    goal = None
    if held_out is not None:
        progress("measuring the teacher", 0, 1)
        goal = loss_on(teacher, held_out)
        progress("measuring the teacher", 1, 1)
    if options.teacher_top_k:
        windows = followed_windows(
            teacher, windows, options, bf16=uses_bf16(options), cache=cache / "teachers", progress=progress
        )
        teacher = None
    return Material(windows=windows, held_out=held_out, teacher=teacher, goal=goal)


def _stopped(run: Path, options: TrainOptions, goal: float | None, last: int) -> str | None:
    """Why the run has ended early, if it has by the step `last`."""
    if not (run / HELD_OUT_FILE).exists():
        return None
    return reason_to_stop([row for row in read_curve(run, HELD_OUT_FILE) if row["step"] <= last], options, goal)


def _summary(run: Path, options: TrainOptions, last: Path | None, goal: float | None) -> TrainedRun:
    rows = read_curve(run)
    window = max(len(rows) // 20, 1)
    first, end = ([row["loss"] for row in part] for part in (rows[:window], rows[-window:]))
    measured = [row["loss"] for row in read_curve(run, HELD_OUT_FILE)] if (run / HELD_OUT_FILE).exists() else []
    return TrainedRun(
        out=run,
        steps=len(rows),
        tokens=rows[-1]["tokens"],
        first_loss=sum(first) / window,
        last_loss=sum(end) / window,
        window=window,
        held_out=(measured[0], measured[-1]) if measured else None,
        goal=goal,
        stopped=_stopped(run, options, goal, rows[-1]["step"]) if len(rows) < options.steps else None,
        seconds=rows[-1]["seconds"],
        cost=options.cost(rows[-1]["seconds"]),
        resumed_from=None if last is None else step_of(last),
        options=options,
    )
