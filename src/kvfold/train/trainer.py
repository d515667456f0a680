"""The Hugging Face Trainer with our loss, and with checkpoints that are whole or not there."""

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from kvfold.checkpoint import new_folder
from kvfold.errors import OutputError, TrainingError
from kvfold.progress import Progress
from kvfold.train.curve import Curve
from kvfold.train.lora import adapter, merged
from kvfold.train.loss import Distillation, FullPredictions, Predictions, TopPredictions, heal_loss, hidden_loss
from kvfold.train.options import TrainOptions
from kvfold.train.run_folder import CHECKPOINT, checkpoints, seal

KEPT_CHECKPOINTS = 2
ADAPTER_FILE = "lora.safetensors"


class HealTrainer(Trainer):
    """Trains on `heal_loss`, and measures the cross entropy alone.

    Args:
        run: the folder of the run, where checkpoints are put.
        complete: called with each checkpoint's folder before that is put in place, to write what else belongs there.
        teacher: the network that is followed, or None.
        lora: whether the network has low-rank updates, which are then saved merged, and by themselves to go on from.
    """

    def __init__(
        self,
        *,
        run: Path,
        complete: Callable[[Path], None],
        distillation: Distillation,
        teacher: nn.Module | None = None,
        lora: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(compute_loss_func=self._loss, **arguments)
        self._complete, self._distillation, self._lora = complete, distillation, lora
        self._teacher = None if teacher is None else teacher.to(self.args.device)
        self._cross_entropy = torch.zeros((), device=self.args.device)
        self._predictions: Predictions | None = None
        self._states: tuple[Tensor, ...] | None = None
        self._run = self._place = run

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        """The teacher looks at the batch first, unless this is a measurement."""
        top = [inputs.pop(name, None) for name in ("top_tokens", "top_log_p")]
        self._predictions, self._states = None, None
        inputs = inputs | {"use_cache": False}
        if model.training and top[0] is not None:
            self._predictions = TopPredictions(*top)
        elif model.training and self._teacher is not None:
            inputs["output_hidden_states"] = self._distillation.hidden_weight > 0
            with torch.no_grad():
                taught = self._teacher(**{name: value for name, value in inputs.items() if name != "labels"})
            self._predictions, self._states = FullPredictions(taught.logits), taught.hidden_states
        return super().compute_loss(model, inputs, *arguments, **options)

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        loss, alone = heal_loss(outputs.logits, labels, num_items_in_batch, self._predictions, self._distillation)
        if self._network.training:
            self._cross_entropy += alone.detach()
        if self._states is not None:
            # The first are the embeddings of the tokens.
            distance = hidden_loss(outputs.hidden_states[1:], self._states[1:], labels, num_items_in_batch)
            loss = loss + self._distillation.hidden_weight * distance
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the cross entropy to what is logged of a step: every process has a part of it."""
        if "loss" in logs:
            summed: Any = self.accelerator.reduce(self._cross_entropy, "sum")
            logs["cross_entropy"] = float(summed)
            self._cross_entropy = torch.zeros_like(self._cross_entropy)
        super().log(logs, start_time)

    @property
    def _network(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def model_state(self) -> dict[str, Tensor]:
        """The state dict of the whole network without low-rank updates; all processes must ask for it."""
        state: Any = self.accelerator.get_state_dict(self.model_wrapped)
        return merged(state) if self._lora else state

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if self._lora and self.args.should_save:
            state = self._network.state_dict() if state_dict is None else state_dict
            state_dict = merged(state)
            super()._save(output_dir, state_dict)
            save_file(adapter(state), Path(str(output_dir)) / ADAPTER_FILE)
        else:
            super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._lora and not self.is_fsdp_enabled:
            self._network.load_state_dict(load_file(Path(resume_from_checkpoint) / ADAPTER_FILE), strict=False)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._place)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """All of the checkpoint beside its place, then renamed; only then is the oldest one removed."""
        name = f"{CHECKPOINT}-{self.state.global_step}"
        with self._shared_folder(self._run / name) as partial:
            self._place = partial
            try:
                super()._save_checkpoint(model, trial)
            except RuntimeError as error:
                if "unexpected pos" not in str(error):  # how PyTorch's writer says that the disk is full
                    raise
                raise OutputError(f"cannot write {partial}: no space left; make room, then --resume.") from error
            finally:
                self._place = self._run
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                inner = partial / name
                self._complete(inner)
                for path in list(inner.iterdir()):
                    path.rename(partial / path.name)
                inner.rmdir()
                seal(partial)
        if self.args.should_save:
            for old in checkpoints(self._run)[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old, ignore_errors=True)

    @contextlib.contextmanager
    def _shared_folder(self, place: Path) -> Iterator[Path]:
        """`new_folder` of the first process, which the others write to, too."""
        with new_folder(place) if self.args.should_save else contextlib.nullcontext() as partial:
            shared: list[Any] = [partial]
            broadcast_object_list(shared)
            yield shared[0]


class Recorder(TrainerCallback):
    """Writes every step to the curve, and tells how far the run is."""

    def __init__(self, curve: Curve, options: TrainOptions, progress: Progress) -> None:
        self._curve, self._options, self._progress = curve, options, progress
        before = curve.rows[-1]["seconds"] if curve.rows else 0.0
        self._began = time.perf_counter() - before

    def on_log(
        self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """One row per step.

        Raises:
            TrainingError: the loss is no number any more.
        """
        if logs is None or "loss" not in logs:
            return
        step, seconds = state.global_step, time.perf_counter() - self._began
        if not math.isfinite(logs["loss"]):
            raise TrainingError(f"the loss is {logs['loss']} at step {step}: lower the learning rate.")
        row = {"step": step, "tokens": step * self._options.step_tokens, "loss": logs["cross_entropy"]}
        if self._options.teacher is not None:
            row["objective"] = logs["loss"]
        norm = {name: logs[name] for name in ("grad_norm",) if name in logs}  # DeepSpeed keeps it to itself
        self._curve.add(row | {"rate": logs["learning_rate"]} | norm | {"seconds": round(seconds, 3)})
        cost = self._options.cost(seconds)
        words = [f"loss {row['loss']:.3f}", f"{row['tokens']:,} tokens", "" if cost is None else f"cost {cost:.2f}"]
        self._progress("training", step, state.max_steps, ", ".join(filter(None, words)))
