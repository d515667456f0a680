"""Forward passes with a key/value cache, whatever the release of transformers calls it."""

import inspect
from typing import Any, Literal

from torch import Tensor, nn
from transformers.cache_utils import Cache


def cache_keyword(model: nn.Module) -> Literal["cache", "past_key_values"]:
    """Name of the forward argument, and of the output field, that carries the cache: renamed in transformers 5.20."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def forward_cached(model: nn.Module, token_ids: Tensor, cache: Cache, **arguments: Any) -> Any:
    """Forward pass of `token_ids` (batch, tokens) that reads and extends `cache`."""
    return model(input_ids=token_ids, use_cache=True, **{cache_keyword(model): cache}, **arguments)
