"""Measurements: perplexity, cache bytes, decode speed, generated text."""

from kvfold.evaluate.cache import (
    CacheSize,
    cache_bytes,
    cache_elements,
    cache_keyword,
    forward_cached,
    measure_cache,
)
from kvfold.evaluate.generate import continue_prompt, generate
from kvfold.evaluate.perplexity import Perplexity, perplexity
from kvfold.evaluate.quantized import quantized_cache_factory
from kvfold.evaluate.run import Evaluation, evaluate
from kvfold.evaluate.speed import Speed, decode_speed
from kvfold.evaluate.verify import Verification, verify

__all__ = [
    "CacheSize",
    "Evaluation",
    "Perplexity",
    "Speed",
    "Verification",
    "cache_bytes",
    "cache_elements",
    "cache_keyword",
    "continue_prompt",
    "decode_speed",
    "evaluate",
    "forward_cached",
    "generate",
    "measure_cache",
    "perplexity",
    "quantized_cache_factory",
    "verify",
]
