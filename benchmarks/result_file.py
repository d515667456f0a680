"""Result files that fill up row by row: a run that was stopped goes on where it was."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvfold.checkpoint import write_json
from kvfold.provenance import provenance


class ResultFile:
    """Rows by name in one JSON file, written after each; rows that are there already are not measured again.

    Two processes may fill one file, each with rows of its own.
    """

    def __init__(self, path: Path, **facts: Any) -> None:
        self._path, self._facts = path, facts

    def __contains__(self, name: str) -> bool:
        return name in self._rows()

    def row(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row `name`, measured unless it is there."""
        if name not in self:
            measured = measure()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            origin = provenance(seed=0, command=_command())
            rows = self._rows() | {name: measured}
            write_json(self._path, {"facts": self._facts, "provenance": origin, "rows": rows})
        row = self._rows()[name]
        print(name, json.dumps(row)[:160], flush=True)
        return row

    def _rows(self) -> dict[str, Any]:
        stored = json.loads(self._path.read_text()) if self._path.exists() else {}
        return stored.get("rows", {}) if stored.get("facts") == self._facts else {}


def _command() -> str:
    """The command line without the folders of this machine."""
    script, *arguments = (Path(argument).name for argument in sys.argv)
    return " ".join(("python", f"benchmarks/{script}", *arguments))
