"""Progress of long work on stderr: bars on a terminal, one plain line per stage elsewhere."""

import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`; a stage begins when its name first appears."""


class Reporter:
    """A `Progress` that draws. It is a context manager; leaving it removes the bars."""

    def __init__(self) -> None:
        # The stream is looked up here, not by rich at import, so that a redirected stderr is respected.
        self._console = Console(file=sys.stderr)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> "Reporter":
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        # Stopping bars that never started would print an empty line.
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._stages:
            self._stages[stage] = self._bars.add_task(stage, total=total)
            if not self._console.is_terminal:
                print(f"{stage} ...", file=self._console.file, flush=True)
        self._bars.update(self._stages[stage], completed=done, total=total)
