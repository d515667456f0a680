"""Text files: how they are read, and the ones that the package ships (sources and licences in LICENSES.md)."""

from kvfold.texts.reading import check_vocabulary, read_slice, read_text, text_size, token_ids
from kvfold.texts.sharing import share_windows
from kvfold.texts.shipped import CALIBRATION, DEFAULT_TEXT, EVALUATION

__all__ = [
    "CALIBRATION",
    "DEFAULT_TEXT",
    "EVALUATION",
    "check_vocabulary",
    "read_slice",
    "read_text",
    "share_windows",
    "text_size",
    "token_ids",
]
