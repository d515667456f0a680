"""The folder of a training run and its checkpoints: begun, found again, or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

from kvfold.checkpoint import reason, refuse_other_content, write_json
from kvfold.errors import CheckpointError, OptionError, OutputError
from kvfold.provenance import provenance
from kvfold.train.curve import CURVE_FILE, read_curve

RUN_FILE = "run.json"
CHECKPOINT = "checkpoint"
FILES_FILE = "files.json"
"""In each checkpoint: the sizes of its files, by name."""


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in run.glob(f"{CHECKPOINT}-*") if path.name.removeprefix(f"{CHECKPOINT}-").isdecimal()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(f"{CHECKPOINT}-"))


def seal(checkpoint: Path) -> None:
    """Write down what belongs to a finished checkpoint."""
    write_json(checkpoint / FILES_FILE, _sizes(checkpoint))


def find_run(run: Path, key: dict[str, Any], *, resume: bool, overwrite: bool, source: Path | None) -> Path | None:
    """The checkpoint to go on from; None where a run begins. Changes nothing.

    Raises:
        OutputError: the folder holds something else, or a run that must not be lost.
        OptionError: the run in it is another one.
        CheckpointError: its settings cannot be read, or its last checkpoint or its curve is damaged.
    """
    refuse_other_content(run, RUN_FILE)
    if source is not None and (run.resolve() == source.resolve() or run.resolve() in source.resolve().parents):
        raise OutputError(f"{run} holds the model that is to be trained; give another folder.")
    if overwrite or not (run / RUN_FILE).exists():
        return None
    if not resume:
        steps = len(read_curve(run)) if (run / CURVE_FILE).exists() else 0
        raise OutputError(f"{run} holds a run of {steps} step(s): go on with --resume, or start anew with --overwrite.")
    _check_same(run, _stored_key(run), key)
    last = next(reversed(checkpoints(run)), None)
    if last is not None:
        _check_whole(run, last)
    return last


def begin_run(run: Path, key: dict[str, Any], *, overwrite: bool) -> None:
    """Make the folder of a run, in place of an old one with `overwrite`.

    Raises:
        OutputError: it cannot be made.
    """
    try:
        if overwrite and run.exists():
            shutil.rmtree(run)
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create {run}: {reason(error)}; give a place you can write to") from error
    write_json(run / RUN_FILE, {"key": key, "provenance": provenance(seed=key["options"]["seed"])})


def _stored_key(run: Path) -> dict[str, Any]:
    try:
        key = json.loads((run / RUN_FILE).read_text("utf-8"))["key"]
        return key | {"model": key["model"], "options": dict(key["options"]), "inputs": dict(key["inputs"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{run / RUN_FILE} is damaged ({error!r}): start anew with --overwrite.") from None


def _check_whole(run: Path, last: Path) -> None:
    """Refuse to go on from what a crash of the machine or a hand has damaged."""
    try:
        written = dict(json.loads((last / FILES_FILE).read_text("utf-8"))) or {FILES_FILE: 0}
    except (OSError, ValueError, TypeError):
        written = {FILES_FILE: 0}
    found = _sizes(last)
    if damaged := [name for name, size in written.items() if found.get(name) != size]:
        raise CheckpointError(
            f"{last / damaged[0]} is missing or damaged: remove the folder {last.name} to go on from the checkpoint "
            "before it, or start anew with --overwrite."
        )
    steps = len(read_curve(run)) if (run / CURVE_FILE).exists() else 0
    if steps < step_of(last):
        raise CheckpointError(
            f"{run / CURVE_FILE} has {steps} of the {step_of(last)} steps of {last.name}: start anew with --overwrite."
        )


def _sizes(folder: Path) -> dict[str, int]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != FILES_FILE]
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}


def _check_same(run: Path, stored: dict[str, Any], key: dict[str, Any]) -> None:
    if stored["model"] != key["model"]:
        raise OptionError(f"the run in {run} is of another model: give that model, or another folder.")
    for name, value in key["options"].items():
        if (before := stored["options"].get(name)) != value:
            raise OptionError(f"the run in {run} has {name} {before}, not {value}: give the same, or another folder.")
    for name, value in key["inputs"].items():
        if stored["inputs"].get(name) != value:
            raise OptionError(f"{name} is not what the run in {run} began with: restore it, or give another folder.")
