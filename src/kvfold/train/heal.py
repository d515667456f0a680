"""Train a converted model back."""

import shutil
from pathlib import Path
from typing import Any

import torch

from kvfold.checkpoint import open_checkpoint
from kvfold.convert import CONVERSION_FILE, UNTRAINED
from kvfold.modeling import load_model
from kvfold.progress import Progress, silent
from kvfold.train.model_folder import CARD_FILE
from kvfold.train.options import TrainOptions
from kvfold.train.run import Start, TrainedRun, carry_out

MOVED = {"all": "all weights", "attention": "the attention", "lora": "the attention, by low-rank updates"}

KEPT_FILES = ("modeling_kvfold_stub.py", "recipe.yaml", CONVERSION_FILE)
"""What a folder takes over from the model that is healed, where it is there."""


def heal(
    model: str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> TrainedRun:
    """Train `model` (a converted or an original one) and write the run to the folder `out`, as `carry_out` says.

    Args:
        resume, overwrite, progress: as of `carry_out`.
        options: fields of `TrainOptions`.

    Raises:
        KvfoldError: the model, an option, the data or the output does not work; the message says which and why.
    """
    chosen, source = TrainOptions.from_dict(options), open_checkpoint(model)
    start = Start(
        fingerprint=source.fingerprint(),
        load=lambda: load_model(model, dtype=torch.float32),
        dtype=source.dtype,
        folder=source.path,
        complete=lambda folder: _keep(source.path, folder),
        card=lambda finished: _card(source.path / CARD_FILE, finished),
    )
    return carry_out(start, Path(out), chosen, resume=resume, overwrite=overwrite, progress=progress)


def _keep(source: Path, folder: Path) -> None:
    for name in KEPT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _card(before: Path, finished: TrainedRun) -> str:
    """The card of the model that was healed, if it has one, and how it was healed."""
    old = before.read_text("utf-8").rstrip() + "\n\n" if before.is_file() else ""
    old = old.replace(
        UNTRAINED, "It was then trained, see [Healing](#healing); all other numbers are from before that."
    )
    first, *rest = finished.story()
    lines = [f"Trained by `kvfold heal` {first}", f"What moved: {MOVED[finished.options.trains]}.", *rest]
    return "\n".join([f"{old}## Healing\n", *lines, ""])
