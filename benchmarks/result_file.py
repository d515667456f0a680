"""Result files that fill up row by row: a run that was stopped goes on where it was."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvfold.checkpoint import write_json
from kvfold.report import provenance


class ResultFile:
    """Rows by name in one JSON file, written after each; rows that are there already are not measured again."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self._path = path
        stored = json.loads(path.read_text()) if path.exists() else {}
        self._rows: dict[str, Any] = stored.get("rows", {}) if stored.get("facts") == facts else {}
        self._facts = facts

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def row(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row `name`, measured unless it is there."""
        if name not in self._rows:
            self._rows[name] = measure()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            origin = provenance(seed=0, command=_command())
            write_json(self._path, {"facts": self._facts, "provenance": origin, "rows": self._rows})
        print(name, json.dumps(self._rows[name])[:160], flush=True)
        return self._rows[name]


def _command() -> str:
    """The command line without the folders of this machine."""
    script, *arguments = (Path(argument).name for argument in sys.argv)
    return " ".join(("python", f"benchmarks/{script}", *arguments))
