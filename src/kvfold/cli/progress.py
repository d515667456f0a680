"""Progress of long work on stderr: bars on a terminal, one plain line per stage elsewhere."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

NOTES = 10
"""How often a stage tells its note where there are no bars."""


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
            TextColumn("{task.fields[note]}"),
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

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        if stage not in self._stages:
            self._hide_finished()
            self._stages[stage] = self._bars.add_task(stage, total=total, note=note)
            self._print(f"{stage} ...")
        elif note and (done == total or done * NOTES // total > (done - 1) * NOTES // total):
            self._print(f"{stage} {done:,}/{total:,}: {note}")
        self._bars.update(self._stages[stage], completed=done, total=total, note=note)

    def _hide_finished(self) -> None:
        """Of many stages, such as the runs of a sweep, only those that go on are of interest."""
        for task in self._bars.tasks:
            if task.finished:
                self._bars.update(task.id, visible=False)

    def _print(self, line: str) -> None:
        if not self._console.is_terminal:
            print(line, file=self._console.file, flush=True)
