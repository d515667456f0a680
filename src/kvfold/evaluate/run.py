"""One model measured as a whole: perplexity, cache bytes and decode speed."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvfold.evaluate.cache import measure_cache
from kvfold.evaluate.perplexity import perplexity
from kvfold.evaluate.speed import decode_speed
from kvfold.modeling import load_model
from kvfold.texts import check_vocabulary, read_text, token_ids

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate` measured.

    Bytes are those of a DynamicCache in `dtype`; speed is at batch 1 on a cache of `context` tokens.
    """

    model: str
    text: str
    dtype: str
    perplexity: float
    nats_per_token: float
    tokens: int
    context: int
    windows: int
    cache_elements_per_token_and_layer: float
    cache_bytes_per_token: float
    tokens_per_second: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    model: str | Path,
    text: str | Path,
    *,
    context: int = 512,
    windows: int | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure `model` on the text file `text`.

    Args:
        model: anything `load_model` takes, original or converted.
        text: path of a UTF-8 text file.
        context: tokens per window, and tokens in the cache when the speed is measured.
        windows: how many windows to score; None for all that the text fills.
        dtype: to run in; None for the checkpoint's own.
        progress: called as `progress(stage, done, total)`.

    Raises:
        TextError: the text is missing, empty or too short.
        CheckpointError: the model cannot be loaded.
        OptionError: a number out of range.
    """
    content = read_text(text)  # before the model, which takes longer to load
    network, tokenizer = load_model(model, dtype=dtype)
    ids = token_ids(tokenizer, content, minimum=context * (windows or 1))
    check_vocabulary(ids, network.config.vocab_size)
    stage = partial(partial, progress) if progress is not None else lambda name: None
    score = perplexity(network, ids, context=context, windows=windows, progress=stage("scoring windows"))
    size = measure_cache(network)
    (speed,) = decode_speed({str(model): network}, cached_tokens=context, progress=stage("timing decode"))
    return Evaluation(
        model=str(model),
        text=str(text),
        dtype=str(network.dtype).removeprefix("torch."),
        perplexity=score.value,
        nats_per_token=score.nats_per_token,
        tokens=score.tokens,
        context=context,
        windows=score.windows,
        cache_elements_per_token_and_layer=size.elements_per_token_and_layer,
        cache_bytes_per_token=size.bytes_per_token,
        tokens_per_second=speed.tokens_per_second,
    )
