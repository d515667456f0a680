"""Several models on the same texts and benchmarks: an original, what was made of it, and its cache in four bits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvfold.errors import OptionError
from kvfold.evaluate.cache import measure_cache
from kvfold.evaluate.perplexity import perplexity
from kvfold.evaluate.quantized import quantized_cache_factory
from kvfold.evaluate.tasks import TaskScores, TaskSelection, score_tasks, tasks_if_any
from kvfold.modeling import load_model
from kvfold.progress import Progress, silent
from kvfold.texts import check_vocabulary, read_text, token_ids


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One model. `nats_per_token` by text; `tasks` is None where none were asked for, and for a quantised cache."""

    name: str
    dtype: str
    cache_elements_per_token_and_layer: float
    cache_bytes_per_token: float
    nats_per_token: dict[str, float]
    tasks: TaskScores | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "perplexity": {text: math.exp(nats) for text, nats in self.nats_per_token.items()},
            "tasks": None if self.tasks is None else self.tasks.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What every model is asked: the first `windows` windows of `context` tokens of each text, and the tasks."""

    texts: dict[str, str]
    context: int
    windows: int
    selection: TaskSelection | None

    @classmethod
    def of(
        cls,
        texts: Sequence[str | Path] = (),
        *,
        context: int = 512,
        windows: int = 24,
        tasks: Sequence[str] = (),
        task_folder: str | Path | None = None,
        limit: int | None = None,
        progress: Progress = silent,
    ) -> "Examination":
        """Read the texts and load the tasks.

        Args:
            texts: paths of UTF-8 text files.
            context: tokens per window.
            windows: of each text.
            tasks, task_folder, limit: as of `evaluate_tasks`.

        Raises:
            OptionError: nothing to ask, two texts of one name, or tasks that cannot be had.
            TextError: a text is missing or empty.
        """
        if not texts and not tasks:
            raise OptionError("there is nothing to compare on: give texts, tasks, or both.")
        selection = tasks_if_any(tasks, folder=task_folder, limit=limit, progress=progress)
        contents: dict[str, str] = {}
        for path in map(Path, texts):
            if path.name in contents:
                raise OptionError(f"two texts are called {path.name}: rename one.")
            contents[path.name] = read_text(path)
        return cls(texts=contents, context=context, windows=windows, selection=selection)

    def ask(
        self,
        name: str,
        model: str | Path,
        *,
        cache_bits: int | None = None,
        dtype: torch.dtype | None = None,
        progress: Progress = silent,
    ) -> Compared:
        """Load a model and measure it.

        Args:
            name: what it is called in the comparison.
            model: anything `load_model` takes.
            cache_bits: of a quantised cache, through which the texts go; tasks, which use none, are left out.
            dtype: to run in; None for the checkpoint's own.

        Raises:
            CheckpointError: the model cannot be loaded.
            TextError: a text is too short, or of another vocabulary.
        """
        loaded: Any = load_model(model, dtype=dtype)
        network, tokenizer = loaded
        factory = None if cache_bits is None else quantized_cache_factory(network.config, nbits=cache_bits)
        nats = {}
        for text, content in self.texts.items():
            ids = token_ids(tokenizer, content, minimum=self.context * self.windows)
            check_vocabulary(ids, network.config.vocab_size)
            told = partial(progress, f"{name}: {text}")
            options = {"context": self.context, "windows": self.windows, "cache_factory": factory}
            nats[text] = perplexity(network, ids, progress=told, **options).nats_per_token
        tasks = None
        if self.selection is not None and factory is None:
            tasks = score_tasks(network, tokenizer, self.selection, progress=progress)
        # Caches are counted in what a model is deployed in, which the dtype of a measurement may not be.
        size = measure_cache(network.to(torch.bfloat16), None if factory is None else factory())
        return Compared(
            name=name,
            dtype=str(dtype or network.dtype).removeprefix("torch."),
            cache_elements_per_token_and_layer=size.elements_per_token_and_layer,
            cache_bytes_per_token=size.bytes_per_token,
            nats_per_token=nats,
            tasks=tasks,
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows in the order of the models, the first of which the others are held against."""

    rows: tuple[Compared, ...]
    context: int
    windows: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what a row has more than the first one in `ratio` (of perplexity, by text)."""
        rows = [row.to_dict() for row in self.rows]
        for row in rows:
            first = rows[0]["perplexity"]
            row["ratio"] = {text: value / first[text] for text, value in row["perplexity"].items()}
            row["cache_percent"] = 100 * row["cache_bytes_per_token"] / rows[0]["cache_bytes_per_token"]
        return {"rows": rows, "context": self.context, "windows": self.windows}


def compare(
    models: Mapping[str, str | Path],
    texts: Sequence[str | Path] = (),
    *,
    dtype: torch.dtype | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Comparison:
    """Measure several models on the same texts and tasks.

    Args:
        models: paths by name; the first is the original, which is measured with an int4 cache as well, on the texts:
            what fewer bytes cost without a conversion.
        texts, options: as of `Examination.of`.
        dtype: to run in; None for each checkpoint's own.

    Raises:
        KvfoldError: a model, a text or an option does not work; the message says which and why.
    """
    if not models:
        raise OptionError("there is no model to compare: give NAME=MODEL.")
    examination = Examination.of(texts, progress=progress, **options)
    rows = [examination.ask(name, model, dtype=dtype, progress=progress) for name, model in models.items()]
    if examination.texts:
        name, model = next(iter(models.items()))
        rows.append(examination.ask(f"{name}, int4 cache", model, cache_bits=4, dtype=dtype, progress=progress))
    return Comparison(rows=tuple(rows), context=examination.context, windows=examination.windows)
