"""Text files: the ones that the package ships (sources and licences in LICENSES.md beside them), and how they are read."""

from kvfold.texts.reading import read_text, token_ids
from kvfold.texts.shipped import CALIBRATION, EVALUATION

__all__ = ["CALIBRATION", "EVALUATION", "read_text", "token_ids"]
