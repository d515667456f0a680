"""Train a converted model back: one run, from the options to a finished model folder."""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainingArguments

from kvfold.checkpoint import new_folder, open_checkpoint, write_text
from kvfold.errors import CheckpointError, OptionError
from kvfold.families import family_of
from kvfold.modeling import KvfoldConfig, load_model
from kvfold.precision import has_fast_bf16
from kvfold.train.curve import Curve, read_curve
from kvfold.train.data import PackedWindows, Progress, packed_windows
from kvfold.train.loss import Distillation
from kvfold.train.options import HealOptions
from kvfold.train.run_folder import begin_run, find_run
from kvfold.train.trainer import HealTrainer, Recorder, step_of

MODEL_FOLDER, CARD_FILE = "model", "README.md"
KEPT_FILES = ("modeling_kvfold_stub.py", "recipe.yaml", "kvfold.json")
"""What a checkpoint takes over from the model that is healed, where it is there."""


@dataclass(frozen=True, kw_only=True)
class Healing:
    """A finished run. Losses in nats per token, each the mean over the first or last `window` steps."""

    out: Path
    steps: int
    tokens: int
    first_loss: float
    last_loss: float
    window: int
    seconds: float
    resumed_from: int | None
    options: HealOptions

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out), "options": self.options.to_dict()}


