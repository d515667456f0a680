"""The loss on a held-out text while a run goes on, and when that says to stop."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from kvfold.train.curve import HELD_OUT_FILE, Curve
from kvfold.train.data import PackedWindows
from kvfold.train.loss import heal_loss
from kvfold.train.options import TrainOptions


class HeldOut(TrainerCallback):
    """Writes every measurement down, and ends the run when the options say so.

    Args:
        run: the folder of the run.
        first: the step that the run goes on from; at 0 there is no measurement yet.
        goal: the teacher's loss on the same text, where the run ends when enough is won back.
        writes: whether this process writes the file.
    """

    def __init__(self, run: Path, options: TrainOptions, *, first: int, goal: float | None, writes: bool) -> None:
        self._curve = Curve(run, HELD_OUT_FILE, last=first or -1, writes=writes)
        self._options, self._goal = options, goal

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """The finished model is measured, too."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(
        self, args: TrainingArguments, state: Any, control: Any, metrics: dict[str, float], **_: Any
    ) -> None:
        row = {"step": state.global_step, "tokens": state.global_step * self._options.step_tokens}
        self._curve.add(row | {"loss": metrics["eval_loss"]})
        if reason_to_stop(self._curve.rows, self._options, self._goal):
            control.should_training_stop = control.should_save = True


def reason_to_stop(rows: list[dict[str, Any]], options: TrainOptions, goal: float | None) -> str | None:
    """Why a run with these measurements, the first one at its start, should end; None where it should not."""
    losses = [row["loss"] for row in rows]
    if len(losses) < 2:
        return None
    if options.patience is not None and len(losses) - 1 - losses.index(min(losses)) >= options.patience:
        return f"the held-out loss has not fallen in {options.patience} measurement(s)"
    if options.recover is None or goal is None or losses[0] - losses[-1] < options.recover * (losses[0] - goal):
        return None
    return f"{options.recover:.0%} of the held-out loss is won back"


@torch.no_grad()
def loss_on(network: PreTrainedModel, windows: PackedWindows) -> float:
    """Nats per token, mean over the windows."""
    losses = []
    for index in range(len(windows)):
        window = {name: tensor[None].to(network.device) for name, tensor in windows[index].items()}
        labels = window.pop("labels")
        losses.append(float(heal_loss(network(**window, use_cache=False).logits, labels)[0]))
    return sum(losses) / len(losses)
