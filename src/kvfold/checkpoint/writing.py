"""Small text files, written to a temporary name and renamed: a reader never sees half a file."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from kvfold.checkpoint.reasons import reason
from kvfold.errors import OutputError


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path`, replacing what was there in one step.

    Raises:
        OutputError: the folder of `path` is missing or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, in the way of `write_text`. NaN and infinities are not JSON: ValueError."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
