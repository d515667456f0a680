"""Accuracy on multiple-choice benchmarks, by EleutherAI's lm-evaluation-harness."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, set_seed

from kvfold.errors import CheckpointError, OptionError
from kvfold.progress import Progress

ARC = ("arc_easy", "arc_challenge")
"""Two tasks that count as one benchmark in the average, as in the tables of the MHA2MLA paper."""


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Result on one task, as fractions of its `items`.

    `accuracy` counts the items whose likeliest answer is right. `acc_norm` divides each log-likelihood by the answer's
    length in characters first, so that long answers are not at a disadvantage; it is None for tasks that do not define
    it. `standard_error` is that of `score`.
    """

    accuracy: float
    acc_norm: float | None
    standard_error: float | None
    items: int

    @property
    def metric(self) -> str:
        """Which of the two is the task's score: `acc_norm` where it is defined, else `acc`."""
        return "acc" if self.acc_norm is None else "acc_norm"

    @property
    def score(self) -> float:
        return self.accuracy if self.acc_norm is None else self.acc_norm

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"metric": self.metric, "score": self.score}


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """Results on several tasks, by name, with the items limited to `limit` per task."""

    tasks: dict[str, TaskScore]
    limit: int | None
    seed: int

    @property
    def average(self) -> float:
        """Mean of the scores over the benchmarks, each counting alike; ARC's easy and challenge sets are one."""
        return sum(weight * self.tasks[name].score for name, weight in self._weights().items())

    @property
    def average_standard_error(self) -> float | None:
        """Of `average`, the tasks taken as independent; None where a task has none."""
        errors = [
            None if (error := self.tasks[name].standard_error) is None else weight * error
            for name, weight in self._weights().items()
        ]
        return None if None in errors else math.hypot(*(error for error in errors if error is not None))

    def to_dict(self) -> dict[str, Any]:
        return {
            "tasks": {name: score.to_dict() for name, score in self.tasks.items()},
            "average": self.average,
            "average_standard_error": self.average_standard_error,
            "limit": self.limit,
            "seed": self.seed,
        }

    def _weights(self) -> dict[str, float]:
        benchmarks = {name: "arc" if name.endswith(ARC) else name for name in self.tasks}
        sizes = list(benchmarks.values())
        return {name: 1 / (sizes.count(benchmark) * len(set(sizes))) for name, benchmark in benchmarks.items()}


@dataclass(frozen=True, kw_only=True)
class TaskSelection:
    """Tasks that are loaded, and the items to ask of those that have more than `limit`: see `select_tasks`."""

    rows: dict[str, dict[str, Any]]
    items: dict[str, list[int]]
    limit: int | None


