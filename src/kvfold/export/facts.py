"""What an export tells of itself: beside the weights of a folder, among the metadata of a GGUF file."""

import json
from pathlib import Path
from typing import Any

import gguf

from kvfold.errors import OptionError

EXPORT_FILE = "kvfold-export.json"
GGUF_KEY = "kvfold.export"
KINDS = (("source", str), ("runtime", str), ("type", str), ("cached_elements", int))
"""Of what others read of it."""


def read_facts(path: Path) -> dict[str, Any]:
    """What `Export.to_dict` said of it; empty for a folder or a file that `export` did not make.

    Raises:
        OptionError: there is no export at `path`, or what it tells cannot be read.
    """
    if path.is_file() and path.suffix == ".gguf":
        text = _in_gguf(path)
    elif (path / "config.json").is_file():
        file = path / EXPORT_FILE
        text = file.read_text("utf-8", errors="replace") if file.is_file() else "{}"
    else:
        raise OptionError(f"{path} is no export, neither a folder with a config.json nor a .gguf file: make one first.")
    try:
        facts = json.loads(text)
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or any(key in facts and not isinstance(facts[key], kind) for key, kind in KINDS):
        raise OptionError(f"what {path} tells of itself is damaged: export it once more.")
    return facts


def _in_gguf(path: Path) -> str:
    try:
        field = gguf.GGUFReader(path).get_field(GGUF_KEY)
    except Exception as error:  # numpy's, struct's and its own, by where the file is damaged
        raise OptionError(f"{path} cannot be read as GGUF: export it once more.") from error
    return "{}" if field is None else str(field.contents())
