"""Measurements: perplexity, cache bytes, decode speed, generated text."""

from kvfold.evaluate.cache import (
    CacheSize,
    cache_bytes,
    cache_elements,
    measure_cache,
)
from kvfold.evaluate.comparison import Compared, Comparison, Examination, compare
from kvfold.evaluate.generate import continue_prompt, generate
from kvfold.evaluate.perplexity import Perplexity, perplexity
from kvfold.evaluate.quantized import quantized_cache_factory
from kvfold.evaluate.run import Evaluation, evaluate
from kvfold.evaluate.speed import Speed, decode_speed
from kvfold.evaluate.tasks import TaskScore, TaskScores, evaluate_tasks
from kvfold.evaluate.tradeoff import Point, Tradeoff, tradeoff
from kvfold.evaluate.verify import Verification, verify
from kvfold.modeling import cache_keyword, forward_cached

__all__ = [
    "CacheSize",
    "Compared",
    "Comparison",
    "Evaluation",
    "Examination",
    "Perplexity",
    "Point",
    "Speed",
    "TaskScore",
    "TaskScores",
    "Tradeoff",
    "Verification",
    "cache_bytes",
    "cache_elements",
    "cache_keyword",
    "compare",
    "continue_prompt",
    "decode_speed",
    "evaluate",
    "evaluate_tasks",
    "forward_cached",
    "generate",
    "measure_cache",
    "perplexity",
    "quantized_cache_factory",
    "tradeoff",
    "verify",
]
