"""The text that a conversion is calibrated on: files, the shipped text, the model's own and random tokens, mixed by
weight."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.convert.options import RANDOM_TEXT, SAMPLED_TEXT, ConvertOptions
from kvfold.convert.sampling import random_tokens, sample_from
from kvfold.errors import TextError
from kvfold.progress import Progress
from kvfold.texts import CALIBRATION, DEFAULT_TEXT, read_slice, read_text, share_windows, text_size, token_ids

WHOLE_FILE_BYTES = 2**20
"""Smaller files are tokenised whole: that takes about a second."""

LEAST_DIFFERENT_TOKENS = 3
"""A text of fewer is much the same word again and again: what is fitted to it is worse than the weights alone."""

BYTES_PER_TOKEN = 6
"""A little more than a token of prose takes; a slice that holds fewer tokens than a window is read again, longer."""


def calibration_ids(
    model: Path, tokenizer: PreTrainedTokenizerBase, options: ConvertOptions, progress: Progress
) -> Int64[Tensor, "W T"]:
    """The token windows to calibrate on. Any number of first windows is a mix of all sources and of each one's parts.

    Args:
        model: the original model, loaded only if text is to be sampled from it.
        progress: called with (stage, done, total) while text is sampled.

    Raises:
        TextError: a file is missing, empty, no text, or too short for its share; or all text is a few tokens repeated.
        CheckpointError: the tokenizer belongs to another model.
    """
    windows = -(-options.calibration_tokens // options.calibration_window)
    shares = dict(zip(options.calibration, share_windows(windows, options.weights), strict=True))
    # Files come first: reading them is quick, and a file that is too short must not be found out after the sampling.
    parts = {
        entry: _windows_of_file(tokenizer, entry, count, options.calibration_window)
        for entry, count in shares.items()
        if entry not in (SAMPLED_TEXT, RANDOM_TEXT)
    }
    if RANDOM_TEXT in shares:
        size = (shares[RANDOM_TEXT], options.calibration_window)
        parts[RANDOM_TEXT] = random_tokens(tokenizer, size, options.seed)
    if SAMPLED_TEXT in shares:
        parts[SAMPLED_TEXT] = sample_from(
            model,
            tokenizer,
            windows=shares[SAMPLED_TEXT],
            length=options.calibration_window,
            seed=options.seed,
            progress=progress,
        )
    ids = interleave([parts[entry] for entry in options.calibration])
    if (different := len(ids.unique())) < LEAST_DIFFERENT_TOKENS:
        raise TextError(
            f"the {ids.numel()} calibration tokens are {different} different one(s), repeated: give another text, "
            "or set calibration_tokens to 0."
        )
    return ids


def interleave(parts: Sequence[Int64[Tensor, "_ T"]]) -> Int64[Tensor, "W T"]:
    """All windows of `parts`, spread so that every prefix has its share of each part, and from all over that part.

    Within a part they follow the bits of their index read backwards (the van der Corput sequence): first, middle,
    quarters, eighths.
    """
    places = [
        ((rank + 0.5) / len(part), position, index)
        for position, part in enumerate(parts)
        for rank, index in enumerate(sorted(range(len(part)), key=lambda index: int(f"{index:064b}"[::-1], 2)))
    ]
    return torch.stack([parts[position][index] for _, position, index in sorted(places)])


def _windows_of_file(
    tokenizer: PreTrainedTokenizerBase, entry: str, count: int, window: int
) -> Int64[Tensor, "count window"]:
    """Windows evenly spread over a text file, in its order."""
    path = str(CALIBRATION) if entry == DEFAULT_TEXT else entry
    if (size := text_size(path)) > max(WHOLE_FILE_BYTES, 2 * BYTES_PER_TOKEN * window * count):
        found = _windows_of_slices(tokenizer, path, count, window, stride=size // count)
        if found is not None:
            return found
    ids = token_ids(tokenizer, read_text(path), minimum=count * window, name=f"the calibration text {entry!r}")
    windows = ids[: len(ids) // window * window].view(-1, window)
    return windows[torch.arange(count) * len(windows) // count]


def _windows_of_slices(
    tokenizer: PreTrainedTokenizerBase, path: str, count: int, window: int, stride: int
) -> Int64[Tensor, "count window"] | None:
    """One window from each `stride` bytes of a file, of which no more is read; None where one of them holds too few."""
    found = []
    for start in range(0, count * stride, stride):
        length = BYTES_PER_TOKEN * window
        while len(ids := token_ids(tokenizer, read_slice(path, start, length), minimum=0)) < window:
            if length == stride:
                return None
            length = min(2 * length, stride)
        found.append(ids[:window])
    return torch.stack(found)
