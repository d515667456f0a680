"""The loss of every step of a run, as JSON Lines that grow while it goes on."""

import json
from pathlib import Path
from typing import Any

from kvfold.checkpoint import write_text
from kvfold.errors import CheckpointError

CURVE_FILE = "curve.jsonl"


class Curve:
    """Rows of one run in `folder`; a resumed run drops those beyond the step it starts at."""

    def __init__(self, folder: Path, *, first: int = 0) -> None:
        self._path = folder / CURVE_FILE
        kept = [row for row in read_curve(folder) if row["step"] <= first] if self._path.exists() else []
        write_text(self._path, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's curve; a last line that a killed process left unfinished is left out.

    Raises:
        CheckpointError: the file is missing, or another line is damaged.
    """
    path = folder / CURVE_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the curve {path}: {error}; give the folder of a run.") from error
