"""Text that needs no file: sampled from the original model itself, of the kind that it knows, or random tokens."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from kvfold.errors import CheckpointError
from kvfold.families import family_of
from kvfold.modeling import forward_cached, load_model
from kvfold.progress import Progress
from kvfold.texts import check_vocabulary

MOST_WINDOWS = 64
"""Windows that are sampled at once."""

CACHE_BYTES = 2**30
"""What the key/value cache of one batch may take; where tokens take more, fewer windows are sampled at once."""


def sample_from(
    model: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    windows: int,
    length: int,
    seed: int,
    progress: Progress,
) -> Int64[Tensor, "windows length"]:
    """Load the whole `model`, sample windows from it and free it; the caller's random state stays as it is.

    Raises:
        CheckpointError: the model cannot be loaded, gives NaN, or its tokenizer belongs to another model.
    """
    # Building a model draws random weights before the stored ones replace them.
    with torch.random.fork_rng(devices=[]):
        network, _ = load_model(model)
    return sample_windows(network, tokenizer, windows=windows, length=length, seed=seed, progress=progress)


@torch.no_grad()
def sample_windows(
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    windows: int,
    length: int,
    seed: int,
    progress: Progress,
) -> Int64[Tensor, "windows length"]:
    """Token windows sampled at temperature 1. The same seed gives the same tokens; no global random state is used.

    A window begins with the BOS token if the tokenizer puts one before every text. An ordinary token follows, drawn
    uniformly from the vocabulary, so that windows differ even if the model knows only one way to go on from BOS, as a
    chat model may. Everything else is the model's. An end-of-text token ends nothing: what the model says next follows.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = ordinary_tokens(tokenizer)
    opening = _opening(tokenizer)
    check_vocabulary(torch.cat((opening, starts)), network.config.vocab_size)
    known = max(tokenizer.get_vocab().values()) + 1
    ids = torch.empty(windows, length, dtype=torch.int64)
    ids[:, : len(opening)] = opening
    ids[:, len(opening)] = starts[torch.randint(len(starts), (windows,), generator=generator)]
    # One number per token, drawn in advance: a token depends on no other window, nor on the size of the batches.
    draws = torch.rand(windows, length, generator=generator, dtype=torch.float64)
    done = 0
    for part, draw in zip(*(table.split(_batch(network, length)) for table in (ids, draws)), strict=True):
        cache, filled = DynamicCache(config=network.config), 0
        for position in range(len(opening) + 1, length):
            logits = forward_cached(network, part[:, filled:position], cache, logits_to_keep=1).logits
            part[:, position] = _choose(logits[:, -1, :known], draw[:, position])
            filled = position
        done += len(part)
        progress("sampling calibration text", done, windows)
    return ids


def random_tokens(tokenizer: PreTrainedTokenizerBase, size: tuple[int, int], seed: int) -> Int64[Tensor, "W T"]:
    """Windows of tokens that have nothing to do with each other, all of the vocabulary alike."""
    tokens = ordinary_tokens(tokenizer)
    return tokens[torch.randint(len(tokens), size, generator=torch.Generator().manual_seed(seed))]


def ordinary_tokens(tokenizer: PreTrainedTokenizerBase) -> Int64[Tensor, " tokens"]:
    """Ids of the vocabulary in ascending order, without special and added tokens."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return torch.tensor(sorted(set(tokenizer.get_vocab().values()) - special), dtype=torch.int64)


def _opening(tokenizer: PreTrainedTokenizerBase) -> Int64[Tensor, " tokens"]:
    """The BOS token if the tokenizer puts it before every text, else nothing."""
    first = tokenizer("a")["input_ids"][:1]
    return torch.tensor(first if first == [tokenizer.bos_token_id] else [], dtype=torch.int64)


def _batch(network: Any, length: int) -> int:
    config = network.config
    elements = sum(spec.cached_elements() for spec in family_of(config).layer_specs(config))
    return min(max(CACHE_BYTES // (network.dtype.itemsize * elements * length), 1), MOST_WINDOWS)


def _choose(logits: Float[Tensor, "B V"], draws: Float[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """The token at which the summed probability passes a uniform draw from [0, 1)."""
    sums = logits.double().softmax(-1).cumsum(-1)
    if not bool(sums[:, -1].isfinite().all()):
        raise CheckpointError("the model gives NaN where text is sampled from it: calibrate on text files instead.")
    tokens = torch.searchsorted(sums, draws[:, None] * sums[:, -1:], right=True)[:, 0]
    return tokens.clamp_max(logits.shape[1] - 1)