def evaluate_tasks(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
    batch: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> TaskScores:
    """Score `model` on multiple-choice tasks of lm-evaluation-harness, without examples unless a task asks for some.

    A task's score is acc_norm where the task defines it, else acc; the average is the mean over the benchmarks.

    Args:
        model: a causal language model, original or converted.
        tokenizer: the model's; it is not changed.
        tasks: names of tasks, tags (each of their tasks is scored) or groups (their items are scored as one task).
        folder: of YAML task files, which then are all that is known, and with which no network is needed. Data files
            are looked for beside the YAML file, in `folder` and in the folder above it. The harness runs the Python
            functions that a file names, so give only files that you trust.
        limit: items per task; they are spread evenly over the task and the same for every model. None for all.
        batch: answers per forward pass.
        seed: of the examples that a task draws, and of PyTorch.
        progress: called as `progress(stage, done, total)`.

    Raises:
        OptionError: lm-eval is missing, a number is out of range, a task cannot be loaded or measures no accuracy.
        UnknownNameError: there is no such task.
        TextError: an answer does not fit into the model's context.
        CheckpointError: the tokenizer belongs to another model, or names no bos or eos token.
    """
    selection = select_tasks(tasks, folder=folder, limit=limit, progress=progress)
    return score_tasks(model, tokenizer, selection, batch=batch, seed=seed, progress=progress)


def tasks_if_any(
    tasks: Sequence[str],
    *,
    folder: str | Path | None,
    limit: int | None,
    progress: Progress | None,
) -> "TaskSelection | None":
    """`select_tasks`, or None where there are none.

    Raises:
        OptionError: there are none, but a folder or a limit for them; and those of `select_tasks`.
    """
    if tasks:
        return select_tasks(tasks, folder=folder, limit=limit, progress=progress)
    if folder is not None or limit is not None:
        raise OptionError("a task folder or a limit was given without tasks: name the tasks.")
    return None


def select_tasks(
    tasks: Sequence[str],
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> TaskSelection:
    """Load `tasks`, before any model is loaded; for arguments and errors see `evaluate_tasks`."""
    if limit is not None and limit < 1:
        raise OptionError(f"limit must be at least 1, not {limit}.")
    if not tasks:
        raise OptionError("no tasks were given: name at least one.")
    if len(set(tasks)) < len(tasks):
        raise OptionError(f"a task is named twice among {', '.join(tasks)}: name each once.")
    if folder is not None and not Path(folder).is_dir():
        raise OptionError(f"task folder {folder} does not exist: give a folder of YAML task files.")
    if missing := [name for name in ("lm_eval", "accelerate") if importlib.util.find_spec(name) is None]:
        raise OptionError(
            f"tasks need {missing[0].replace('_', '-')}, which is not installed: pip install 'kvfold[eval]'."
        )
    from kvfold.evaluate.harness import audible, load_tasks, quiet

    rows = load_tasks(tasks, None if folder is None else Path(folder), audible(progress, "loading tasks"))
    with quiet():
        counts = {name: len(task.eval_docs) for members in rows.values() for name, task in members.items()}
    items = {name: spread(count, limit) for name, count in counts.items() if limit is not None and limit < count}
    return TaskSelection(rows=rows, items=items, limit=limit)


def score_tasks(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    selection: TaskSelection,
    *,
    batch: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> TaskScores:
    """Score `model` on loaded tasks; for arguments and errors see `evaluate_tasks`."""
    if batch < 1:
        raise OptionError(f"batch must be at least 1, not {batch}.")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise CheckpointError("the tokenizer has neither a bos nor an eos token, which tasks need: name one in it.")
    from lm_eval.evaluator import evaluate as run_harness  # pyright: ignore[reportMissingImports]

    from kvfold.evaluate.harness import HarnessModel, audible, quiet

    tasks = {name: task for members in selection.rows.values() for name, task in members.items()}
    with quiet():
        set_seed(seed)
        for task in tasks.values():
            if task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(seed)
        results: Any = run_harness(
            lm=HarnessModel(model, tokenizer, batch=batch, progress=audible(progress, "scoring answers")),
            task_dict={"tasks": tasks, "groups": {}, "group_map": {}},
            samples=selection.items,
            bootstrap_iters=0,  # the standard errors of fractions have a closed form
            log_samples=False,
        )
    scores = {row: _pooled([results["results"][name] for name in members]) for row, members in selection.rows.items()}
    return TaskScores(tasks=scores, limit=selection.limit, seed=seed)


def spread(count: int, limit: int) -> list[int]:
    """`limit` of the indices below `count`, evenly spread, in order."""
    return [index * count // limit for index in range(limit)]


def _pooled(results: list[dict[str, Any]]) -> TaskScore:
    """One score over the items of all `results`."""
    counts = [result["sample_len"] for result in results]
    items = sum(counts)

    def mean(metric: str) -> float | None:
        values = [_value(result, metric) for result in results]
        if None in values:
            return None
        return sum(count * value for count, value in zip(counts, values, strict=True)) / items

    accuracy, acc_norm = mean("acc"), mean("acc_norm")
    assert accuracy is not None
    score = accuracy if acc_norm is None else acc_norm
    error = math.sqrt(max(0.0, score * (1 - score)) / (items - 1)) if items > 1 else None
    return TaskScore(accuracy=accuracy, acc_norm=acc_norm, standard_error=error, items=items)


def _value(result: dict[str, Any], metric: str) -> Any:
    """The harness names a value after its metric and the filter of the answers, of which multiple choice has none."""
    return next((value for key, value in result.items() if key.split(",")[0] == metric), None)
