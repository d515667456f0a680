"""Decode speed of several models side by side, in alternating runs of one process."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvfold.errors import OptionError
from kvfold.evaluate.cache import CacheFactory, cache_bytes, forward_cached
from kvfold.evaluate.memory import memory_growth


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Decode speed of one model: medians over the repeats; `*_range` are the smallest and the largest.

    `tokens_per_second` counts the tokens of the whole batch; `ratio` is to the first model, from runs that followed
    each other. `peak_bytes` is the cache plus what decoding took on top (on CPU a lower bound, see `memory_growth`).
    """

    name: str
    cached_tokens: int
    batch: int
    new_tokens: int
    repeats: int
    tokens_per_second: float
    tokens_per_second_range: tuple[float, float]
    ratio: float
    ratio_range: tuple[float, float]
    cache_bytes: int
    peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(kw_only=True)
class _Contender:
    model: Any
    cache: Cache
    token: Tensor
    bytes: int
    rates: list[float] = field(default_factory=list)
    growth: int = 0


@torch.no_grad()
def decode_speed(
    models: Mapping[str, Any],
    *,
    cached_tokens: int,
    batch: int = 1,
    new_tokens: int = 16,
    repeats: int = 3,
    cache_factories: Mapping[str, CacheFactory] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Speed]:
    """Time greedy decoding of `new_tokens` tokens on top of `cached_tokens` random states.

    Every model decodes once to warm up and then `repeats` times in turn with the others, so that a drift
    of the machine meets all of them alike. After a run the cache is cropped back where its class can.

    Args:
        models: by name; ratios are to the first.
        cached_tokens: tokens in the cache when a run begins.
        batch: sequences decoded at once.
        new_tokens: decoded per run.
        repeats: runs that count.
        cache_factories: by the same names, for models whose cache is not a plain DynamicCache.
        progress: called as `progress(runs done, runs in all)`.

    Raises:
        OptionError: a number below 1.
    """
    numbers = {"cached_tokens": cached_tokens, "batch": batch, "new_tokens": new_tokens, "repeats": repeats}
    for name, value in numbers.items():
        if value < 1:
            raise OptionError(f"{name} must be at least 1, not {value}.")
    factories = cache_factories or {}
    contenders = {
        name: _filled(model, factories.get(name), cached_tokens=cached_tokens, batch=batch)
        for name, model in models.items()
    }
    runs = [contender for _ in range(repeats + 1) for contender in contenders.values()]
    for done, contender in enumerate(runs, start=1):
        _run(contender, new_tokens=new_tokens)
        if progress is not None:
            progress(done, len(runs))
    for contender in contenders.values():
        del contender.rates[0]  # the warm-up
    base = next(iter(contenders.values())).rates
    return [_summary(name, contender, base, numbers) for name, contender in contenders.items()]


def _filled(model: Any, factory: CacheFactory | None, *, cached_tokens: int, batch: int) -> _Contender:
    """A model with a cache of random states: speed depends on their shapes alone, and a real prefill of a long context
    would take many times longer than the decoding that is measured."""
    token = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
    probe = DynamicCache(config=model.config)
    forward_cached(model, token, probe)
    cache = factory() if factory is not None else DynamicCache(config=model.config)
    for index, layer in enumerate(probe.layers):
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None and layer.values is not None
        keys, values = (
            state.new_empty(*state.shape[:2], cached_tokens, state.shape[-1]).normal_()
            for state in (layer.keys, layer.values)
        )
        cache.update(keys, values, index)
    return _Contender(model=model, cache=cache, token=token, bytes=cache_bytes(cache))


def _run(contender: _Contender, *, new_tokens: int) -> None:
    model, token = contender.model, contender.token
    with memory_growth(model.device) as growth:
        start = _now(model.device)
        for _ in range(new_tokens):
            token = forward_cached(model, token, contender.cache).logits[:, -1:].argmax(-1)
        elapsed = _now(model.device) - start
    contender.rates.append(token.shape[0] * new_tokens / elapsed)
    contender.growth = max(contender.growth, growth.peak_bytes or 0)
    # Past its window, a sliding layer has thrown away what a crop would need, and its size no longer grows anyway.
    if contender.cache.is_croppable and not any(contender.cache.is_sliding):
        contender.cache.crop(-new_tokens)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _summary(name: str, contender: _Contender, base: list[float], numbers: dict[str, int]) -> Speed:
    rates = contender.rates
    ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
    return Speed(
        name=name,
        tokens_per_second=statistics.median(rates),
        tokens_per_second_range=(min(rates), max(rates)),
        ratio=statistics.median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        cache_bytes=contender.bytes,
        peak_bytes=contender.bytes + contender.growth,
        **numbers,
    )
