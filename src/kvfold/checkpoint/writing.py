"""Small files, written to a temporary name and renamed: a reader never sees half a file."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from kvfold.checkpoint.reasons import reason
from kvfold.errors import OutputError


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, replacing what was there in one step.

    Raises:
        OutputError: the folder of `path` is missing or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, in the way of `write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, in the way of `write_text`. NaN and infinities are not JSON: ValueError."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
