"""The part that talks to lm-eval, an optional dependency: import it only where tasks are evaluated."""

import contextlib
import copy
import difflib
import io
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets.config  # pyright: ignore[reportMissingImports]
from lm_eval.api.task import Task  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from kvfold.errors import OptionError, UnknownNameError
from kvfold.evaluate.continuations import score_continuations
from kvfold.progress import Progress

Tasks = dict[str, dict[str, Task]]
"""For each row of the result the tasks in it by their names: several where the row is a group of the harness."""

StageProgress = Callable[[int, int], None]
"""`Progress` within one stage: called with what is done and what there is in all."""

LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "httpx")


_HFLM: Any = HFLM  # its decorator hides its type


class HarnessModel(_HFLM):
    """A loaded model for the harness, whose own tokenisation it keeps; only the scoring differs, see
    `score_continuations`."""

    def __init__(self, model: Any, tokenizer: Any, *, batch: int, progress: StageProgress) -> None:
        # The harness may add a padding token, which the caller's tokenizer must not get.
        super().__init__(pretrained=model, tokenizer=copy.deepcopy(tokenizer), backend="causal", batch_size=batch)
        self._progress = progress

    def _loglikelihood_tokens(self, requests: Sequence[Any], *_: Any, **__: Any) -> list[tuple[float, bool]]:
        scores = score_continuations(
            self.model,
            [(context, continuation) for _, context, continuation in requests],
            max_length=self.max_length,
            batch=self.batch_size,
            progress=self._progress,
        )
        return [(score.log_likelihood, score.is_greedy) for score in scores]


def load_tasks(names: Sequence[str], folder: Path | None, progress: StageProgress) -> Tasks:
    """The tasks called `names`, from the YAML files in `folder` or, without one, from the harness's own collection.

    Raises:
        UnknownNameError: there is no such task; the message has near names.
        OptionError: the folder holds no tasks, or a task cannot be loaded.
    """
    rows: Tasks = {}
    progress(0, len(names))
    with quiet():
        if folder is None:
            manager = TaskManager()  # reads some ten thousand files
            known, load = manager.all_tasks, lambda name: manager.load([name])
        else:
            manager = TaskManager(include_path=folder, include_defaults=False)
            known, load = manager.all_subtasks, lambda name: _load_local(manager, name, folder)
        if not known:
            raise OptionError(
                f"{folder} holds no task of the harness: give a folder of YAML files with a 'task' entry."
            )
        for name in names:
            _check_name(name, known)
        for done, name in enumerate(names, start=1):
            rows |= _rows(name, _load(name, load))
            progress(done, len(names))
    return rows


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the bars, prints and logs of the harness and of what it loads with."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    counted = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # or local files would be reported to the hub
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counted
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def audible(progress: Progress | None, stage: str) -> StageProgress:
    """`progress` for one stage, which may write to the streams that `quiet` takes away; None reports to nobody."""
    out, err = sys.stdout, sys.stderr

    def report(done: int, total: int) -> None:
        if progress is not None:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                progress(stage, done, total)

    return report


def _check_name(name: str, known: Sequence[str]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=5)
        near = list(dict.fromkeys([*close, *(other for other in known if name in other)]))[:5]
        listed = near or list(known)[:20]
        raise UnknownNameError(
            f"unknown task {name!r}. {'Near names' if near else 'Some that are known'}: {', '.join(listed)}."
        )


def _load(name: str, load: Callable[[str], Any]) -> Any:
    try:
        return load(name)
    except OptionError:
        raise
    except Exception as error:  # task files hold templates and code, which fail in every way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OptionError(f"task {name!r} cannot be loaded: {reason}") from error


def _rows(name: str, loaded: Any) -> Tasks:
    for task in loaded["tasks"].values():
        if "acc" not in task.aggregation():
            measured = ", ".join(task.aggregation())
            raise OptionError(f"task {task.task_name!r} measures {measured}, not accuracy (acc): leave it out.")
    # A tag, such as ai2_arc, is shorthand for its tasks; a group, such as mmlu, is one benchmark.
    return (
        {name: loaded["tasks"]} if loaded["groups"] else {name: {name: task} for name, task in loaded["tasks"].items()}
    )


def _load_local(manager: TaskManager, name: str, folder: Path) -> Any:
    """Load a task whose data lies beside it, by a YAML file that includes the task's own and names the data in full."""
    entry = manager.task_index[name]
    assert entry.yaml_path is not None and entry.cfg is not None
    with tempfile.TemporaryDirectory() as temporary:
        options = dict(entry.cfg.get("dataset_kwargs") or {})
        if "data_files" in options:
            places = dict.fromkeys(path.resolve() for path in (entry.yaml_path.parent, folder, folder.resolve().parent))
            options["data_files"] = _located(options["data_files"], list(places))
            # Read afresh, so that an edited file counts, and nothing stays behind.
            options |= {"cache_dir": temporary, "keep_in_memory": True}
        # JSON is YAML.
        values = {"include": str(entry.yaml_path.resolve()), "task": name, "dataset_kwargs": options}
        path = Path(temporary) / "task.yaml"
        path.write_text(json.dumps(values), "utf-8")
        return manager.load([str(path)])


def _located(files: Any, places: list[Path]) -> Any:
    """`files`, a path or pattern, or a list or dict of them, with the folder they are found in."""
    if isinstance(files, dict):
        return {split: _located(value, places) for split, value in files.items()}
    if isinstance(files, list):
        return [_located(value, places) for value in files]
    if "://" in files or Path(files).is_absolute():
        return files
    for place in places:
        if any(place.glob(files)):
            return str(place / files)
    raise OptionError(f"data file {files} is neither in {' nor in '.join(map(str, places))}: put it there.")
