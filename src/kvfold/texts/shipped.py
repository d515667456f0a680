"""Where the shipped texts are."""

from importlib.resources import files
from pathlib import Path

DEFAULT_TEXT = "default"
"""What a user gives instead of a file to take a shipped text."""

_FOLDER = Path(str(files("kvfold.texts")))

CALIBRATION = _FOLDER / "calibration.txt"
"""About 600 kB of textbook prose from 15 subjects, in turns of about 4 kB, so that every prefix is broad."""

EVALUATION = _FOLDER / "evaluation.txt"
"""About 120 kB of a novel: another kind of text than the calibration text, on purpose."""