def heal(
    model: str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> Healing:
    """Train `model` (a converted or an original one) and write the run to the folder `out`.

    `out` holds the settings in `run.json`, the loss of every step in `curve.jsonl`, the last checkpoints, each a
    complete model folder with the state of the optimiser, and in the end `model`.

    Args:
        resume: go on with the run in `out`, if there is one; it must be of the same model and options.
        overwrite: throw away a run in `out`.
        progress: called with (stage, done, total).
        options: fields of `HealOptions`.

    Raises:
        KvfoldError: the model, an option, the data or the output does not work; the message says which and why.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise OptionError("healing runs in one process so far: start it without torchrun or accelerate launch.")
    if importlib.util.find_spec("accelerate") is None:
        raise OptionError("healing needs the package accelerate, which is not installed: pip install 'kvfold[train]'.")
    chosen, run = HealOptions.from_dict(options), Path(out)
    checkpoint = open_checkpoint(model)
    key = json.loads(
        json.dumps({"model": checkpoint.fingerprint(), "options": chosen.to_dict() | {"save_steps": None}})
    )
    last = find_run(run, key, resume=resume, overwrite=overwrite, source=checkpoint.path)
    if not overwrite and (run / MODEL_FOLDER).exists():
        return _summary(run, chosen, None)
    network: Any
    network, tokenizer = load_model(model, dtype=torch.float32)
    teacher = _teacher(chosen, network, tokenizer)
    data = packed_windows(
        chosen.data,
        tokenizer,
        windows=chosen.steps * chosen.batch,
        length=chosen.sequence_length,
        weights=chosen.data_weights,
        column=chosen.column,
        seed=chosen.seed,
        vocabulary=network.config.vocab_size,
        cache=_cache(),
        progress=progress,
    )
    begin_run(run, key, overwrite=overwrite)
    complete = partial(describe, tokenizer=tokenizer, source=checkpoint.path)
    train(network, teacher, data, chosen, run, complete=complete, last=last, progress=progress)
    healing = _summary(run, chosen, last)
    network.to(checkpoint.dtype)
    with new_folder(run / MODEL_FOLDER) as place:
        network.save_pretrained(place)
        complete(place)
        write_text(place / CARD_FILE, healed_card(checkpoint.path / CARD_FILE, healing))
    return healing


def train(
    network: PreTrainedModel,
    teacher: PreTrainedModel | None,
    data: PackedWindows,
    options: HealOptions,
    run: Path,
    *,
    complete: Callable[[Path], None],
    last: Path | None,
    progress: Progress,
) -> None:
    """Train `network` in place, from the checkpoint `last` on if there is one.

    Args:
        complete: called with the folder of a checkpoint, to write what a model folder has beside config and weights.
    """
    if options.trains == "attention":
        network.requires_grad_(False)
        for module in attention_modules(network):
            module.requires_grad_(True)
    trainer = HealTrainer(
        model=network,
        args=_arguments(options, run),
        train_dataset=data,
        teacher=teacher,
        distillation=Distillation(weight=options.distill_weight, temperature=options.temperature),
        run=run,
        complete=complete,
    )
    trainer.remove_callback(PrinterCallback)
    first = 0 if last is None else step_of(last)
    trainer.add_callback(Recorder(Curve(run, first=first), options, progress))
    trainer.train(resume_from_checkpoint=None if last is None else str(last))


def describe(folder: Path, tokenizer: PreTrainedTokenizerBase, source: Path) -> None:
    """Put into `folder` what a model folder has beside config and weights."""
    tokenizer.save_pretrained(folder)
    for name in KEPT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def healed_card(card: Path, healing: Healing) -> str:
    """The model card of what was healed, if it has one, and how it was healed."""
    options = healing.options
    before = card.read_text("utf-8").rstrip() + "\n\n" if card.is_file() else ""
    sources = ", ".join(Path(name).name if Path(name).is_file() else name for name in options.data)
    taught = "" if options.teacher is None else f", following the predictions of `{options.teacher}`"
    return f"""{before}## Healing

Trained by `kvfold heal` for {healing.steps:,} steps, {healing.tokens:,} tokens of {sources}{taught}.
Loss {healing.first_loss:.3f} to {healing.last_loss:.3f} nats per token (means over {healing.window:,} step(s) at
either end). What stands above was measured before.
"""


def attention_modules(network: PreTrainedModel) -> list[nn.Module]:
    """The attention of every layer, original or converted."""
    config = network.config.base if isinstance(network.config, KvfoldConfig) else network.config
    family = family_of(config)
    return [
        network.get_submodule(f"{family.layers}.{index}.{family.attention}")
        for index in range(config.num_hidden_layers)
    ]


def _arguments(options: HealOptions, run: Path) -> TrainingArguments:
    on_cpu = not torch.cuda.is_available()
    recomputed: dict[str, Any] = {"gradient_checkpointing": True} if options.gradient_checkpointing else {}
    return TrainingArguments(
        output_dir=str(run),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch // options.accumulate,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": options.decay_steps, "decay_type": "1-sqrt"},
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=options.clip,
        bf16=options.precision == "bfloat16" or (options.precision == "auto" and _fast_bf16(on_cpu)),
        train_sampling_strategy="sequential",  # the windows are in order already
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        save_steps=options.save_steps,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=on_cpu,
        seed=options.seed,
        **recomputed,
    )


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold" / "tokens"


def _fast_bf16(on_cpu: bool) -> bool:
    return has_fast_bf16() if on_cpu else torch.cuda.is_bf16_supported(including_emulation=False)


def _teacher(
    options: HealOptions, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | None:
    if options.teacher is None:
        return None
    teacher, other = load_model(options.teacher)
    if other.get_vocab() != tokenizer.get_vocab() or teacher.config.vocab_size != network.config.vocab_size:
        raise CheckpointError(
            f"the teacher {options.teacher} has another vocabulary than the model: it must have the same tokenizer."
        )
    return teacher.requires_grad_(False)


def _summary(run: Path, options: HealOptions, last: Path | None) -> Healing:
    rows = read_curve(run)
    window = max(len(rows) // 20, 1)
    first, end = ([row["loss"] for row in part] for part in (rows[:window], rows[-window:]))
    return Healing(
        out=run,
        steps=len(rows),
        tokens=rows[-1]["tokens"],
        first_loss=sum(first) / window,
        last_loss=sum(end) / window,
        window=window,
        seconds=rows[-1]["seconds"],
        resumed_from=None if last is None else step_of(last),
        options=options,
    )
