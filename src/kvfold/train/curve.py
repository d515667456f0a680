"""The loss of every step of a run, as JSON Lines that grow while it goes on."""

import json
import os
from pathlib import Path
from typing import Any

from kvfold.checkpoint import reason, write_text
from kvfold.errors import CheckpointError, OutputError

CURVE_FILE, HELD_OUT_FILE = "curve.jsonl", "held_out.jsonl"
LARGEST = 1e18
"""Beyond every step, token count and loss; NaN is not below it."""
LONGEST_ROWS = 1000
"""Bytes that hold at least one row."""


class Curve:
    """Rows of one run in `folder`, each with its `step`; a resumed run drops those beyond the step `last`.

    With `writes` false, as in all processes of a run but one, nothing is written.
    """

    def __init__(self, folder: Path, name: str = CURVE_FILE, *, last: int = 0, writes: bool = True) -> None:
        self._path, self._writes = folder / name, writes
        self.rows = [row for row in read_curve(folder, name) if row["step"] <= last] if self._path.exists() else []
        if writes:
            write_text(self._path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if not self._writes:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise OutputError(
                f"cannot write {self._path}: {reason(error)}; make room, then go on with --resume."
            ) from error


def read_curve(folder: Path, name: str = CURVE_FILE) -> list[dict[str, Any]]:
    """The rows of a run's curve; a last line that a killed process left unfinished is left out.

    Raises:
        CheckpointError: the file is missing, or another line is damaged.
    """
    path = folder / name
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the curve {path}: {error}; give the folder of a run.") from error
    for number, row in enumerate(rows, start=1):
        if not _is_row(row):
            raise CheckpointError(f"line {number} of the curve {path} is damaged: {str(row)[:60]}")
    return rows


def _is_row(row: Any) -> bool:
    numbers = (row.get("step"), row.get("tokens"), row.get("loss")) if isinstance(row, dict) else (None,)
    return all(isinstance(number, int | float) and abs(number) < LARGEST for number in numbers)


def last_row(folder: Path) -> dict[str, Any] | None:
    """The last whole row of a curve that another process is writing; None where there is none yet."""
    try:
        with (folder / CURVE_FILE).open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - LONGEST_ROWS, 0))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
        return json.loads(lines[-1]) if lines else None
    except (OSError, ValueError):
        return None
