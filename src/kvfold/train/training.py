"""From options and material to trained weights, on the Hugging Face Trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainingArguments

from kvfold.families import family_of
from kvfold.modeling import KvfoldConfig
from kvfold.precision import has_fast_bf16
from kvfold.progress import Progress
from kvfold.train.curve import Curve
from kvfold.train.data import PackedWindows
from kvfold.train.held_out import HeldOut
from kvfold.train.lora import add_lora
from kvfold.train.loss import Distillation
from kvfold.train.options import TrainOptions
from kvfold.train.run_folder import step_of
from kvfold.train.trainer import HealTrainer, Recorder


@dataclass(frozen=True, kw_only=True)
class Material:
    """What a run learns from.

    `windows` are those of all steps in their order, with a teacher's likeliest tokens where these are kept on disk;
    `teacher` the network to follow otherwise; `goal` its loss on `held_out`.
    """

    windows: Dataset
    held_out: PackedWindows | None
    teacher: PreTrainedModel | None
    goal: float | None


def train(
    network: PreTrainedModel,
    material: Material,
    options: TrainOptions,
    run: Path,
    *,
    complete: Callable[[Path], None],
    last: Path | None,
    progress: Progress,
) -> dict[str, Tensor]:
    """Train `network` from the checkpoint `last` on, if there is one, and return the weights.

    Args:
        complete: called with the folder of a checkpoint, to write what a model folder has beside config and weights.
    """
    _choose_parameters(network, options)
    trainer = HealTrainer(
        model=network,
        args=_arguments(options, run, measures=material.held_out is not None, begins=last is None),
        train_dataset=material.windows,
        eval_dataset=material.held_out,
        teacher=material.teacher,
        distillation=Distillation(
            weight=options.distill_weight, temperature=options.temperature, hidden_weight=options.hidden_weight
        ),
        lora=options.trains == "lora",
        run=run,
        complete=complete,
    )
    trainer.remove_callback(PrinterCallback)
    first, writes = 0 if last is None else step_of(last), trainer.is_world_process_zero()
    trainer.add_callback(Recorder(Curve(run, last=first, writes=writes), options, progress))
    if material.held_out is not None:
        trainer.add_callback(HeldOut(run, options, first=first, goal=material.goal, writes=writes))
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    return trainer.model_state()


def attention_modules(network: PreTrainedModel) -> list[nn.Module]:
    """The attention of every layer, original or converted."""
    config = network.config.base if isinstance(network.config, KvfoldConfig) else network.config
    family = family_of(config)
    return [
        network.get_submodule(f"{family.layers}.{index}.{family.attention}")
        for index in range(config.num_hidden_layers)
    ]


def uses_bf16(options: TrainOptions) -> bool:
    """Whether matrix products are in bf16."""
    if options.precision != "auto":
        return options.precision == "bfloat16"
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return has_fast_bf16()


def shards_here() -> bool:
    """Whether weights can be sharded over processes; accelerate does it on GPUs only, and falls back silently."""
    return torch.cuda.is_available()


def _choose_parameters(network: PreTrainedModel, options: TrainOptions) -> None:
    """Let move what `options.trains` says."""
    if options.trains == "all":
        return
    network.requires_grad_(False)
    modules = attention_modules(network)
    if options.trains == "lora":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            add_lora(network, modules, options.lora_rank)
        return
    for module in modules:
        module.requires_grad_(True)


def _arguments(options: TrainOptions, run: Path, *, measures: bool, begins: bool) -> TrainingArguments:
    on_cpu = not torch.cuda.is_available()
    part = options.batch // options.accumulate
    chosen: dict[str, Any] = {"fsdp": options.fsdp or None, "deepspeed": options.deepspeed}
    if options.gradient_checkpointing:
        chosen["gradient_checkpointing"] = True
    if measures:
        chosen |= {"eval_strategy": "steps", "eval_steps": options.held_out_steps, "eval_on_start": begins}
    arguments = TrainingArguments(
        output_dir=str(run),
        max_steps=options.steps,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={
            "num_decay_steps": options.decay_steps,
            "decay_type": options.decay_type,
            "min_lr_ratio": options.floor,
        },
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=options.clip,
        bf16=uses_bf16(options),
        train_sampling_strategy="sequential",  # the windows are in order already
        remove_unused_columns=False,
        label_names=["labels"],
        prediction_loss_only=True,
        dataloader_pin_memory=not on_cpu,
        save_steps=options.save_steps,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=list(options.report_to) or "none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=on_cpu,
        seed=options.seed,
        **chosen,
    )
    arguments.per_device_train_batch_size = part // arguments.world_size
    arguments.per_device_eval_batch_size = part // arguments.world_size
    return arguments
