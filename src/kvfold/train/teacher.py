"""The model that is followed, and its likeliest tokens, computed once and kept on disk."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.checkpoint import new_folder, open_checkpoint
from kvfold.errors import CheckpointError, OutputError
from kvfold.modeling import load_model
from kvfold.progress import Progress
from kvfold.train.data import PackedWindows
from kvfold.train.options import TrainOptions

TOKENS_FILE, LOG_P_FILE = "tokens.bin", "log_p.bin"
BYTES_PER_TOKEN = 8
"""On disk, of one of the k likeliest: int32 and fp32."""


class FollowedWindows(torch.utils.data.Dataset):
    """Windows with the likeliest next tokens at every place.

    Args:
        windows: of the run, in its order.
        folder: where `write_top` put the predictions for the different ones among them.
    """

    def __init__(self, windows: PackedWindows, folder: Path, top_k: int) -> None:
        self._windows = windows
        self._row = {place: row for row, place in enumerate(windows.different())}
        shape = (len(self._row), windows.length, top_k)
        self._tokens = np.memmap(folder / TOKENS_FILE, np.int32, "r", shape=shape)
        self._log_p = np.memmap(folder / LOG_P_FILE, np.float32, "r", shape=shape)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """As of `PackedWindows`, with `top_tokens` and `top_log_p`, each (length, k)."""
        row = self._row[self._windows.places[item]]
        return self._windows[item] | {
            "top_tokens": torch.from_numpy(self._tokens[row].astype(np.int64)),
            "top_log_p": torch.from_numpy(self._log_p[row].copy()),
        }


def load_teacher(
    options: TrainOptions, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """The model `options.teacher` in its own dtype, frozen, on the GPU if there is one.

    Raises:
        CheckpointError: it has another vocabulary than `network`, or hidden states of another shape where these count.
    """
    assert options.teacher is not None
    teacher: Any
    teacher, other = load_model(options.teacher)
    if other.get_vocab() != tokenizer.get_vocab() or teacher.config.vocab_size != network.config.vocab_size:
        raise CheckpointError(
            f"the teacher {options.teacher} has another vocabulary than the model: it must have the same tokenizer."
        )
    if options.hidden_weight:
        shapes = [(model.config.num_hidden_layers, model.config.hidden_size) for model in (teacher, network)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"the teacher {options.teacher} has {shapes[0][0]} layers of width {shapes[0][1]}, the model "
                f"{shapes[1][0]} of {shapes[1][1]}: hidden_weight needs the same."
            )
    teacher.to("cuda" if torch.cuda.is_available() else "cpu")
    return teacher.requires_grad_(False)


def followed_windows(
    teacher: PreTrainedModel,
    windows: PackedWindows,
    options: TrainOptions,
    *,
    bf16: bool,
    cache: Path,
    progress: Progress,
) -> FollowedWindows:
    """`windows` with the `options.teacher_top_k` likeliest tokens of `teacher`, from `cache` if they are there.

    Raises:
        OutputError: there is not enough room for them.
    """
    assert options.teacher is not None
    top_k = min(options.teacher_top_k, teacher.config.vocab_size)
    digest = hashlib.sha256()
    for place in windows.different():
        window = windows.at(place)
        digest.update(window["input_ids"].numpy().tobytes() + window["position_ids"].numpy().tobytes())
    key = {
        "teacher": open_checkpoint(options.teacher).fingerprint(),
        "windows": digest.hexdigest(),
        "top_k": top_k,
        "temperature": options.temperature,
        "bf16": bf16,
    }
    folder = cache / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    if not folder.exists():
        with new_folder(folder) as place:
            _check_room(place, len(windows.different()) * windows.length * top_k * BYTES_PER_TOKEN)
            write_top(place, teacher, windows, options, top_k=top_k, bf16=bf16, progress=progress)
    return FollowedWindows(windows, folder, top_k)


@torch.no_grad()
def write_top(
    place: Path,
    teacher: Any,
    windows: PackedWindows,
    options: TrainOptions,
    *,
    top_k: int,
    bf16: bool,
    progress: Progress,
) -> None:
    """Write the likeliest tokens and their log-probabilities at every place of the different windows."""
    different, batch = windows.different(), options.batch // options.accumulate
    with (place / TOKENS_FILE).open("wb") as tokens, (place / LOG_P_FILE).open("wb") as log_p:
        for first in range(0, len(different), batch):
            rows = [windows.at(window) for window in different[first : first + batch]]
            inputs: dict[str, Any] = {
                name: torch.stack([row[name] for row in rows]).to(teacher.device)
                for name in ("input_ids", "position_ids")
            }
            with torch.autocast(teacher.device.type, torch.bfloat16, enabled=bf16):
                logits = teacher(**inputs, use_cache=False).logits
            top = (logits.float() / options.temperature).log_softmax(-1).topk(top_k)
            top.indices.to("cpu", torch.int32).numpy().tofile(tokens)
            top.values.cpu().numpy().tofile(log_p)
            progress("asking the teacher", first + len(rows), len(different), "")


def _check_room(place: Path, needed: int) -> None:
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OutputError(
            f"the teacher's likeliest tokens take {needed / 2**30:.1f} GiB, {place.parent} has {free / 2**30:.1f}: "
            "take a smaller teacher_top_k, fewer steps, or set XDG_CACHE_HOME to a larger disk."
        )
