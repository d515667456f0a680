"""How long work tells how far it is."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Called while work goes on; a stage begins when its name first appears."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """`done` of `total` parts of `stage`, and how it stands in words where there is something to say."""
        ...


def silent(stage: str, done: int, total: int, note: str = "") -> None:
    """Tells nobody."""
