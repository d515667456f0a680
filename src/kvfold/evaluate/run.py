"""One model measured as a whole: perplexity, cache bytes, decode speed and benchmarks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvfold.errors import OptionError
from kvfold.evaluate.cache import measure_cache
from kvfold.evaluate.perplexity import perplexity
from kvfold.evaluate.speed import decode_speed
from kvfold.evaluate.tasks import TaskScores, score_tasks, tasks_if_any
from kvfold.modeling import load_model
from kvfold.progress import Progress
from kvfold.texts import check_vocabulary, read_text, token_ids


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate` measured; everything that needs a text, or tasks, is None without.

    Bytes are those of a DynamicCache in `dtype`; speed is at batch 1 on a cache of `context` tokens.
    """

    model: str
    dtype: str
    cache_elements_per_token_and_layer: float
    cache_bytes_per_token: float
    text: str | None = None
    perplexity: float | None = None
    nats_per_token: float | None = None
    tokens: int | None = None
    context: int | None = None
    windows: int | None = None
    tokens_per_second: float | None = None
    tasks: TaskScores | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tasks": None if self.tasks is None else self.tasks.to_dict()}


def evaluate(
    model: str | Path,
    text: str | Path | None = None,
    *,
    context: int = 512,
    windows: int | None = None,
    tasks: Sequence[str] = (),
    task_folder: str | Path | None = None,
    limit: int | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure `model` on the text file `text`, on benchmarks, or on both.

    Args:
        model: anything `load_model` takes, original or converted.
        text: path of a UTF-8 text file, for perplexity and decode speed.
        context: tokens per window, and tokens in the cache when the speed is measured.
        windows: how many windows to score; None for all that the text fills.
        tasks: names of lm-evaluation-harness, see `evaluate_tasks`.
        task_folder: where their YAML files are; None for the harness's own.
        limit: items per task; None for all.
        dtype: to run in; None for the checkpoint's own.
        progress: called as `progress(stage, done, total)`.

    Raises:
        TextError: the text is missing, empty or too short.
        CheckpointError: the model cannot be loaded.
        OptionError: a number out of range, neither text nor tasks, or tasks that cannot be had.
    """
    if text is None and not tasks:
        raise OptionError("there is nothing to evaluate on: give a text, tasks, or both.")
    # Texts and tasks come before the model, which takes longer to load.
    selection = tasks_if_any(tasks, folder=task_folder, limit=limit, progress=progress)
    content = None if text is None else read_text(text)
    network, tokenizer = load_model(model, dtype=dtype)
    stage = partial(partial, progress) if progress is not None else lambda name: None
    measured: dict[str, Any] = {}
    if content is not None:
        ids = token_ids(tokenizer, content, minimum=context * (windows or 1))
        check_vocabulary(ids, network.config.vocab_size)
        score = perplexity(network, ids, context=context, windows=windows, progress=stage("scoring windows"))
        (speed,) = decode_speed({str(model): network}, cached_tokens=context, progress=stage("timing decode"))
        measured = score.to_dict() | {"text": str(text), "tokens_per_second": speed.tokens_per_second}
        measured["perplexity"] = measured.pop("value")
    if selection is not None:
        measured["tasks"] = score_tasks(network, tokenizer, selection, progress=progress)
    size = measure_cache(network)
    return Evaluation(
        model=str(model),
        dtype=str(network.dtype).removeprefix("torch."),
        cache_elements_per_token_and_layer=size.elements_per_token_and_layer,
        cache_bytes_per_token=size.bytes_per_token,
        **measured,
    )
