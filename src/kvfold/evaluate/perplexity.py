"""Perplexity over separate windows of a text, with or without a cache in between."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvfold.errors import OptionError, TextError
from kvfold.evaluate.cache import CacheFactory, forward_cached

LOGITS_BYTES = 512 * 2**20
"""Logits held at once, at most: larger windows or vocabularies are scored in steps."""
CACHED_CHUNK = 32
"""Tokens fed at a time through a cache under test, so that nearly all of what is attended to has been stored."""


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """`value = exp(nats_per_token)`, the mean over `tokens` predictions in `windows` windows of `context` tokens."""

    value: float
    nats_per_token: float
    tokens: int
    context: int
    windows: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def perplexity(
    model: Any,
    token_ids: Int64[Tensor, " tokens"],
    *,
    context: int = 512,
    windows: int | None = None,
    batch: int = 4,
    cache_factory: CacheFactory | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity of `model` on non-overlapping windows of `context` tokens; all but the first token of each are scored.

    Args:
        model: a causal language model.
        token_ids: the text; what does not fill a window is left out.
        context: tokens per window.
        windows: how many windows to score, from the start of the text; None for all.
        batch: windows per forward pass.
        cache_factory: makes the cache to test. Tokens then go through it in chunks, so that the scores see what it
            stores.
        progress: called as `progress(windows done, windows in all)`.

    Raises:
        OptionError: context below 2 or beyond the positions of the model, or windows or batch below 1.
        TextError: the text does not fill `windows` windows, or not even one.
    """
    for name, value, least in (("context", context, 2), ("windows", windows, 1), ("batch", batch, 1)):
        if value is not None and value < least:
            raise OptionError(f"{name} must be at least {least}, not {value}.")
    positions = getattr(model.config, "max_position_embeddings", context)
    if context > positions:
        raise OptionError(
            f"context is {context}, the model has {positions} positions: give --context {positions} or less."
        )
    available = len(token_ids) // context
    count = available if windows is None else windows
    if available < max(count, 1):
        needed = max(count, 1) * context
        raise TextError(
            f"the text has {len(token_ids)} tokens, but {max(count, 1)} windows of {context} need {needed}: "
            "give a longer text, or lower the windows or the context."
        )
    rows = token_ids[: count * context].view(count, context).to(model.device)
    total = 0.0
    for start in range(0, count, batch):
        total += _score(model, rows[start : start + batch], cache_factory)
        if progress is not None:
            progress(min(start + batch, count), count)
    tokens = count * (context - 1)
    nats = total / tokens
    return Perplexity(value=_exp(nats), nats_per_token=nats, tokens=tokens, context=context, windows=count)


def _score(model: Any, ids_BT: Tensor, cache_factory: CacheFactory | None) -> float:
    """Summed negative log-likelihood, in nats, of all but the first token of each row."""
    batch, context = ids_BT.shape
    chunk = CACHED_CHUNK if cache_factory else _affordable_chunk(model, batch)
    cache: Cache | None = None
    if cache_factory is not None:
        cache = cache_factory()
    elif chunk < context:
        cache = DynamicCache(config=model.config)
    total = 0.0
    for start in range(0, context - 1, chunk):
        ids = ids_BT[:, start : min(start + chunk, context - 1)]
        output = model(input_ids=ids, use_cache=False) if cache is None else forward_cached(model, ids, cache)
        targets = ids_BT[:, start + 1 : start + 1 + ids.shape[1]]
        # Row by row, because the float copy of the logits can be as large as the logits.
        for logits, row in zip(output.logits, targets, strict=True):
            total += F.cross_entropy(logits.float(), row, reduction="sum").item()
    return total


def _affordable_chunk(model: Any, batch: int) -> int:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return max(1, LOGITS_BYTES // (batch * vocabulary * model.dtype.itemsize))


def _exp(nats: float) -> float:
    """A broken model may overflow; its perplexity is then infinite, not an error."""
    return math.exp(nats) if nats < 700 else math.inf
