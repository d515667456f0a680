"""The folder of a training run and its checkpoints: begun, found again, or refused."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvfold.checkpoint import new_folder, refuse_other_content, sha256_of, write_json
from kvfold.errors import CheckpointError, OptionError, OutputError
from kvfold.provenance import provenance
from kvfold.train.curve import CURVE_FILE, HELD_OUT_FILE, read_curve

RUN_FILE = "run.json"
CHECKPOINT = "checkpoint"
FILES_FILE = "files.json"
"""In each checkpoint: SHA-256 of its files, by name."""


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in run.glob(f"{CHECKPOINT}-*") if path.name.removeprefix(f"{CHECKPOINT}-").isdecimal()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(f"{CHECKPOINT}-"))


def seal(checkpoint: Path) -> None:
    """Write down what belongs to a finished checkpoint."""
    write_json(checkpoint / FILES_FILE, _hashes(checkpoint))


def find_run(
    run: Path, key: dict[str, Any], *, resume: bool, overwrite: bool, read: Iterable[str | Path | None] = ()
) -> Path | None:
    """The checkpoint to go on from; None where a run begins. Changes nothing.

    Args:
        read: what the run reads, files and folders if they are that, which its own folder must not hold.

    Raises:
        OutputError: the folder holds something else, or a run that must not be lost.
        OptionError: the run in it is another one.
        CheckpointError: its settings cannot be read, or its last checkpoint or its curve is damaged.
    """
    refuse_other_content(run, RUN_FILE)
    for path in read:
        if path is not None and run.resolve() in (Path(path).resolve(), *Path(path).resolve().parents):
            raise OutputError(f"{run} holds {path}, which the run reads; give another folder.")
    if overwrite or not (run / RUN_FILE).exists():
        return None
    if not resume:
        steps = len(read_curve(run)) if (run / CURVE_FILE).exists() else 0
        raise OutputError(f"{run} holds a run of {steps} step(s): go on with --resume, or start anew with --overwrite.")
    _check_same(run, _stored_key(run), key)
    last = next(reversed(checkpoints(run)), None)
    if last is not None:
        _check_whole(run, last, measured=key["options"]["held_out"] is not None)
    return last


def begin_run(run: Path, key: dict[str, Any], *, overwrite: bool) -> None:
    """Make the folder of a run, in place of an old one with `overwrite`; a begun one stays as it is.

    Raises:
        OutputError: it cannot be made.
    """
    if overwrite or not (run / RUN_FILE).exists():
        with new_folder(run) as folder:
            write_json(folder / RUN_FILE, {"key": key, "provenance": provenance(seed=key["options"]["seed"])})


def _stored_key(run: Path) -> dict[str, Any]:
    try:
        key = json.loads((run / RUN_FILE).read_text("utf-8"))["key"]
        return key | {"model": key["model"], "options": dict(key["options"]), "inputs": dict(key["inputs"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{run / RUN_FILE} is damaged ({error!r}): start anew with --overwrite.") from None


def _check_whole(run: Path, last: Path, *, measured: bool) -> None:
    """Refuse to go on from what a crash of the machine or a hand has damaged."""
    try:
        written = dict(json.loads((last / FILES_FILE).read_text("utf-8"))) or {FILES_FILE: 0}
    except (OSError, ValueError, TypeError):
        written = {FILES_FILE: 0}
    found = _hashes(last)
    if damaged := [name for name, sha256 in written.items() if found.get(name) != sha256]:
        raise CheckpointError(
            f"{last / damaged[0]} is missing or damaged: remove the folder {last.name} to go on from the checkpoint "
            "before it, or start anew with --overwrite."
        )
    steps = _steps(run, CURVE_FILE)
    if steps[: step_of(last)] != list(range(1, step_of(last) + 1)):
        raise CheckpointError(
            f"{run / CURVE_FILE} lacks some of the {step_of(last)} steps of {last.name}: start anew with --overwrite."
        )
    if measured and _steps(run, HELD_OUT_FILE)[:1] != [0]:
        raise CheckpointError(f"{run / HELD_OUT_FILE} lacks its first measurement: start anew with --overwrite.")


def _steps(run: Path, file: str) -> list[int]:
    return [row["step"] for row in read_curve(run, file)] if (run / file).exists() else []


def _hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != FILES_FILE]
    return {str(path.relative_to(folder)): sha256_of(path) for path in sorted(files)}


def _check_same(run: Path, stored: dict[str, Any], key: dict[str, Any]) -> None:
    if stored["model"] != key["model"]:
        raise OptionError(f"the run in {run} is of another model: give that model, or another folder.")
    for name, value in key["options"].items():
        if (before := stored["options"].get(name)) != value:
            raise OptionError(f"the run in {run} has {name} {before}, not {value}: give the same, or another folder.")
    for name, value in key["inputs"].items():
        if stored["inputs"].get(name) != value:
            raise OptionError(f"{name} is not what the run in {run} began with: restore it, or give another folder.")
