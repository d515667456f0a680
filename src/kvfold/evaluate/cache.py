"""What a key/value cache really holds, counted from its tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from kvfold.evaluate.quantized import quantized_cache_factory
from kvfold.modeling import forward_cached
from kvfold.registry import lookup

CacheFactory = Callable[[], Cache]


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors that `cache` holds, scales and zero points of quantised ones included.

    A StaticCache counts what it has allocated, filled or not.
    """
    return sum(_tensor_bytes(tensor) for layer in cache.layers for tensor in _tensors(_state(layer)))


def cache_elements(cache: Cache) -> int:
    """Key and value elements in `cache`; a quantised element counts as one, scales and zero points as none."""
    return sum(_layer_elements(layer) for layer in cache.layers)


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """Measured size of a cache: elements per token for each layer, bytes per token for all layers together."""

    elements_per_layer: tuple[int, ...]
    bytes_per_token: float

    @property
    def elements_per_token(self) -> int:
        return sum(self.elements_per_layer)

    @property
    def elements_per_token_and_layer(self) -> float:
        """Mean over the layers; layers may differ."""
        return self.elements_per_token / len(self.elements_per_layer)

    @property
    def bits_per_element(self) -> float:
        return 8 * self.bytes_per_token / self.elements_per_token


@torch.no_grad()
def measure_cache(model: Any, cache: str | Cache | None = None, *, tokens: int = 64) -> CacheSize:
    """Prefill `tokens` random tokens and count what the cache then holds.

    Args:
        model: a causal language model.
        cache: an empty cache for batch 1, or `dynamic` (the default), `static` or `quantized` (int4).
        tokens: tokens to prefill; a layer with a smaller sliding window is divided by what it keeps.

    Raises:
        UnknownNameError: no such kind of cache.
    """
    if cache is None or isinstance(cache, str):
        cache = lookup(CACHE_KINDS, cache or "dynamic", "cache")(model.config, tokens)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, tokens), generator=generator).to(model.device)
    half = tokens // 2
    # Two steps, because transformers' quantised caches take another path on the first update than on later ones.
    for part in (ids[:, :half], ids[:, half:]):
        forward_cached(model, part, cache)
    kept = [_kept_tokens(layer) for layer in cache.layers]
    elements = [_layer_elements(layer) / held for layer, held in zip(cache.layers, kept, strict=True)]
    assert all(count.is_integer() for count in elements), elements
    size = (
        sum(map(_tensor_bytes, _tensors(_state(layer)))) / held for layer, held in zip(cache.layers, kept, strict=True)
    )
    return CacheSize(elements_per_layer=tuple(int(count) for count in elements), bytes_per_token=sum(size))


def _quantized(config: PreTrainedConfig, tokens: int) -> Cache:
    return quantized_cache_factory(config)()


CACHE_KINDS: dict[str, Callable[[PreTrainedConfig, int], Cache]] = {
    "dynamic": lambda config, tokens: DynamicCache(config=config),
    "static": lambda config, tokens: StaticCache(config=config, max_cache_len=tokens),
    "quantized": _quantized,
}


def _state(layer: Any) -> dict[str, Any]:
    """Attributes that grow with the tokens; a pending beam reordering and counters (0-dim tensors) do not."""
    return {name: value for name, value in vars(layer).items() if name != "_pending_beam_idx"}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.dim() > 0:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _tensor_bytes(tensor: Tensor) -> int:
    if is_traceable_wrapper_subclass(tensor):  # a packed tensor, such as quanto's: its parts are what is stored
        names, _ = tensor.__tensor_flatten__()
        return sum(_tensor_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def _layer_elements(layer: Any) -> int:
    state = _state(layer)
    plain = (state.get("keys"), state.get("values"))
    packed = (state.get("_quantized_keys"), state.get("_quantized_values"))
    return sum(tensor.numel() for tensor in _tensors(plain)) + sum(_packed_elements(value) for value in packed)


def _packed_elements(value: Any) -> int:
    """Elements behind a packed tensor: a wrapper knows its shape, a pair (codes, details) names it in the details."""
    if value is None:
        return 0
    if isinstance(value, Tensor):
        return value.numel()
    _, details = value
    return details["shape"].numel()


def _kept_tokens(layer: Any) -> int:
    """Tokens that a layer has room for: fewer than were seen under a sliding window. A quantised layer holds them all,
    the newest perhaps unpacked."""
    packed = _state(layer).get("_quantized_keys") is not None
    return layer.get_seq_length() if packed else layer.keys.shape[-2]
