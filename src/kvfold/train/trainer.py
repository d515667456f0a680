"""The Hugging Face Trainer with our loss, and with checkpoints that are whole or not there."""

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from kvfold.checkpoint import new_folder
from kvfold.errors import TrainingError
from kvfold.train.curve import Curve
from kvfold.train.data import Progress
from kvfold.train.loss import Distillation, heal_loss
from kvfold.train.options import HealOptions

KEPT_CHECKPOINTS = 2
CHECKPOINT = "checkpoint"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in folder.glob(f"{CHECKPOINT}-*") if path.name.removeprefix(f"{CHECKPOINT}-").isdecimal()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(f"{CHECKPOINT}-"))


class HealTrainer(Trainer):
    """Trains on `heal_loss`.

    Args:
        run: the folder of the run, where checkpoints are put.
        complete: called with each checkpoint's folder before that is put in place, to write what else belongs there.
        teacher: the network whose predictions are followed, or None.
    """

    def __init__(
        self,
        *,
        run: Path,
        complete: Callable[[Path], None],
        teacher: nn.Module | None = None,
        distillation: Distillation | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(compute_loss_func=self._loss, **arguments)
        self._complete, self._distillation = complete, distillation
        self._teacher = None if teacher is None else teacher.to(self.args.device)
        self._followed: Tensor | None = None
        self._run = self._place = run

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        """The teacher looks at the batch first."""
        if self._teacher is not None:
            seen = {name: value for name, value in inputs.items() if name != "labels"}
            with torch.no_grad():
                self._followed = self._teacher(**seen).logits
        return super().compute_loss(model, inputs, *arguments, **options)

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        return heal_loss(outputs.logits, labels, num_items_in_batch, self._followed, self._distillation)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._place)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """All of the checkpoint beside its place, then renamed; only then is the oldest one removed."""
        name = f"{CHECKPOINT}-{self.state.global_step}"
        with new_folder(self._run / name) as partial:
            self._place = partial
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._place = self._run
            inner = partial / name
            self._complete(inner)
            for path in list(inner.iterdir()):
                path.rename(partial / path.name)
            inner.rmdir()
        for old in checkpoints(self._run)[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)


class Recorder(TrainerCallback):
    """Writes every step to the curve, and tells how far the run is."""

    def __init__(self, curve: Curve, options: HealOptions, progress: Progress) -> None:
        self._curve, self._progress = curve, progress
        self._tokens = options.batch * options.sequence_length
        self._began = time.perf_counter()

    def on_log(
        self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """One row per step.

        Raises:
            TrainingError: the loss is no number any more.
        """
        if logs is None or "loss" not in logs:
            return
        step = state.global_step
        if not math.isfinite(logs["loss"]):
            raise TrainingError(f"the loss is {logs['loss']} at step {step}: lower the learning rate.")
        row = {"step": step, "tokens": step * self._tokens, "loss": logs["loss"], "rate": logs["learning_rate"]}
        self._curve.add(row | {"seconds": round(time.perf_counter() - self._began, 3)})
        self._progress("healing", step, state.max_steps)
